"""A calendar built during a conversation: every event in it, no two at once. Reward 1.0 when all holds, else 0.0.

Only the text of the last output item is graded. Decided as NeMo Gym's verifier has it, because published rewards
depend on it:

* An answer that holds `<think>` earns nothing, even where no event is expected; without an expected event any other
  answer that is not empty earns 1.0.
* The calendar is the first list of JSON that holds an object, and nothing after it is looked at.
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

from recipes.environments.contract import Response, Row, Verdict, Verifier, last_item_text, without_nulls, wrong

TIME = re.compile(r"\s*([0-9]{1,2})(?::([0-9]{1,2}))?\s*(am|pm)?\s*")
MAX_DECODED = 4_000_000  # characters of lists that break off or hold no object
NOON_MINUTES, DAY_MINUTES = 12 * 60, 24 * 60
DEEPEST = 1000  # about so many lists in lists are read
MAX_BEFORE = 4_000  # characters before a list: each error counts the lines in them
MAX_SHOWN = 60
CHEAP_EVENTS = 300  # of a row that is scored in the process that asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A calendar built from a conversation."""

    refuse_repeated_events: bool = False
    """an answer that lists an event twice earns nothing"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The events that must stand in the calendar."""

    events: tuple[tuple[str, float, str | None, str, str], ...]  # id, minutes, constraint, earliest start, latest end
    refuses_repeats: bool = False


class WrongCalendar(Exception):  # noqa: N818 (it describes the answer, not a fault of the program)
    """The answer earns nothing, and why."""


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `exp_cal_state`."""
    state = row.get("exp_cal_state")
    state = without_nulls(state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(event, Mapping) for event in state.values()):
        raise wrong("exp_cal_state", state, "an object of events")
    return Task(
        events=tuple(_expected(name, event) for name, event in state.items()),
        refuses_repeats=settings.refuse_repeated_events,
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
    found = TIME.fullmatch(time)
    if found is None or (found[2] is None and found[3] is None):
        raise ValueError(f"{time[:MAX_SHOWN]!r} is no time")
    hour, minute = int(found[1]), int(found[2] or 0)
    if minute > 59 or hour > (12 if found[3] else 24) or hour * 60 + minute > DAY_MINUTES:
        raise ValueError(f"{time[:MAX_SHOWN]!r} is no time")
    if found[3]:
        return hour % 12 * 60 + minute + (NOON_MINUTES if found[3] == "pm" else 0)
    return hour * 60 + minute


def _entries(text: str) -> list[dict[str, Any]]:
    """Return the first list of JSON that holds an object; what is tried in vain has a bound."""
    decoder, decoded, start = json.JSONDecoder(), 0, text.find("[")
    while start >= 0 and decoded <= MAX_DECODED:
        if start > MAX_BEFORE:
            text, start = text[start:], 0
        end = start + 1
        try:
            entries, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            entries, end = [], error.pos
        except RecursionError:  # lists in lists: those within are not tried one by one
            entries = []
            decoded += DEEPEST
        if any(isinstance(entry, dict) for entry in entries):
            if not all(isinstance(entry, dict) for entry in entries):
                raise WrongCalendar("the calendar holds something else than events")
            return list(entries)
        decoded += max(0, end - start)
        start = text.find("[", start + 1)
    raise WrongCalendar("the answer holds no calendar")


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
    settings=Settings,
    is_cheap=lambda task: len(task.events) <= CHEAP_EVENTS,
    exempt=lambda _task: {"another row": "many calendars satisfy the same constraints"},
)
