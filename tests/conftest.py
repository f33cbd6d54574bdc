"""Fixtures shared by all tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded import recorded


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Directory of the recorded reference outputs."""
    return recorded("GOLDEN_DIR", "golden")
