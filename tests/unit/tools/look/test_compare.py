"""What two runs are compared by, and what is said where they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.look.compare import main


def run(
    directory: Path,
    rewards: list[float],
    *,
    weights: str = "w",
    save_id: str = "a",
    seconds: float = 1.0,
    ends: bool = True,
) -> str:
    """Write a run of so many steps with a checkpoint of the last; what only a clock or a save decides is given, too."""
    directory.mkdir()
    steps = [
        {
            "step": step,
            "time": seconds,
            "train/reward": reward,
            "timing/train/policy_training": seconds * step,
            "train/env_duration_s/max": seconds,
        }
        for step, reward in enumerate(rewards, start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in steps), encoding="utf-8")
    saved = directory / "checkpoints" / f"step_{len(rewards):06d}"
    saved.mkdir(parents=True)
    sums = {
        "policy/__0_0.distcp": weights,
        "ledger.jsonl": "l",
        "policy/.metadata": save_id,
        "state.json": str(seconds),
    }
    if ends:
        (saved / "COMPLETE").write_text(json.dumps(sums), encoding="utf-8")
    return str(directory)


def test_what_a_clock_decides_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "a", [0.5, 0.25]), run(tmp_path / "b", [0.5, 0.25], save_id="b", seconds=2.0)
    assert main([one, other]) == 0
    assert capsys.readouterr().out == "2 steps and 1 checkpoints of a and b: equal, bit for bit\n"


def test_the_first_bit_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "a", [0.5, 0.25]), run(tmp_path / "b", [0.5, 0.25000000000000006], weights="other")
    assert main([one, other]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "step 2: train/reward 0.25 | 0.25000000000000006"
    assert second.startswith("checkpoint of step 2: content ")
    assert last.endswith("they differ")


def test_runs_that_share_no_step_are_not_called_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run(tmp_path / "a", [0.5]), str(tmp_path / "gone")]) == 2
    assert "so nothing can be compared" in capsys.readouterr().err
    assert main([run(tmp_path / "c", [0.5]), run(tmp_path / "d", [0.5], ends=False)]) == 0
    assert "1 steps and 0 checkpoints" in capsys.readouterr().out


def test_values_that_are_not_finite_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "a", [float("nan")]), run(tmp_path / "b", [float("inf")])
    for path, what in ((one, "nan"), (other, "inf")):
        line = {"step": 1, "time": 1.0, "train/reward": None, "non_finite": {"train/reward": what}}
        (Path(path) / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main([one, other]) == 1
    assert "train/reward nan | inf" in capsys.readouterr().out
