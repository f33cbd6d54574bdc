"""Some of these tests bound the processor time of a verifier, which must not include other tests' garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_collection() -> Iterator[None]:
    """Collect no garbage during a test: a full collection takes half a second here."""
    gc.disable()
    yield
    gc.enable()
