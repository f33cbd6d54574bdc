"""Fixtures shared by all tiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Directory of the recorded reference outputs (GOLDEN_DIR, default ../shared/golden beside the checkout)."""
    path = Path(os.environ.get("GOLDEN_DIR", ROOT.parent / "shared" / "golden"))
    if not path.is_dir():
        pytest.fail(f"golden vectors not found at {path}; set GOLDEN_DIR")
    return path
