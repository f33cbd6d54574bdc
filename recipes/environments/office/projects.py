"""The tasks of the office's projects."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from recipes.environments.office.reading import contains
from recipes.environments.office.tables import Cell, Office

LISTS = ("Backlog", "In Progress", "In Review", "Completed")
BOARDS = ("Back end", "Front end", "Design")
_BAD_LIST = "List not valid. Please choose from: 'Backlog', 'In Progress', 'In Review', 'Completed'."
_BAD_BOARD = "Board not valid. Please choose from: 'Back end', 'Front end', 'Design'."
_BAD_ASSIGNEE = "Assignee email not valid. Please choose from the list of team members."


def get_task(office: Office, task_id: Cell = None, field: Cell = None) -> Any:
    """Return one field of a task."""
    if not task_id:
        return "Task ID not provided."
    if not field:
        return "Field not provided."
    task = office.tasks.find("task_id", task_id)
    if task is None:
        return "Task not found."
    return {field: task[str(field)]} if field in task else "Field not found."


def search_tasks(
    office: Office,
    task_name: Any = None,
    assigned_to_email: Any = None,
    list_name: Any = None,
    due_date: Any = None,
    board: Any = None,
) -> Any:
    """Return the tasks that contain every text given; the assignee must be equal."""
    texts = {"task_name": task_name, "list_name": list_name, "due_date": due_date, "board": board}
    texts = {column: text for column, text in texts.items() if text}
    if not texts and not assigned_to_email:
        return "No search parameters provided."
    if assigned_to_email and not _is_address(assigned_to_email):
        return "Invalid email format for assigned_to_email."
    assignee = assigned_to_email.lower() if assigned_to_email else None
    return [
        dict(task)
        for task in office.tasks.records
        if all(contains(task[column], text) for column, text in texts.items())
        and assignee in (None, str(task["assigned_to_email"]).lower())
    ]


def create_task(
    office: Office,
    task_name: Cell = None,
    assigned_to_email: Any = None,
    list_name: Cell = None,
    due_date: Cell = None,
    board: Cell = None,
) -> tuple[Office, str]:
    """Add a task for somebody who has one already."""
    if not all([task_name, assigned_to_email, list_name, due_date, board]):
        return office, "Missing task details."
    assignee = assigned_to_email.lower()
    checked = {"assigned_to_email": assignee, "list_name": list_name, "board": board}
    for field, value in checked.items():
        if problem := _wrong_value(office, field, value):
            return office, problem
    task = {
        "task_id": str(office.tasks.next_id("task_id")).zfill(8),
        "task_name": task_name,
        "assigned_to_email": assignee,
        "list_name": list_name,
        "due_date": due_date,
        "board": board,
    }
    return replace(office, tasks=office.tasks.appended(task, is_renumbered=True)), task["task_id"]


def delete_task(office: Office, task_id: Cell = None) -> tuple[Office, str]:
    """Delete one task."""
    if not task_id:
        return office, "Task ID not provided."
    if office.tasks.find("task_id", task_id) is None:
        return office, "Task not found."
    return replace(office, tasks=office.tasks.without("task_id", task_id)), "Task deleted successfully."


def update_task(office: Office, task_id: Cell = None, field: Cell = None, new_value: Any = None) -> tuple[Office, str]:
    """Change one field of a task, its id included."""
    if not task_id or not field or not new_value:
        return office, "Task ID, field, or new value not provided."
    value = new_value.lower() if field == "assigned_to_email" else new_value
    if problem := _wrong_value(office, field, value):
        return office, problem
    task = office.tasks.find("task_id", task_id)
    if task is None:
        return office, "Task not found."
    if field not in task:
        return office, "Field not valid."
    tasks = office.tasks.changed("task_id", task_id, field=str(field), to=value)
    return replace(office, tasks=tasks), "Task updated successfully."


def _wrong_value(office: Office, field: Cell, value: Cell) -> str:
    """Return why a field cannot have a value; "" when it can, and for fields that take any."""
    if field == "list_name":
        return "" if value in LISTS else _BAD_LIST
    if field == "board":
        return "" if value in BOARDS else _BAD_BOARD
    if field == "assigned_to_email":
        is_known = any(str(task["assigned_to_email"]).lower() == value for task in office.tasks.records)
        return "" if is_known else _BAD_ASSIGNEE
    return ""


def _is_address(text: str) -> bool:
    name, _, host = text.rpartition("@")
    domain, _, top = host.rpartition(".")
    parts = ((r"[A-Za-z0-9._%+-]+", name), (r"[A-Za-z0-9.-]+", domain), (r"[A-Za-z]{2,}", top))
    return all(re.fullmatch(pattern, part) for pattern, part in parts)
