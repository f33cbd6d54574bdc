"""Events of a conversation, placed without conflict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.verifiers import calendar
from recipes.environments.verifiers.calendar import Settings, minutes, parse_task, score

Answer = Callable[..., dict[str, Any]]
STATE = {
    "0": {"event_id": 0, "duration": 60, "constraint": "before 12pm", "min_time": "10:00", "max_time": "16:00"},
    "1": {"event_id": 1, "duration": 30, "constraint": "at 1:30pm", "min_time": "10:00", "max_time": "16:00"},
}
RIGHT = [
    {"event_id": 0, "event_name": "a", "start_time": "11:00", "duration": 60},
    {"event_id": 1, "event_name": "b", "start_time": "13:30", "duration": 30},
]


@pytest.mark.parametrize(
    ("text", "reward", "reason"),
    [
        (json.dumps(RIGHT), 1.0, "every event is in its place"),
        (f"Here [1] it is: {json.dumps(RIGHT)} [2]", 1.0, "every event"),
        (json.dumps([*RIGHT, RIGHT[0]]), 1.0, "every event"),  # an equal entry is the same event
        (json.dumps(RIGHT[:1]), 0.0, "1 events, expected 2"),
        (json.dumps([RIGHT[0], {**RIGHT[1], "start_time": "11:30"}]), 0.0, "two events overlap"),
        (
            json.dumps([RIGHT[0], {**RIGHT[1], "start_time": "13:31"}]),
            0.0,
            "event 1: not within 10:00 to 16:00, at 1",
        ),
        (json.dumps([RIGHT[0], {**RIGHT[1], "duration": "30"}]), 0.0, "an entry cannot be read: TypeError"),
        (json.dumps([RIGHT[0], {**RIGHT[1], "event_id": 7}]), 0.0, "event 1 is missing"),
        (json.dumps([*RIGHT, 3]), 0.0, "the calendar holds something else"),
        ("<think>x</think>" + json.dumps(RIGHT), 0.0, "the answer holds <think>"),
        ("no calendar", 0.0, "the answer holds no calendar"),
        ("[{'a': 1}]", 0.0, "the answer holds no calendar"),
        ("", 0.0, "the answer is empty"),
        ("[" * 50_000 + "{}" * 50_000, 0.0, "the answer holds no calendar"),
    ],
)
def test_answers(answer: Answer, text: str, reward: float, reason: str) -> None:
    verdict = score(answer(text), parse_task({"exp_cal_state": STATE}, Settings()))
    assert (verdict.reward, verdict.reason[: len(reason)]) == (reward, reason)


@pytest.mark.parametrize(("time", "expected"), [("12am", 0), ("12:05pm", 725), ("1pm", 780), ("09:30", 570)])
def test_times(time: str, expected: int) -> None:
    assert minutes(time) == expected


@pytest.mark.parametrize("time", ["10", "10:00 AM", "", "noon"])
def test_no_times(time: str) -> None:
    with pytest.raises(ValueError):
        minutes(time)


def test_every_real_row_can_be_solved_and_failed(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    for index in range(5):
        task = parse_task(gym_row("calendar", index), Settings())
        assert score(answer("nothing"), task).reward == float(not task.events)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "field 'exp_cal_state': got nothing, expected an object of events"),
        ({"0": {**STATE["0"], "duration": "60"}}, "field 'exp_cal_state.0.duration': got string '60'"),
        ({"0": {**STATE["0"], "min_time": 10}}, "field 'exp_cal_state.0.min_time': got number 10"),
    ],
)
def test_bad_row(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_task({"exp_cal_state": state}, Settings())


@pytest.mark.parametrize("time", ["9:60", "11:99", "9:-0", "+9:00", "9", "25:00", "24:30", "13pm", "9:00 foo", "9: 0"])
def test_what_is_no_time(time: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        calendar.minutes(time)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": {"b": [1, {"c": 2}]}}] [{"d": 1}]', [{"a": {"b": [1, {"c": 2}]}}]),
        ('see [note {x}], [1, 2] and {"events": [{"a": "}]["}]}', [{"a": "}]["}]),
        ('[[{"a": 1}]]', [{"a": 1}]),
    ],
)
def test_a_calendar_is_decoded_as_json(text: str, found: list[dict[str, Any]]) -> None:
    assert calendar._entries(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        '[{"a":1},' * 10_000,
        "[1," * 20_000,
        '["a",' * 900 + "1," * 30_000,
        "[[A=B]]" * 90_000,
        "[x" * 300_000,
    ],
)
def test_lists_that_break_off_are_given_up_soon(text: str) -> None:
    start = time.process_time()
    with pytest.raises(calendar.WrongCalendar):
        calendar._entries(text)
    assert time.process_time() - start < 5.0
