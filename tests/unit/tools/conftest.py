"""The example rows that NeMo Gym ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded import recorded


@pytest.fixture(scope="session")
def gym_examples_dir() -> Path:
    """Directory of the rows."""
    return recorded("GYM_EXAMPLES_DIR", "gym_examples")
