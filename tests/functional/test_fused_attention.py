"""Where Transformer Engine is asked to attend, packed rows reach it whole, and nothing else changes.

In a process of its own: Megatron looks for Transformer Engine once, when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from speed import patiently

pytestmark = pytest.mark.functional

HERE = Path(__file__).resolve().parent


def test_the_attention_of_transformer_engine_takes_the_place_of_ours() -> None:
    path = os.pathsep.join((str(HERE), str(HERE.parents[1])))
    command = [sys.executable, "-W", "ignore", HERE / "fake_te.py"]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, cwd=HERE, capture_output=True, text=True, timeout=patiently(120), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {name: (int(calls), float(gap)) for name, calls, gap in map(str.split, done.stdout.splitlines())}
    assert {name: calls for name, (calls, _) in found.items()} == {"save_model": 2, "save_hybrid": 1}  # their layers
    assert max(gap for _, gap in found.values()) < 1e-5, "also the rotation of the first, which Megatron does then"
