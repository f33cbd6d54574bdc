"""The wide tiny blend learns: seventeen environments at once, tools over several turns among what improves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from speed import patiently

from tools.look.report.load import load_run
from tools.tiny.check_gain import measure

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
MIN_GAIN = 0.15  # of all environments; one run gained 0.25
MIN_TOOL_GAIN = 0.2  # of the office, whose tasks take three turns, and of Python; that run gained 0.33 and 0.58


def make(target: str, env: dict[str, str], *, seconds: float) -> None:
    done = subprocess.run(
        ["make", target], cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(seconds), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"


def test_the_wide_blend_learns(tmp_path: Path) -> None:
    env = {**os.environ, "SCALE": "tiny", "LAUNCHER": "local", "BLEND": "wide", "RESULTS_DIR": str(tmp_path)}
    make("tiny", env, seconds=900)
    make("stage1.1", env | {"EXP_NAME": "wide", "EXTRA_HYDRA_ARGS": f"grpo.max_num_steps={STEPS}"}, seconds=900)
    overall, gains = measure(load_run(tmp_path / "wide"), tmp_path / "wide")
    sampled = {name.removesuffix(", sampled"): gain.delta for name, gain in gains if name.endswith(", sampled")}
    assert len(sampled) == 1 + 17
    assert overall.delta >= MIN_GAIN, sampled
    assert min(sampled["workplace_assistant"], sampled["ns_tools"]) >= MIN_TOOL_GAIN, sampled
