"""What the office's tools share: pages of a search, searching in a text, dates in the forms that people write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from recipes.environments.office.tables import Cell, Record

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
