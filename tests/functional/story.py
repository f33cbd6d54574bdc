"""One test that is a story: its steps have names, and a failure says in which of them it happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print the name of a part of a test; an error in it carries the name."""
    print(f"step: {name}", flush=True)
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the step: {name}")
        raise
