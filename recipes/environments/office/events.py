"""The office's calendar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.environments.office.reading import contains, page_of, read_time
from recipes.environments.office.tables import Cell, Office

FIELDS = ("event_id", "event_name", "participant_email", "event_start", "duration")
_BAD_ID = "Invalid event ID format. Expected 8-digit ID."


def get_event(office: Office, event_id: Cell = None, field: Cell = None) -> Any:
    """Return one field of an event."""
    if not event_id:
        return "Event ID not provided."
    if not field:
        return "Field not provided."
    if not _is_id(event_id):
        return _BAD_ID
    if field not in FIELDS:
        return f"Invalid field. Available fields are: {', '.join(FIELDS)}"
    event = office.events.find("event_id", event_id)
    return "Event not found." if event is None else {field: event[str(field)]}


def search_events(
    office: Office, query: str = "", time_min: Cell = None, time_max: Cell = None, page: Cell = 1, page_size: Cell = 5
) -> Any:
    """Return a page of the events whose name or participant contains the query, latest first."""
    bounds = []
    for key, value in (("time_min", time_min), ("time_max", time_max)):
        try:
            bounds.append(read_time(value) if value else None)
        except ValueError:
            return f"Invalid {key} format. Expected YYYY-MM-DD HH:MM:SS."
    first, last = bounds
    found = [
        (read_time(event["event_start"]), event)
        for event in office.events.records
        if contains(event["event_name"], query) or contains(event["participant_email"], query)
    ]
    found = [(start, event) for start, event in found if (not first or start >= first) and (not last or start <= last)]
    found.sort(key=lambda pair: pair[0], reverse=True)
    events = page_of("events", [event for _, event in found], page, page_size)
    return events if found else "No events found."


def create_event(
    office: Office,
    event_name: Cell = None,
    participant_email: Any = None,
    event_start: Cell = None,
    duration: Any = None,
) -> tuple[Office, str]:
    """Add an event; its start and duration are kept as they were written."""
    given = {"Event name": event_name, "Participant email": participant_email, "Event start": event_start}
    for name, value in {**given, "Event duration": duration}.items():
        if not value:
            return office, f"{name} not provided."
    if problem := _wrong_start(event_start) or _wrong_duration(duration):
        return office, problem
    event_id = str(office.events.next_id("event_id")).zfill(8)
    cells = (event_id, event_name, participant_email.lower(), event_start, duration)
    event = dict(zip(FIELDS, cells, strict=True))
    return replace(office, events=office.events.appended(event, is_renumbered=False)), event_id


def delete_event(office: Office, event_id: Cell = None) -> tuple[Office, str]:
    """Delete one event."""
    if not event_id:
        return office, "Event ID not provided."
    if not _is_id(event_id):
        return office, _BAD_ID
    if office.events.find("event_id", event_id) is None:
        return office, "Event not found."
    return replace(office, events=office.events.without("event_id", event_id)), "Event deleted successfully."


def update_event(
    office: Office, event_id: Cell = None, field: Cell = None, new_value: Any = None
) -> tuple[Office, str]:
    """Change one field of an event."""
    if not event_id or not field or not new_value:
        return office, "Event ID, field, or new value not provided."
    if not _is_id(event_id):
        return office, _BAD_ID
    if field not in FIELDS[1:]:
        return office, f"Invalid field. Available fields are: {', '.join(FIELDS[1:])}"
    check = {"event_start": _wrong_start, "duration": _wrong_duration}.get(str(field))
    if check is not None and (problem := check(new_value)):
        return office, problem
    if office.events.find("event_id", event_id) is None:
        return office, "Event not found."
    value = new_value.lower() if field == "participant_email" else new_value
    events = office.events.changed("event_id", event_id, field=str(field), to=value)
    return replace(office, events=events), "Event updated successfully."


def _is_id(value: Cell) -> bool:
    return isinstance(value, str) and len(value) == 8 and value.isdigit()


def _wrong_start(value: Cell) -> str:
    try:
        read_time(value)
    except ValueError:
        return "Invalid event_start format. Expected YYYY-MM-DD HH:MM:SS."
    return ""


def _wrong_duration(value: Any) -> str:
    try:
        return "" if int(value) > 0 else "Duration must be a positive number of minutes."
    except ValueError:
        return "Invalid duration format. Expected a number of minutes."
