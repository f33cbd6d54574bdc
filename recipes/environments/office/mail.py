"""The office's address book and its emails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.environments.office.reading import page_of, read_time
from recipes.environments.office.tables import NOW, Cell, Office, Record


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
