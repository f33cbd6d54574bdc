"""The verdict on a run, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.tiny.check_gain import main


def write_run(path: Path, *lines: dict[str, float]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def validated(step: int, sampled: float, greedy: float, mcqa: float) -> dict[str, float]:
    return {
        "step": step,
        "validation/accuracy": sampled,
        "validation/greedy_accuracy": greedy,
        "validation/mcqa_simple_agent/accuracy": mcqa,
    }


def test_a_run_that_learned_passes_and_says_where_things_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_step = {"step": 1, "train/reward": 0.4}
    run = write_run(tmp_path / "run", validated(0, 0.35, 0.6, 0.25), train_step, validated(2, 0.6, 0.9, 0.75))
    (run / "checkpoints" / "step_000002" / "hf").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step_000002")
    (run / "report.html").write_text("", encoding="utf-8")
    assert main(["--run-dir", str(run)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all,", "sampled", "0.350", "0.600", "+0.250"] in words
    assert ["all,", "greedy", "0.600", "0.900", "+0.300"] in words
    assert ["mcqa,", "sampled", "0.250", "0.750", "+0.500"] in words
    assert ["checkpoint:", str(run / "checkpoints" / "step_000002")] in words
    assert ["HF", "export:", str(run / "checkpoints" / "step_000002" / "hf")] in words
    assert ["report:", str(run / "report.html")] in words


def test_too_small_a_gain_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", validated(0, 0.35, 0.6, 0.25), validated(2, 0.59, 0.9, 0.75))
    assert main(["--run-dir", str(run)]) == 1
    assert "the gain +0.240 is below +0.25" in capsys.readouterr().err
    assert main(["--run-dir", str(run), "--min-gain", "0.2"]) == 0


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "train/reward": 0.4}],
        [validated(0, 0.3, 0.5, 0.2)],
        [validated(1, 0.3, 0.5, 0.2), validated(2, 0.6, 0.5, 0.2)],
    ],
)
def test_missing_metrics_are_a_wrong_input(tmp_path: Path, lines: list[dict[str, float]]) -> None:
    assert main(["--run-dir", str(write_run(tmp_path / "run", *lines))]) == 2


def test_a_missing_run_is_a_wrong_input(tmp_path: Path) -> None:
    assert main(["--run-dir", str(tmp_path / "none")]) == 2
