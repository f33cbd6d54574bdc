"""`make swe-replay`: what agents did, with nothing of it left for a browser to act on, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents.coding.outcome import note_trajectory
from recipes.environments.contract.verifier import function_call_item, function_call_output_item, message_item
from recipes.environments.swe.contract import AgentEnd, Evaluation
from tests.page_text import text_of
from tools.look.report.load import RunData
from tools.look.report.replay import MAX_SHOWN, main
from tools.look.report.trajectory import replayed, trajectories

EVIL = "<script>alert(1)</script>\x1b[2J\u202e"


def logged(step: int, instance: str, *, reward: float | None = 1.0, text: str = "ls") -> dict[str, Any]:
    items = [
        {"role": "system", "content": "You are"},
        {"role": "user", "content": "mend it"},
        function_call_item("bash", json.dumps({"command": text}), call_id="1"),
        function_call_output_item(f"out {text}", call_id="1"),
        message_item(f"Done {text}"),
    ]
    evaluation = Evaluation(resolved=reward == 1.0, reason=f"tests {text}")
    trajectory = note_trajectory(
        instance, items, end=AgentEnd.FINISHED, patch=f"--- a\n+++ b\n+{text}", evaluation=evaluation
    )
    return {
        "step": step, "reward": reward, "reason": f"r {text}", "status": "completed", "num_turns": 2, "seconds": 3.0,
        "trajectory": json.loads(json.dumps(trajectory)),
    }  # fmt: skip


def write_run(results: Path, name: str, train: list[dict[str, Any]]) -> Path:
    run_dir = results / name
    (run_dir / "rollouts").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    (run_dir / "rollouts" / "train.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in train), encoding="utf-8"
    )
    return run_dir


def replay(results: Path, run: str, instance: str) -> int:
    return main(["--results", str(results), "--run", run, "--instance", instance])


def test_the_page_shows_every_turn_and_lists_the_rollouts_of_the_instance(tmp_path: Path) -> None:
    rows = [logged(1, "a__b-1", reward=0.0, text="first"), logged(2, "a__b-1"), logged(2, "a__b-12", text="other")]
    run_dir = write_run(tmp_path, "run", rows)
    assert replay(tmp_path, "run", "a__b-1") == 0
    text = text_of((run_dir / "replay-a__b-1.html").read_text(encoding="utf-8"))
    for shown in ("2 logged rollouts", "step 1", "step 2", "turn 1", "turn 2", "bash", "command", "ls", "out ls"):
        assert shown in text, shown
    for shown in ("out first", "+first", "tests first", "fail", "pass", "reward 0", "ended: finished", "mend it"):
        assert shown in text, shown
    assert "other" not in text


def test_hostile_text_is_shown_and_not_acted_on(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "run", [logged(1, EVIL, text=EVIL)])
    assert replay(tmp_path, "run", EVIL) == 0
    [page] = run_dir.glob("replay-*.html")
    raw = page.read_text(encoding="utf-8")
    text_of(raw)
    assert "<script" not in raw
    assert not set("\x1b\u202e") & set(raw)


@pytest.mark.parametrize(
    "noted",
    [
        {},
        {"items": "text"},
        {"items": [3, {"role": None}, {"role": "call", "text": "[" * 5000}]},
        {"tests": [], "patch": 3},
    ],
)
def test_a_trajectory_of_another_form_is_shown_as_far_as_it_goes(noted: dict[str, Any]) -> None:
    text_of(replayed({"step": 1, "reward": "much", "trajectory": {"instance": "a", **noted}}))


def test_the_page_stays_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "run", [logged(step, "a", text="x\n" * 9000) for step in range(3 * MAX_SHOWN)])
    assert replay(tmp_path, "run", "a") == 0
    page = (run_dir / "replay-a.html").read_text(encoding="utf-8")
    assert f"{2 * MAX_SHOWN} older ones are not" in text_of(page)
    assert len(page) < 2_000_000


def test_an_unknown_run_or_instance_is_one_error_that_names_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "run", [logged(1, "a__b-1"), logged(1, "x\x1by")])
    write_run(tmp_path, "other", [{"step": 1, "reward": 1.0}])
    errors = []
    for run, instance in (("runn", "a"), ("run", "a__b-2"), ("", ""), ("other", "a"), ("..", "a")):
        assert replay(tmp_path, run, instance) == 2
        errors.append(capsys.readouterr().err.strip())
    assert "RUN: got runn, expected run, other; name one of them" in errors[0]
    assert "INSTANCE: got a__b-2, expected a__b-1, xU+001By; name one of them" in errors[1]
    assert "RUN: got an empty name, expected other, run" in errors[2]
    assert "no logged rollout has a trajectory" in errors[3]
    assert "RUN: got .., expected" in errors[4]
    assert all("\n" not in error and "Traceback" not in error for error in errors)


def test_the_report_of_a_run_has_some_of_its_last_step() -> None:
    train = [logged(1, "old"), *(logged(2, f"new-{n}", reward=float(n == 3)) for n in range(6))]
    run = RunData(name="r", records=(), rollouts={"train": train}, resolved={}, lock={}, warnings=())
    text = text_of(trajectories(run))
    assert [name for name in ("old", *(f"new-{n}" for n in range(6))) if name in text] == ["new-0", "new-1", "new-3"]
    assert trajectories(RunData(name="r", records=(), rollouts={}, resolved={}, lock={}, warnings=())) == ""
