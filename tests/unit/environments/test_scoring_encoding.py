"""The JSON that goes to a scoring process."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from recipes.environments.scoring.frames import as_json

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]

VALUES = {
    "plain": {"a": [1, 2.5, True, None, "x"], "tests": ("1\n", "caf\u00e9 \u2713 \U0001f600")},
    "half of a pair": {"text": "so \ud83d it goes"},
    "large integers": [2**63, -(2**63), 2**64, 10**40],
    "infinite": [{"x": (1.0, math.inf)}, -math.inf],
    "small": [5e-324, 1e308, -0.0, 0.1],
    "control characters": "\x00\x1f\x7f\u2028",
    "deep": DEEP,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_scoring_process_reads_what_was_written(name: str) -> None:
    value = VALUES[name]
    assert repr(json.loads(as_json(value))) == repr(json.loads(json.dumps(value)))


def test_a_number_that_is_none_stays_one() -> None:
    assert math.isnan(json.loads(as_json({"x": [math.nan]}))["x"][0])


def test_what_json_cannot_carry_is_refused() -> None:
    with pytest.raises(TypeError):
        as_json({"x": object()})
