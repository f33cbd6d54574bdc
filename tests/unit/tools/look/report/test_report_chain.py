"""The page about a chain: a line per stage with its gain, whatever state its run is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.page_text import text_of
from tools.look.report.chain import ChainStage, summary_lines, write_chain


def write_stage(
    results: Path, stage: str, values: list[float], *, planned: int = 2, finished: bool = True
) -> ChainStage:
    """Write the metrics of a run that was validated at each of its steps."""
    run_dir = results / f"{stage}-x-tiny"
    run_dir.mkdir()
    lines = [
        {
            "step": step,
            "time": 1000.0 + step,
            "validation/accuracy": value,
            "validation/greedy_accuracy": value / 2,
            "train/reward": value,
            "timing/train/policy_training": 3.0,
            "timing/train/total_step_time": 30.0,
        }
        for step, value in enumerate(values)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run_dir / "resolved.json").write_text(
        json.dumps({"config": {"grpo": {"max_num_steps": planned}}}), encoding="utf-8"
    )
    (run_dir / "status.json").write_text(json.dumps({"started": 900.0, "updated": 1020.0}), encoding="utf-8")
    return ChainStage(stage=stage, name="<b>x", run_dir=run_dir, is_finished=finished)


def page_of(stages: list[ChainStage], results: Path) -> str:
    return write_chain(stages, results / "pipeline-tiny.html").read_text(encoding="utf-8")


def test_the_page_has_every_stage_with_its_gain_its_time_and_its_report(tmp_path: Path) -> None:
    stages = [
        write_stage(tmp_path, "stage1.1", [0.25, 0.5, 0.75]),
        write_stage(tmp_path, "stage3", [1.25, 1.5, 1.5], planned=9),
    ]
    page = page_of(stages, tmp_path)
    text = text_of(page)
    assert "all stages finished, and each gained on its held-out rows" in text
    assert "0.2500.750 +0.500" in text
    assert 'href="stage1.1-x-tiny/report.html"' in page
    assert (tmp_path / "stage3-x-tiny" / "report.html").is_file()
    assert "<b>x" not in page
    assert " of 9" not in text  # a finished run whose rows ran out
    assert "4 min 00 s" in text  # two runs of 120 seconds
    assert summary_lines(stages)[1] == "stage3: sampled 1.250 -> 1.500 (+0.250), greedy 0.625 -> 0.750 (+0.125)"


def test_a_stage_that_heals_gains_accepted_drafts_and_stages_apart_are_named(tmp_path: Path) -> None:
    healing = write_stage(tmp_path, "stage4", [0.5, 0.5, 0.5, 0.5])
    frozen = {"config": {"policy": {"megatron_cfg": {"freeze_trunk": True}}}}
    (healing.run_dir / "resolved.json").write_text(json.dumps(frozen), encoding="utf-8")
    rates = [{"step": step, "train/vllm/spec_acceptance_rate": step / 10} for step in (1, 2, 3, 4)]
    with (healing.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"time": 1010.0, **record}) + "\n" for record in rates)
    stages = [write_stage(tmp_path, "stage1.1", [0.25, 0.5]), healing]
    assert summary_lines(stages)[1] == "stage4: drafts accepted 0.150 -> 0.350 (+0.200)"
    text = text_of(page_of(stages, tmp_path))
    assert "each gained on its held-out rows" in text
    assert "stage4: from a model of its own" in text


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([0.75, 0.7, 0.5], "all stages finished; without a gain on held-out rows: stage1.2"),
        ([0.75, 0.75], "all stages finished; without a gain on held-out rows: stage1.2"),
        ([0.75], "no held-out gain was measured in stage1.2"),
    ],
)
def test_the_page_says_which_stage_gained_nothing(tmp_path: Path, second: list[float], expected: str) -> None:
    stages = [write_stage(tmp_path, "stage1.1", [0.25, 0.5]), write_stage(tmp_path, "stage1.2", second)]
    assert expected in text_of(page_of(stages, tmp_path))


def test_a_stage_that_has_not_begun_or_not_ended_has_its_line(tmp_path: Path) -> None:
    begun = write_stage(tmp_path, "stage1.1", [0.25], planned=9, finished=False)
    (begun.run_dir / "status.json").write_text("{", encoding="utf-8")
    missing = ChainStage(stage="stage1.2", name="rlvr2", run_dir=tmp_path / "nothing", is_finished=False)
    text = text_of(page_of([begun, missing], tmp_path))
    assert "not finished: stage1.1, stage1.2" in text
    assert "not begun" in text
    assert "0 of 9" in text
    assert not missing.run_dir.exists()
    assert summary_lines([begun, missing]) == [
        "stage1.1 (not finished): no gain measured",
        "stage1.2 (not begun): no gain measured",
    ]
