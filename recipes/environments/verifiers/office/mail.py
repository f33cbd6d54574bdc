"""The office's address book and its emails.

The office's calendar.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.environments.verifiers.office.tables import NOW, Cell, Office, Record, contains, page_of, read_time

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


def find_address(office: Office, name: str = "") -> Any:
    """Return the addresses that contain a name."""
    if name == "":
        return "Name not provided."
    name = name.lower()
    return [address for address in office.addresses if name in address.lower()]


def get_email(office: Office, email_id: Cell = None, field: Cell = None) -> Any:
    """Return one field of an email."""
    if not email_id:
        return "Email ID not provided."
    if not field:
        return "Field not provided."
    email = office.emails.find("email_id", email_id)
    if email is None:
        return "Email not found."
    if field not in email:
        return f"Field '{field}' not found. Available fields: {', '.join(email)}"
    return {field: email[str(field)]}


def search_emails(
    office: Office, query: str = "", date_min: Cell = None, date_max: Cell = None, page: Cell = 1, page_size: Cell = 5
) -> Any:
    """Return a page of the emails that contain every word of the query, newest first."""
    try:
        words = set(query.lower().split())
        found = [email for email in office.emails.records if _has_words(email, words)]
        if date_min:
            first = read_time(date_min).date()
            found = [email for email in found if read_time(email["sent_datetime"]).date() >= first]
        if date_max:
            last = read_time(date_max).date()
            found = [email for email in found if read_time(email["sent_datetime"]).date() <= last]
        found.sort(key=lambda email: str(email["sent_datetime"]), reverse=True)
        emails = page_of("emails", found, page, page_size)
    except (AttributeError, TypeError, ValueError) as error:
        return f"Error searching emails: {error}"
    return emails if found else "No emails found."


def _has_words(email: Record, words: set[str]) -> bool:
    text = f"{email['subject']} {email['body']} {email['sender/recipient']}".lower()
    return all(word in text for word in words)


def send_email(office: Office, recipient: Any = None, subject: Cell = None, body: Cell = None) -> tuple[Office, str]:
    """Put one email into the outbox. Its id is not padded with zeros, unlike those of the other tables."""
    if not recipient or not subject or not body:
        return office, "Recipient, subject, or body not provided."
    if not _is_address(recipient):
        return office, "Invalid recipient email address."
    email = {
        "email_id": str(office.emails.next_id("email_id")) if office.emails.records else "1",
        "inbox/outbox": "outbox",
        "sender/recipient": recipient.lower(),
        "subject": subject,
        "sent_datetime": NOW,
        "body": body,
    }
    emails = office.emails.appended(email, is_renumbered=True)
    return replace(office, emails=emails), "Email sent successfully."


def delete_email(office: Office, email_id: Cell = None) -> tuple[Office, str]:
    """Delete one email."""
    if not email_id:
        return office, "Email ID not provided."
    if office.emails.find("email_id", email_id) is None:
        return office, "Email not found."
    return replace(office, emails=office.emails.without("email_id", email_id)), "Email deleted successfully."


def forward_email(office: Office, email_id: Cell = None, recipient: Any = None) -> tuple[Office, str]:
    """Send an email on, with FW: before its subject."""
    if not email_id or not recipient:
        return office, "Email ID or recipient not provided."
    if not _is_address(recipient):
        return office, "Invalid recipient email address."
    email = office.emails.find("email_id", email_id)
    if email is None:
        return office, "Email not found."
    after, answer = send_email(office, recipient, f"FW: {email['subject']}", email["body"])
    return after, answer if after is office else "Email forwarded successfully."


def reply_email(office: Office, email_id: Cell = None, body: Cell = None) -> tuple[Office, str]:
    """Answer the sender of an email, or its recipient when it was sent from here, with RE: before its subject."""
    if not email_id or not body:
        return office, "Email ID or body not provided."
    email = office.emails.find("email_id", email_id)
    if email is None:
        return office, "Email not found."
    after, answer = send_email(office, email["sender/recipient"], f"RE: {email['subject']}", body)
    return after, answer if after is office else "Email replied successfully."


def _is_address(text: str) -> bool:
    return "@" in text and "." in text
