"""A calendar built during a conversation: every event in it, no two at once. Reward 1.0 when all holds, else 0.0.

Only the text of the last output item is graded. Decided as NeMo Gym's verifier has it, because published rewards
depend on it:

* An answer that holds `<think>` earns nothing, even where no event is expected; without an expected event any other
  answer that is not empty earns 1.0.
* The calendar is the first `[...]` that holds an object, and nothing after it is looked at. Inside an object brackets
  are text, between objects they end the list.
* Events are found by `event_id`; a later entry replaces an earlier one of the same id. Two entries that are equal in
  everything do not overlap each other; so a repeated entry costs nothing. With the setting `refuse_repeated_events`
  an answer that lists an id twice earns 0.0.
* Times are `HH:MM`, or hours with a small `am` or `pm`. An unknown constraint asks for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from recipes.environments.contract.responses import last_item_text
from recipes.environments.contract.rows import wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row

LIST_OF_OBJECTS = re.compile(r"\[(?:[^\[\]{}]*\{[^{}]*\})+[^\[\]{}]*\]")
NOON_MINUTES = 12 * 60
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The events that must stand in the calendar."""

    events: tuple[tuple[str, float, str | None, str, str], ...]  # id, minutes, constraint, earliest start, latest end
    refuses_repeats: bool = False


class WrongCalendar(Exception):  # noqa: N818 (it describes the answer, not a fault of the program)
    """The answer earns nothing, and why."""


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `exp_cal_state`."""
    state = row.get("exp_cal_state")
    if not isinstance(state, Mapping) or not all(isinstance(event, Mapping) for event in state.values()):
        raise wrong("exp_cal_state", state, "an object of events")
    return Task(
        events=tuple(_expected(name, event) for name, event in state.items()),
        refuses_repeats=bool(settings.get("refuse_repeated_events", False)),
    )


def _expected(name: str, event: Mapping[str, Any]) -> tuple[str, float, str | None, str, str]:
    duration, constraint = event.get("duration"), event.get("constraint")
    if isinstance(duration, bool) or not isinstance(duration, int | float):
        raise wrong(f"exp_cal_state.{name}.duration", duration, "a number of minutes")
    if constraint is not None and not isinstance(constraint, str):
        raise wrong(f"exp_cal_state.{name}.constraint", constraint, "a string or null")
    for key in ("min_time", "max_time"):
        if not isinstance(event.get(key), str):
            raise wrong(f"exp_cal_state.{name}.{key}", event.get(key), "a time as a string")
    return name, duration, constraint, event["min_time"], event["max_time"]


def score(response: Response, task: Task) -> Verdict:
    """Find the calendar in the answer and check every expected event."""
    text = last_item_text(response)
    try:
        if not text:
            raise WrongCalendar("the answer is empty")
        if "<think>" in text:
            raise WrongCalendar("the answer holds <think>")
        if task.events:
            _check(_entries(text), task)
    except WrongCalendar as problem:
        return Verdict(reward=0.0, reason=str(problem)[:200])
    except Exception as error:  # model text: an entry without a time, a duration that is no number, ...
        return Verdict(reward=0.0, reason=f"an entry cannot be read: {type(error).__name__}: {error}"[:200])
    return Verdict(reward=1.0, reason="every event is in its place")


def minutes(time: str) -> int:
    """Return a time of day in minutes; raises `ValueError` for another notation."""
    if "am" in time or "pm" in time:
        hour, _, minute = time.replace("am", "").replace("pm", "").strip().partition(":")
        return int(hour) % 12 * 60 + int(minute or 0) + (NOON_MINUTES if "pm" in time else 0)
    hour, minute = time.split(":")
    return int(hour) * 60 + int(minute)


def _entries(text: str) -> list[dict[str, Any]]:
    match = LIST_OF_OBJECTS.search(text)
    if match is None:
        raise WrongCalendar("the answer holds no calendar")
    try:
        entries = json.loads(match.group())
    except ValueError as error:
        raise WrongCalendar(f"the calendar is no JSON: {error}") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise WrongCalendar("the calendar holds something else than events")
    return list(entries)


def _check(entries: list[dict[str, Any]], task: Task) -> None:
    by_id = {str(entry["event_id"]): entry for entry in entries}
    if task.refuses_repeats and len(by_id) != len(entries):
        raise WrongCalendar("an event is listed twice")
    if len(by_id) != len(task.events):
        raise WrongCalendar(f"{len(by_id)} events, expected {len(task.events)}")
    distinct = {json.dumps(entry, sort_keys=True): entry for entry in entries}.values()
    spans = sorted((minutes(entry["start_time"]), entry["duration"]) for entry in distinct)
    for (start, duration), (next_start, _) in pairwise(spans):
        if next_start < start + duration:
            raise WrongCalendar(f"two events overlap at minute {next_start} of the day")
    for name, duration, constraint, earliest, latest in task.events:
        if name not in by_id:
            raise WrongCalendar(f"event {name[:MAX_SHOWN]} is missing")
        entry = by_id[name]
        start, end = minutes(entry["start_time"]), minutes(entry["start_time"]) + entry["duration"]
        if entry["duration"] != duration:
            raise WrongCalendar(f"event {name}: lasts {entry['duration']} minutes, expected {duration:g}")
        if start < minutes(earliest) or end > minutes(latest) or not _satisfies(start, end, constraint):
            raise WrongCalendar(f"event {name}: not within {earliest} to {latest}, {constraint or 'any time'}")


def _satisfies(start: float, end: float, constraint: str | None) -> bool:
    kind, _, time = (constraint or "").partition(" ")
    if kind == "before":
        return end <= minutes(time)
    if kind == "after":
        return start >= minutes(time)
    if kind == "between":
        first, last = time.split(" and ")
        return start >= minutes(first) and end <= minutes(last)
    return kind != "at" or start == minutes(time)


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="CalendarResourcesServer",
    rewards=(0.0, 1.0),
    agents={"calendar_simple_agent": Agent(kind="single_turn", server="calendar")},
    settings=frozenset({"refuse_repeated_events"}),
    is_cheap=lambda _task: True,
)
