"""Comparison of what a program answered with what its test expects, by the rules of LiveCodeBench's harness.

Both sides arrive here as data, in a process that runs no program.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # numpy.allclose


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether two texts have equal lines, spaces around them aside; lines of numbers are compared by value."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_is_same_line, ours, theirs))


def is_same_value(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, have equal JSON texts, or are numbers, also as text, that are close."""
    try:
        if value == expected or json.dumps(value) == json.dumps(expected):
            return True
        number, other = float(value), float(expected)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return number == other or abs(number - other) <= ABSOLUTE + RELATIVE * abs(other) < math.inf


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except (ArithmeticError, ValueError):
        return False
