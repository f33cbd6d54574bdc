"""Reading run directories in every state a run can leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.errors import InputError
from tools.look.report.load import load_run


def write_lines(run_dir: Path, *lines: str, tail: str = "") -> Path:
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + tail, encoding="utf-8")
    return run_dir


def test_a_step_written_twice_is_one_record_with_the_last_values(tmp_path: Path) -> None:
    run = load_run(
        write_lines(
            tmp_path / "run",
            '{"step": 2, "time": 5.0, "train/reward": 0.5, "train/loss": null, "non_finite": {"train/loss": "nan"}}',
            '{"step": 1, "time": 4.0, "train/reward": 0.25}',
            '{"step": 2, "time": 6.0, "train/reward": 0.75}',
        )
    )
    column = run.column("train/reward")
    assert (column.steps, column.values) == ((1, 2), (0.25, 0.75))
    assert run.records[1].time == 6.0
    assert run.records[1].non_finite == {"train/loss": "nan"}
    assert run.column("train/loss").last is None


def test_a_line_being_written_is_skipped_and_a_damaged_one_reported(tmp_path: Path) -> None:
    lines = ['{"step": 1, "x": 1}', "garbage", '["no object"]', '{"step": 2, "x": 2}']
    run = load_run(write_lines(tmp_path / "run", *lines, tail='{"step": 3, "x'))
    assert run.column("x").steps == (1, 2)
    damaged = [warning for warning in run.warnings if "metrics.jsonl" in warning]
    assert [warning.split(":")[1] for warning in damaged] == ["2", "3"]


def test_agents_are_found_by_key(tmp_path: Path) -> None:
    values = {"validation/accuracy": 1, "validation/mcqa/accuracy": 1, "validation/math/accuracy": 1, "validation/x": 1}
    run = load_run(write_lines(tmp_path / "run", json.dumps({"step": 0, **values})))
    assert run.agents("validation/", "/accuracy") == ["math", "mcqa"]


def test_settings_are_read_by_dotted_key(tmp_path: Path) -> None:
    run_dir = write_lines(tmp_path / "run", '{"step": 0}')
    (run_dir / "resolved.json").write_text('{"grpo": {"max_num_steps": 40}}', encoding="utf-8")
    run = load_run(run_dir)
    assert run.setting("grpo.max_num_steps") == 40
    assert run.setting("grpo.max_num_steps.more") is None
    assert run.setting("policy.model_name") is None
    assert any("run.lock.json is missing" in warning for warning in run.warnings)


@pytest.mark.parametrize("content", [None, "", '{"step": 1'])
def test_no_finished_step_is_a_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"give results/<EXP_NAME> of a run that has done a step"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        load_run(tmp_path / "nowhere")


def test_those_that_were_not_up_are_named_with_the_reason(tmp_path: Path) -> None:
    run_dir = write_lines(tmp_path / "run", '{"step": 1, "time": 4.0}')
    for missing in ({"generation engine 3": "start 3 of 3 failed: no memory"}, {}, None, 7):
        (run_dir / "status.json").write_text(json.dumps({"missing": missing}), encoding="utf-8")
        said = [line for line in load_run(run_dir).warnings if "it ran without" in line]
        assert len(said) == (len(missing) if isinstance(missing, dict) else 0)
        assert all(line.endswith("generation engine 3: start 3 of 3 failed: no memory") for line in said)
