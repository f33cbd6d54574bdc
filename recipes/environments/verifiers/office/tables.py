"""The tables of the made-up office and one state of it. All are immutable, so rollouts share what none has changed.

A cell is a text as the file has it; an empty cell is None. A cell that a tool call filled may also be a number or a
truth value, as the model wrote it.

What the office's tools share: pages of a search, searching in a text, dates in the forms that people write.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

DATE_FORMS = ("%m/%d/%Y", "%Y/%m/%d", "%B %d, %Y", "%b %d, %Y", "%d %B %Y", "%d %b %Y", "%Y-%m-%d")
TIME_FORMS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M%p", " %I %p")
_MAX_DATE = 64  # characters


def page_of(name: str, records: Sequence[Record], page: Cell, page_size: Cell) -> dict[str, Any]:
    """Return one page of records; a page behind the last is the last. Raises `ValueError` for no whole numbers."""
    for key, value in (("page", page), ("page_size", page_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{key} must be a whole number")
    assert isinstance(page, int)
    assert isinstance(page_size, int)
    if page_size < 1:
        raise ValueError("page_size must be at least 1")
    num_pages = -(-len(records) // page_size)
    page = max(1, min(page, num_pages))
    start = (page - 1) * page_size
    numbers = {f"total_{name}": len(records), "page": page, "page_size": page_size, "total_pages": num_pages}
    return {name: [dict(record) for record in records[start : start + page_size]], "pagination": numbers}


def contains(cell: Cell, text: str) -> bool:
    """Return whether a cell contains a text, whatever the case; an empty cell contains none."""
    return isinstance(cell, str) and text.lower() in cell.lower()


def read_time(value: Cell) -> datetime:
    """Return the point in time that a text names, without its zone; raises `ValueError` when it names none.

    A number is a time too: nanoseconds since 1970.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1e9
        if math.isfinite(seconds) and 0 <= seconds < 4e9:
            return datetime.fromtimestamp(seconds)
    if not isinstance(value, str) or len(value) > _MAX_DATE:
        raise ValueError("got no date of the form YYYY-MM-DD HH:MM:SS")
    text = " ".join(value.split())
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        pass
    for form in (date + time for date in DATE_FORMS for time in TIME_FORMS):
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    raise ValueError(f"got {value!r}, no date of the form YYYY-MM-DD HH:MM:SS")


FILES = {  # table -> its file and columns
    "emails": ("emails.csv", "email_id inbox/outbox sender/recipient subject sent_datetime body"),
    "events": ("calendar_events.csv", "event_id event_name participant_email event_start duration"),
    "visits": (
        "analytics_data.csv",
        "date_of_visit visitor_id page_views session_duration_seconds traffic_source user_engaged",
    ),
    "tasks": ("project_tasks.csv", "task_id task_name assigned_to_email list_name due_date board"),
    "customers": (
        "customer_relationship_manager_data.csv",
        "customer_id assigned_to_email customer_name customer_email customer_phone last_contact_date product_interest"
        " status follow_up_by notes",
    ),
}

Cell = str | int | float | bool | None
Record = Mapping[str, Cell]

NOW = "2023-11-30 23:59:00"  # the office's clock stands still
CASE_COUNTS = frozenset({"status", "list_name", "board"})  # columns whose texts are compared as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Records in order. Each has a label, which equality compares too: see `appended`."""

    records: tuple[Record, ...]
    labels: tuple[int, ...]

    def find(self, column: str, value: Cell) -> Record | None:
        """Return the first record with this value, None without one."""
        return next((record for record in self.records if record[column] == value), None)

    def next_id(self, column: str) -> int:
        """Return the greatest id as text, read as a number, plus one; raises `ValueError` when it is no number."""
        return int(max(str(record[column]) for record in self.records)) + 1

    def appended(self, record: Record, *, is_renumbered: bool) -> Table:
        """Return the table with one more record. Labels are then counted anew, or the new one is 0."""
        records = (*self.records, record)
        return Table(records=records, labels=tuple(range(len(records))) if is_renumbered else (*self.labels, 0))

    def without(self, column: str, value: Cell) -> Table:
        """Return the table without the records that have this value; the others keep their labels."""
        kept = [pair for pair in zip(self.records, self.labels, strict=True) if pair[0][column] != value]
        return Table(records=tuple(record for record, _ in kept), labels=tuple(label for _, label in kept))

    def changed(self, column: str, value: Cell, *, field: str, to: Cell) -> Table:
        """Return the table with one field of all records that have this value set anew."""
        records = tuple(record if record[column] != value else {**record, field: to} for record in self.records)
        return replace(self, records=records)

    def is_same(self, other: Table, *, in_order: bool = True) -> bool:
        """Return whether both hold the same records, by default in the same order under the same labels.

        Case does not matter outside CASE_COUNTS, and every cell that is no text equals every other.
        """
        if not in_order:
            ours, theirs = ([_compared(record) for record in table.records] for table in (self, other))
            return self is other or sorted(ours, key=repr) == sorted(theirs, key=repr)
        if self.labels != other.labels:
            return False
        pairs = zip(self.records, other.records, strict=True)
        return all(one is another or _compared(one) == _compared(another) for one, another in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """One state of the office."""

    addresses: tuple[str, ...]
    emails: Table
    events: Table
    visits: Table  # no tool changes it
    tasks: Table
    customers: Table
    plots: tuple[str, ...] = ()  # paths of the plots that were made
    num_changes: int = 0

    def is_same(self, other: Office, *, in_order: bool = True) -> bool:
        """Return whether what tools can change is the same."""
        ours, theirs = self.plots_in_lower_case(), other.plots_in_lower_case()
        return (ours == theirs if in_order else sorted(ours) == sorted(theirs)) and all(
            getattr(self, name).is_same(getattr(other, name), in_order=in_order)
            for name in ("emails", "events", "tasks", "customers")
        )

    def plots_in_lower_case(self) -> list[str]:
        """Return the paths of the plots as they are compared."""
        return [path.lower() for path in self.plots]


@functools.lru_cache(maxsize=4)
def load_office(directory: str) -> Office:
    """Read the office of a directory; raises `ValueError` that names the file which is missing or malformed."""
    addresses, *paths = paths_of_tables(Path(directory))
    columns = [names.split() for _, names in FILES.values()]
    tables = dict(zip(FILES, map(_read_table, paths, columns), strict=True))
    return Office(
        addresses=tuple(row[0] for row in _read_rows(addresses)),
        emails=tables["emails"],
        events=tables["events"],
        visits=tables["visits"],
        tasks=tables["tasks"],
        customers=tables["customers"],
    )


def paths_of_tables(root: Path) -> list[Path]:
    """Return the files of an office in a directory: its people's addresses, then the tables in the order of FILES."""
    return [root / "raw" / "email_addresses.csv", *(root / "processed" / file for file, _ in FILES.values())]


def _read_table(path: Path, columns: Sequence[str]) -> Table:
    header, *rows = _read_rows(path)
    if header != columns:
        raise ValueError(f"{path}: got columns {', '.join(header)}, expected {', '.join(columns)}")
    records = tuple({column: cell or None for column, cell in zip(header, row, strict=True)} for row in rows)
    return Table(records=records, labels=tuple(range(len(records))))


def _read_rows(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: the office's tables cannot be read ({error}); `make data` brings them") from error
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{path}: got rows of different lengths or none; download the office's tables again")
    return rows


def _compared(record: Record) -> list[str | None]:
    return [
        None if not isinstance(cell, str) else cell if column in CASE_COUNTS else cell.lower()
        for column, cell in record.items()
    ]
