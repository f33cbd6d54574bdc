"""The visits to the office's web site, and plots of them, of which only the paths exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipes.environments.office.tables import Cell, Office, Record

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
