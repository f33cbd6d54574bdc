"""The 27 tools of the office: a call takes a state and gives the next one and the value that the model is shown.

Whatever a model writes is answered: an unknown tool, an argument of a wrong type, one that is too long or too deep,
each with a text that says so and no change. A call takes time in proportion to the tables and to its arguments.

The visits to the office's web site, and plots of them, of which only the paths exist.

The office's customers.

The tasks of the office's projects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recipes.environments.verifiers.office import mail
from recipes.environments.verifiers.office.tables import Cell, Office, Record, contains, page_of

VALUES = (
    "total_visits",
    "session_duration_seconds",
    "user_engaged",
    "visits_direct",
    "visits_referral",
    "visits_search_engine",
    "visits_social_media",
)
PLOTS = ("bar", "line", "scatter", "histogram")


def get_visitor(office: Office, visitor_id: Cell = None) -> Any:
    """Return the visits of a visitor."""
    if not visitor_id:
        return "Visitor ID not provided."
    visits = [record for record in office.visits.records if record["visitor_id"] == visitor_id]
    return [{**visit, "user_engaged": _is_engaged(visit)} for visit in visits] or "Visitor not found."


def create_plot(
    office: Office,
    time_min: Cell = None,
    time_max: Cell = None,
    value_to_plot: Cell = None,
    plot_type: Cell = None,
) -> tuple[Office, str]:
    """Note one plot; nothing is drawn."""
    if not time_min:
        return office, "Start date not provided."
    if not time_max:
        return office, "End date not provided."
    if value_to_plot not in VALUES:
        return office, f"Value to plot must be one of {', '.join(repr(value) for value in VALUES)}"
    if plot_type not in PLOTS:
        return office, "Plot type must be one of 'bar', 'line', 'scatter', or 'histogram'"
    path = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
    return replace(office, plots=(*office.plots, path)), path


def count_visits(office: Office, time_min: Any = None, time_max: Any = None) -> Any:
    """Return the number of visits of each day."""
    return {day: len(visits) for day, visits in _days(office, time_min, time_max).items()}


def count_engaged(office: Office, time_min: Any = None, time_max: Any = None) -> Any:
    """Return the number of engaged users of each day."""
    return {day: sum(map(_is_engaged, visits)) for day, visits in _days(office, time_min, time_max).items()}


def count_from_source(office: Office, time_min: Any = None, time_max: Any = None, traffic_source: Cell = None) -> Any:
    """Return the number of visits of each day that came from a source, of all when none is named."""
    days = _days(office, time_min, time_max)
    if not traffic_source:
        return {day: len(visits) for day, visits in days.items()}
    return {day: sum(visit["traffic_source"] == traffic_source for visit in visits) for day, visits in days.items()}


def average_duration(office: Office, time_min: Any = None, time_max: Any = None) -> Any:
    """Return the mean duration of each day's visits, in seconds."""
    days = _days(office, time_min, time_max)
    seconds = {day: [float(str(visit["session_duration_seconds"])) for visit in days[day]] for day in days}
    return {day: sum(values) / len(values) for day, values in seconds.items()}


def _days(office: Office, time_min: str | None, time_max: str | None) -> Mapping[str, list[Record]]:
    """Return the visits by day, in order of days; dates are compared as texts."""
    days: dict[str, list[Record]] = {}
    for visit in office.visits.records:
        day = str(visit["date_of_visit"])
        if (not time_min or day >= time_min) and (not time_max or day <= time_max):
            days.setdefault(day, []).append(visit)
    return dict(sorted(days.items()))


def _is_engaged(visit: Record) -> bool:
    return visit["user_engaged"] == "True"


STATUSES = ("Qualified", "Won", "Lost", "Lead", "Proposal")
PRODUCTS = ("Software", "Hardware", "Services", "Consulting", "Training")
_TEXTS = ("customer_name", "customer_email", "product_interest", "status", "assigned_to_email")
_BOUNDS = {  # argument -> column, whether it is the lower bound
    "last_contact_date_min": ("last_contact_date", True),
    "last_contact_date_max": ("last_contact_date", False),
    "follow_up_by_min": ("follow_up_by", True),
    "follow_up_by_max": ("follow_up_by", False),
}
SEARCHED = (*_TEXTS, *_BOUNDS, "page", "page_size")
ADDED = (
    "customer_name",
    "assigned_to_email",
    "status",
    "customer_email",
    "customer_phone",
    "last_contact_date",
    "product_interest",
    "notes",
    "follow_up_by",
)


def search_customers(office: Office, **arguments: Any) -> Any:
    """Return a page of the customers that contain every text given and lie within every bound."""
    page, page_size = arguments.pop("page", 1), arguments.pop("page_size", 5)
    wanted = {name: value for name, value in arguments.items() if value}
    if not wanted:
        return "No search parameters provided. Please provide at least one parameter."
    found = [record for record in office.customers.records if _matches(record, wanted)]
    customers = page_of("customers", found, page, page_size)
    return customers if found else "No customers found."


def _matches(record: Record, wanted: dict[str, Any]) -> bool:
    for name, value in wanted.items():
        if name not in _BOUNDS:
            if not contains(record[name], value):
                return False
            continue
        column, is_lower = _BOUNDS[name]
        cell = record[column]
        if not isinstance(cell, str) or (cell < value if is_lower else cell > value):
            return False
    return True


def update_customer(
    office: Office, customer_id: Cell = None, field: Cell = None, new_value: Any = None
) -> tuple[Office, str]:
    """Change one field of a customer, the id included."""
    if not customer_id or not field or not new_value:
        return office, "Customer ID, field, or new value not provided."
    if field == "status" and new_value not in STATUSES:
        return office, f"Status not valid. Please choose from: {_quoted(STATUSES)}"
    if field == "product_interest" and new_value not in PRODUCTS:
        return office, f"Product interest not valid. Please choose from: {_quoted(PRODUCTS)}"
    value = new_value.lower() if field in ("customer_email", "assigned_to_email") else new_value
    customer = office.customers.find("customer_id", customer_id)
    if customer is None:
        return office, "Customer not found."
    if field not in customer:
        fields = ("customer_name", "assigned_to_email", *ADDED[3:7], "status", "notes", "follow_up_by")
        return office, f"Field not valid. Please choose from: {_quoted(fields)}"
    customers = office.customers.changed("customer_id", customer_id, field=str(field), to=value)
    return replace(office, customers=customers), "Customer updated successfully."


def add_customer(office: Office, **arguments: Any) -> tuple[Office, str]:
    """Add a customer; the status may be any, unlike that of an update."""
    if not all(arguments.get(name) for name in ADDED[:3]):
        return office, "Please provide all required fields: customer_name, assigned_to_email, status."
    given = {**dict.fromkeys(ADDED), "notes": "", **arguments}
    given["assigned_to_email"] = given["assigned_to_email"].lower()
    if given["customer_email"]:
        given["customer_email"] = given["customer_email"].lower()
    customer_id = str(office.customers.next_id("customer_id")).zfill(8)
    given["customer_id"] = customer_id
    columns = office.customers.records[0]
    customer = {column: given[column] for column in columns}
    return replace(office, customers=office.customers.appended(customer, is_renumbered=True)), customer_id


def delete_customer(office: Office, customer_id: Cell = None) -> tuple[Office, str]:
    """Delete one customer."""
    if not customer_id:
        return office, "Customer ID not provided."
    if office.customers.find("customer_id", customer_id) is None:
        return office, "Customer not found."
    customers = office.customers.without("customer_id", customer_id)
    return replace(office, customers=customers), "Customer deleted successfully."


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


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


MAX_TEXT = 20_000  # characters of one argument; a longer one is refused
MAX_CHANGES = 1_000  # of one office; a later call changes nothing, so that no rollout can fill the memory

READS: Mapping[str, Callable[..., Any]] = {
    "company_directory_find_email_address": mail.find_address,
    "email_get_email_information_by_id": mail.get_email,
    "email_search_emails": mail.search_emails,
    "calendar_get_event_information_by_id": mail.get_event,
    "calendar_search_events": mail.search_events,
    "analytics_get_visitor_information_by_id": get_visitor,
    "analytics_total_visits_count": count_visits,
    "analytics_engaged_users_count": count_engaged,
    "analytics_traffic_source_count": count_from_source,
    "analytics_get_average_session_duration": average_duration,
    "project_management_get_task_information_by_id": get_task,
    "project_management_search_tasks": search_tasks,
    "customer_relationship_manager_search_customers": search_customers,
}
CHANGES: Mapping[str, Callable[..., tuple[Office, str]]] = {
    "email_send_email": mail.send_email,
    "email_delete_email": mail.delete_email,
    "email_forward_email": mail.forward_email,
    "email_reply_email": mail.reply_email,
    "calendar_create_event": mail.create_event,
    "calendar_delete_event": mail.delete_event,
    "calendar_update_event": mail.update_event,
    "analytics_create_plot": create_plot,
    "project_management_create_task": create_task,
    "project_management_delete_task": delete_task,
    "project_management_update_task": update_task,
    "customer_relationship_manager_update_customer": update_customer,
    "customer_relationship_manager_add_customer": add_customer,
    "customer_relationship_manager_delete_customer": delete_customer,
}
_NAMED = {search_customers: SEARCHED, add_customer: ADDED}
ARGUMENTS: Mapping[str, tuple[str, ...]] = {  # tool -> the names of its arguments
    name: _NAMED.get(tool) or tuple(inspect.signature(tool).parameters)[1:]
    for name, tool in {**READS, **CHANGES}.items()
}


def call(office: Office, name: str, arguments: Mapping[str, Any]) -> tuple[Office, Any]:
    """Call one tool; a failed call gives the same office and a text that says why."""
    try:
        _check(name, arguments)
        if name in READS:
            return office, READS[name](office, **arguments)
        if office.num_changes >= MAX_CHANGES:
            raise ValueError(f"the office takes no more than {MAX_CHANGES} changes")
        after, answer = CHANGES[name](office, **arguments)
        return office if after is office else replace(after, num_changes=office.num_changes + 1), answer
    except Exception as error:  # a value of a type that a tool does not expect; the model can correct itself
        return office, f"Error executing tool '{name[:100]}': {error}"


def _check(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a call that no tool can take."""
    if name not in ARGUMENTS:
        raise ValueError("there is no such tool")
    for key, value in arguments.items():
        if key not in ARGUMENTS[name]:
            raise ValueError(f"got an unexpected argument '{key[:100]}', expected {', '.join(ARGUMENTS[name])}")
        if isinstance(value, list | dict):
            raise ValueError(f"argument '{key}': got a {type(value).__name__}, expected a text or a number")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise ValueError(f"argument '{key}': got {len(value)} characters, expected {MAX_TEXT} at most")
