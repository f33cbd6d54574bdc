"""The 27 tools of the office: a call takes a state and gives the next one and the value that the model is shown.

Whatever a model writes is answered: an unknown tool, an argument of a wrong type, one that is too long or too deep,
each with a text that says so and no change. A call takes time in proportion to the tables and to its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recipes.environments.office import analytics, customers, events, mail, projects
from recipes.environments.office.tables import Office

MAX_TEXT = 20_000  # characters of one argument; a longer one is refused
MAX_CHANGES = 1_000  # of one office; a later call changes nothing, so that no rollout can fill the memory

READS: Mapping[str, Callable[..., Any]] = {
    "company_directory_find_email_address": mail.find_address,
    "email_get_email_information_by_id": mail.get_email,
    "email_search_emails": mail.search_emails,
    "calendar_get_event_information_by_id": events.get_event,
    "calendar_search_events": events.search_events,
    "analytics_get_visitor_information_by_id": analytics.get_visitor,
    "analytics_total_visits_count": analytics.count_visits,
    "analytics_engaged_users_count": analytics.count_engaged,
    "analytics_traffic_source_count": analytics.count_from_source,
    "analytics_get_average_session_duration": analytics.average_duration,
    "project_management_get_task_information_by_id": projects.get_task,
    "project_management_search_tasks": projects.search_tasks,
    "customer_relationship_manager_search_customers": customers.search_customers,
}
CHANGES: Mapping[str, Callable[..., tuple[Office, str]]] = {
    "email_send_email": mail.send_email,
    "email_delete_email": mail.delete_email,
    "email_forward_email": mail.forward_email,
    "email_reply_email": mail.reply_email,
    "calendar_create_event": events.create_event,
    "calendar_delete_event": events.delete_event,
    "calendar_update_event": events.update_event,
    "analytics_create_plot": analytics.create_plot,
    "project_management_create_task": projects.create_task,
    "project_management_delete_task": projects.delete_task,
    "project_management_update_task": projects.update_task,
    "customer_relationship_manager_update_customer": customers.update_customer,
    "customer_relationship_manager_add_customer": customers.add_customer,
    "customer_relationship_manager_delete_customer": customers.delete_customer,
}
_NAMED = {customers.search_customers: customers.SEARCHED, customers.add_customer: customers.ADDED}
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
