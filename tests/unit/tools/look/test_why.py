"""`make why`: causes that one step shows, those of the course, and those of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.look.report.load import load_run
from tools.look.why import explain, main

STEP = {"timing/train/policy_training": 1.0, "train/num_groups": 8.0, "train/num_groups_zero_variance": 0.0}


def write_run(results: Path, steps: list[dict[str, float]], **files: list[dict[str, Any]]) -> Path:
    """Write a run of some steps, each with these metrics beside those of any step."""
    run_dir = results / "mine"
    run_dir.mkdir(parents=True)
    lines = [{"step": step, "time": float(step), **STEP, **values} for step, values in enumerate(steps, start=1)]
    for name, content in {"metrics": lines, **files}.items():
        text = "".join(json.dumps(line) + "\n" for line in content)
        (run_dir / f"{name}.jsonl").write_text(text, encoding="utf-8")
    resolved = {"config": {"policy": {"megatron_cfg": {"optimizer": {"lr": 1e-4}}}}}
    (run_dir / "resolved.json").write_text(json.dumps(resolved), encoding="utf-8")
    return run_dir


def visits(row: str, rates: list[float]) -> list[dict[str, Any]]:
    return [{"step": step, "row_id": row, "pass_rate": rate} for step, rate in enumerate(rates, start=1)]


def test_a_run_that_learns_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"train/reward": step / 20, "train/lr": 1e-4, "train/approx_entropy": 1.0} for step in range(20)]
    steps[0]["validation/accuracy"], steps[-1]["validation/accuracy"] = 0.2, 0.9
    run_dir = write_run(tmp_path, steps, pass_rates=visits("a", [0.0, 0.5]) + visits("b", [0.5, 1.0]))
    assert explain(load_run(run_dir)) == []
    assert main(["--results", str(tmp_path), "--exp-name", "mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine: 20 steps, reward 0.000 -> 0.950, held-out 0.200 -> 0.900",
        "  nothing that is known keeps it from learning",
    ]


def test_causes_of_steps_are_counted_in_their_own_words(tmp_path: Path) -> None:
    cut, whole = {"train/truncation_rate": 0.5}, {"train/truncation_rate": 0.0}
    [said] = explain(load_run(write_run(tmp_path, [cut, *[whole] * 10, cut])))
    assert said.startswith("truncated, in 2 of 12 steps; the last of them, step 12: 50% of the answers are cut")


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (
            {"train/lr": [1e-6] * 20},
            "learning rate: it is 1e-06, and policy.megatron_cfg.optimizer.lr is 0.0001; shorten",
        ),
        ({"train/approx_entropy": [2.0] * 10 + [0.1] * 10}, "entropy fell from 2 to 0.1: the answers to a prompt"),
        (
            {"train/reward": [0.1] * 10 + [0.8] * 10, "validation/accuracy": [0.3] * 20},
            "learned by heart: the reward rose from 0.100 to 0.800, that of held-out rows went from 0.300 to 0.300;",
        ),
    ],
)
def test_the_course_of_a_run_has_causes_of_its_own(tmp_path: Path, curve: dict[str, list[float]], said: str) -> None:
    [text] = explain(
        load_run(write_run(tmp_path, [{key: values[step] for key, values in curve.items()} for step in range(20)]))
    )
    assert text.startswith(said)


def test_rows_that_teach_nothing_or_come_too_often_are_counted(tmp_path: Path) -> None:
    rates = visits("a", [0.0] * 5) + visits("b", [1.0] * 4) + visits("c", [0.0, 0.5, 1.0])
    one, other = explain(load_run(write_run(tmp_path, [{}] * 10, pass_rates=rates)))
    assert one.startswith("rows: of 3 trained, 1 were never solved and 1 always, which teaches nothing; choose")
    assert other.startswith("few rows: each of 3 was trained 4.0 times on average; give more rows (TRAIN_PATH)")


def test_rows_do_not_matter_where_rewards_are_not_compared(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, [{}] * 10, pass_rates=visits("a", [0.0] * 9))
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").replace("num_groups_zero_variance", "other")
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert explain(load_run(run_dir)) == []


def test_of_a_few_steps_little_is_said(tmp_path: Path) -> None:
    [text] = explain(load_run(write_run(tmp_path, [{"train/lr": 1e-9}] * 3)))
    assert text == "few steps: 3 are done, and most runs need more than 10; let it run on"


def test_no_run_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(tmp_path), "--exp-name", "other"]) == 2
    assert "there is no run of this name" in capsys.readouterr().err
