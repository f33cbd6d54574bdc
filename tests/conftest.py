"""Fixtures shared by all tiers."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import recorded
from tests.scheduling import ByFile

# A make that a test starts is no part of the one that runs the tests.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS"):
    os.environ.pop(name, None)
gc.disable()  # until all tests are collected: the collector would look through them again and again


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the tests themselves, which stay to the end."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """Return our scheduler where whole files are given to processes."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Directory of the recorded reference outputs."""
    return recorded("GOLDEN_DIR", "golden")
