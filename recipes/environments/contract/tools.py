"""Tools that a verifier answers itself, over a state that belongs to one rollout.

A state is a value: a call returns the next one, so a session is one variable and a test needs none. A tool that runs
code keeps that code's variables in a sandbox, in a session that belongs to the rollout too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from recipes.environments.contract.rows import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Python to run in the rollout's session of a sandbox, which keeps variables from cell to cell."""

    code: str
    seconds: float
    max_characters: int  # kept of each of stdout and stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """How a session with tools begins and goes on."""

    start: Callable[[Mapping[str, Any]], Any]
    """Return the first state, under the server's settings. Raises `ValueError` that says what is missing."""
    call: Callable[[Any, str, Mapping[str, Any]], tuple[Any, str | Cell]]
    """Return the next state and the text that the model is shown, or the cell that `read` makes it of. Pure; takes any
    name and arguments, never raises."""
    read: Callable[[Any, Mapping[str, Any]], tuple[Any, str]] | None = None
    """Return the next state and the text, from a sandbox's answer to a cell. Pure; takes any answer."""


def read_arguments(text: object) -> dict[str, Any]:
    """Return the arguments in a function call; raises `ValueError` for text that is no JSON object."""
    if not isinstance(text, str):
        raise ValueError(f"got {shown(text)}, expected JSON text")
    value = orjson.loads(text.encode("utf-8", "replace"))  # its error is a ValueError, for deep nesting too
    if not isinstance(value, dict):
        raise ValueError(f"got {shown(value)}, expected an object")
    return value
