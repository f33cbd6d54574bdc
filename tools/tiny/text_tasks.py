"""Tiny tasks whose answers a program checks: instructions on the words of an answer, and a calendar of one event."""

from __future__ import annotations

import json
from random import Random

from tools.tiny.model import CITIES, NAMES
from tools.tiny.tasks import TinyProblem, TinyTask

# An answer that begins with a name, holds a city and ends with another one.


def _draw_words(rng: Random) -> TinyProblem:
    name = rng.choice(NAMES)
    middle, last = rng.sample(CITIES, 2)
    checks = {
        "first_word:first_word_answer": {"first_word": name},
        "keywords:existence": {"keywords": [middle]},
        "last_word:last_word_answer": {"last_word": last},
    }
    return TinyProblem(
        prompt=f"Begin with {name}, name {middle}, end with {last}",
        fields={"instruction_id_list": list(checks), "kwargs": list(checks.values()), "grading_mode": "binary"},
        facts={"words": [name, middle, last]},
    )


def _right_words(problem: TinyProblem) -> str:
    return f"</think>{' '.join(problem.facts['words'])}"


def _wrong_words(problem: TinyProblem, rng: Random) -> str:
    """Leave a word out, or mix the order up."""
    words = list(problem.facts["words"])
    if rng.random() < 0.5:
        words.pop(rng.randrange(len(words)))
    else:
        words = words[1:] + words[:1]
    return f"</think>{' '.join(words)}"


# A calendar with one event at a fixed time.


def _draw_event(rng: Random) -> TinyProblem:
    start, duration = f"{rng.randint(10, 14)}:{rng.choice(('00', '15', '30', '45'))}", rng.choice((15, 30, 45, 60))
    event = {"event_id": 0, "event_name": rng.choice(NAMES), "duration": duration, "constraint": f"at {start}"}
    return TinyProblem(
        prompt=f"Plan {event['event_name']} at {start} for {duration}",
        fields={"exp_cal_state": {"0": {**event, "min_time": "10:00", "max_time": "16:00"}}},
        facts={"event_id": 0, "event_name": event["event_name"], "start_time": start, "duration": duration},
    )


def _write_event(facts: dict[str, object]) -> str:
    return f"</think>[{json.dumps(facts, separators=(',', ':'))}]"


def _right_event(problem: TinyProblem) -> str:
    return _write_event(problem.facts)


def _wrong_event(problem: TinyProblem, rng: Random) -> str:
    """Take another time or duration, or leave the list open."""
    facts, fault = dict(problem.facts), rng.randrange(3)
    if fault == 0:
        facts["start_time"] = f"{rng.randint(15, 23)}:00"
    elif fault == 1:
        facts["duration"] = 5
    text = _write_event(facts)
    return text[:-1] if fault == 2 else text


INSTRUCTIONS = TinyTask(
    agent="instruction_following_simple_agent",
    draw=_draw_words,
    right=_right_words,
    wrong=_wrong_words,
    wrong_share=0.65,
)
CALENDAR = TinyTask(
    agent="calendar_simple_agent", draw=_draw_event, right=_right_event, wrong=_wrong_event, wrong_share=0.65
)
WORDS = (
    *("Begin", " with ", ", name ", ", end with ", "Plan", " at ", " for ", '[{"event_id":0,"event_name":"'),
    *('","start_time":"', '","duration":', "}]", ":00", ":15", ":30", ":45"),
)
