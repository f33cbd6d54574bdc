"""What `make plan` says of a policy worker's memory, against what the tiny policy really allocates in a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from speed import patiently
from tiny_run import launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("activation_peak.py")


@pytest.mark.parametrize(("recompute", "low", "high"), [("true", 0.8, 1.25), ("false", 0.6, 1.1)])
def test_activations_of_a_full_micro_batch(tmp_path: Path, recompute: str, low: float, high: float) -> None:
    """Without recomputation the CPU keeps attention scores that a GPU's attention does not."""
    env = launch_environment(tmp_path, num_rows=8, overrides={})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "model"), recompute],
        env={**env, "PYTHONPATH": str(SCRIPT.parents[2])},  # for what all tests share
        capture_output=True,
        text=True,
        timeout=patiently(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(recompute, found, found["expected"] / found["peak"])
    assert found["weights"] == pytest.approx(found["parameters"], rel=0.003)  # the norms are left out
    assert low <= found["expected"] / found["peak"] <= high
