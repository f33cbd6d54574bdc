"""Tables for the office of `workplace_assistant`: a small one, made here, and the real one where it is stored."""

from __future__ import annotations

import csv
import functools
import tempfile
from pathlib import Path

from tests.recorded import recorded

PEOPLE = ("ana.silva@atlas.com", "ben.okafor@atlas.com", "chen.li@atlas.com")
SMALL: dict[str, list[list[str]]] = {
    "raw/email_addresses.csv": [[person] for person in PEOPLE],
    "processed/emails.csv": [
        ["email_id", "inbox/outbox", "sender/recipient", "subject", "sent_datetime", "body"],
        ["00000001", "inbox", PEOPLE[0], "Lunch", "2023-11-01 12:00:00", "Soup today?"],
        ["00000002", "inbox", PEOPLE[1], "Budget", "2023-11-02 09:30:00", "The numbers are in."],
        ["00000000", "outbox", PEOPLE[2], "Plan", "2023-10-30 08:00:00", "See the plan."],
    ],
    "processed/calendar_events.csv": [
        ["event_id", "event_name", "participant_email", "event_start", "duration"],
        ["00000001", "sync up", PEOPLE[0], "2023-12-01 09:00:00", "30"],
        ["00000000", "review", PEOPLE[1], "2023-12-02 10:00:00", "60"],
    ],
    "processed/analytics_data.csv": [
        ["date_of_visit", "visitor_id", "page_views", "session_duration_seconds", "traffic_source", "user_engaged"],
        ["2023-11-02", "0001", "3", "10", "direct", "True"],
        ["2023-11-01", "0002", "1", "5", "referral", "False"],
        ["2023-11-02", "0002", "2", "15", "direct", "False"],
    ],
    "processed/project_tasks.csv": [
        ["task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"],
        ["00000001", "Fix login", PEOPLE[0], "Backlog", "2023-12-05", "Back end"],
        ["00000000", "Draw logo", PEOPLE[1], "Completed", "2023-11-20", "Design"],
    ],
    "processed/customer_relationship_manager_data.csv": [
        [
            "customer_id",
            "assigned_to_email",
            "customer_name",
            "customer_email",
            "customer_phone",
            "last_contact_date",
            "product_interest",
            "status",
            "follow_up_by",
            "notes",
        ],
        f"00000001,{PEOPLE[0]},Dana Moss,dana@shop,,2023-11-20,Software,Lead,2023-12-20,Called.".split(","),
        f"00000000,{PEOPLE[2]},Eli Fox,eli@bank,123-456-7890,2023-11-10,Training,Won,2023-12-10,".split(","),
    ],
}
_KEPT = tempfile.TemporaryDirectory(prefix="office-")  # until this process ends


def write_small_office(directory: Path) -> str:
    """Write the small office's tables and return their directory."""
    for name, rows in SMALL.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    return str(directory)


@functools.cache
def small_office() -> str:
    """Return the directory of a small office that lasts as long as the tests."""
    return write_small_office(Path(_KEPT.name) / "small")


@functools.cache
def real_office() -> str:
    """Return a directory with the real tables in their places; skips where they are not stored."""
    stored, directory = recorded("GYM_EXAMPLES_DIR", "gym_examples") / "workplace_assistant", Path(_KEPT.name) / "real"
    for name in SMALL:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to(stored / Path(name).name)
    return str(directory)
