"""What a scoring process may request: programs to run, read before they are believed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from recipes.environments.contract.verifier import Execution
from recipes.environments.scoring.process import MAX_QUESTIONS, read_executions

PROGRAM = asdict(Execution(language="python3", code="1", stdin="x", seconds=3.0, max_characters=5, image="/i.sif"))


def test_programs_arrive_as_they_were_requested() -> None:
    assert read_executions(json.loads(json.dumps([PROGRAM, PROGRAM]))) == [Execution(**PROGRAM)] * 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        [PROGRAM] * (MAX_QUESTIONS + 1),
        [None],
        [{**PROGRAM, "more": 1}],
        [{"code": "1"}],
        *([{**PROGRAM, name: wrong}] for name in PROGRAM for wrong in (None, [], {"a": 1})),
        *([{**PROGRAM, name: "1"}] for name in ("seconds", "max_characters")),
        [{**PROGRAM, "seconds": float("nan")}],
        [{**PROGRAM, "max_characters": True}],
    ],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"no list of 1 to 64 programs|a program to run of another form"):
        read_executions(value)
