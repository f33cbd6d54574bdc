"""Rows: equal problems once with their number, manifests, tools, and prompts that ask for low effort."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.launch_case import PLACEHOLDER_ROW, ROW, LaunchCase, write_case
from tools.doctor.data import _maker

EFFORT = "env.nemo_gym.effort_levels"
SHAPING_ON = (f"{EFFORT}.low_weight=0.2", f"{EFFORT}.low_string='{{reasoning effort: low}}'")


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    return write_case(tmp_path)


def asking(text: str, **further: Any) -> dict[str, Any]:
    return {**ROW, "responses_create_params": {"input": [{"role": "user", "content": text}], **further}}


def found(case: LaunchCase, *overrides: str) -> list[tuple[str, str, str]]:
    """Return (code, place, text) of what is wrong with the training rows."""
    problems = [(finding.code, finding.problem) for finding in case.examine("", *overrides)]
    return [
        (code, problem.where.rpartition("/")[2], problem.wrong or problem.got)
        for code, problem in problems
        if code.startswith("DAT") and "train.jsonl" in problem.where
    ]


def test_equal_problems_are_one_finding_with_the_first_line(case):
    lost = {**ROW, "agent_ref": {"name": "mcqa_simple_agnet"}}
    case.write_rows("train.jsonl", ROW, lost, PLACEHOLDER_ROW, lost, lost, PLACEHOLDER_ROW)
    assert found(case) == [
        ("DAT002", "train.jsonl:3", "an unfilled `_hf_placeholder`; run the fill step (and in 1 further rows)"),
        (
            "DAT003",
            "train.jsonl:2",
            "unknown agent 'mcqa_simple_agnet'; did you mean 'mcqa_simple_agent'? (and in 2 further rows)",
        ),
    ]


def test_many_different_problems_are_counted_after_the_first_ten(case):
    rows = [{**ROW, "agent_ref": {"name": f"agent_{number:02}_nobody_knows"}} for number in range(12)]
    case.write_rows("train.jsonl", *rows, rows[11])
    problems = found(case)
    assert len(problems) == 11
    assert problems[-1] == ("DAT003", "train.jsonl", "3 further bad rows of 13")


def test_no_finding_of_one_row_hides_another(case):
    case.write_rows("train.jsonl", {**ROW, "expected_answer": 5})
    (code, place, text) = found(case)[0]
    assert (code, place) == ("DAT004", "train.jsonl:1")
    assert "expected_answer" in text
    (case.directory / "train.jsonl").write_text("\nnot json\n")
    assert [entry[:2] for entry in found(case)] == [("DAT004", "train.jsonl:2"), ("DAT006", "train.jsonl")]
    (case.directory / "train.jsonl").write_text("")
    assert [entry[:2] for entry in found(case)] == [("DAT001", "train.jsonl"), ("DAT006", "train.jsonl")]


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": "object", "properties": []}, "none"])
def test_parameters_of_tools_are_schemas(case, parameters):
    good = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    bad = {"type": "function", "name": "subtract", "parameters": parameters}
    case.write_rows("train.jsonl", asking("1 + 1", tools=[good, bad]), asking("1 + 2", tools=[good]))
    codes = [(code, place) for code, place, text in found(case) if "subtract" in text or code == "DAT005"]
    assert codes == [("DAT005", "train.jsonl:1")]


def test_the_manifest_beside_the_splits_counts_too(case):
    (case.directory / "train.jsonl.manifest.json").unlink()
    assert [entry[0] for entry in found(case)] == ["DAT008"]
    output = {"file": "train.jsonl", "rows": 2}
    (case.directory / "manifest.json").write_text(json.dumps({"outputs": [output]}))
    assert found(case) == [("DAT006", "train.jsonl", "rows 1")]
    output["rows"] = 1
    (case.directory / "manifest.json").write_text(json.dumps({"outputs": [output]}))
    assert found(case) == []


def test_marked_rows_without_shaping_are_a_note(case):
    marked = asking("Which is the first? A or B\n\n{reasoning effort: low}")
    case.write_rows("train.jsonl", ROW, marked, marked)
    (finding,) = [finding for finding in case.examine() if finding.code == "DAT007"]
    assert finding.severity == "note"
    assert finding.problem.what == "2 of 3 rows with '{reasoning effort: low}', and env.nemo_gym.effort_levels is off"
    assert "DAT007" not in case.codes("", *SHAPING_ON)


def test_only_the_last_user_message_can_ask_for_low_effort(case):
    turns = [
        {"role": "user", "content": "{reasoning effort: low}"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "and now?"},
    ]
    row = {**ROW, "responses_create_params": {"input": turns}}
    case.write_rows("train.jsonl", row)
    assert found(case) == []


def test_shaping_without_a_marked_row_is_refused(case):
    assert [entry[0] for entry in found(case, *SHAPING_ON)] == ["DAT009"]


def test_data_are_checked_without_a_model_and_without_a_configuration(case):
    case.write_rows("train.jsonl", PLACEHOLDER_ROW)
    codes = case.codes(MODEL_PATH="", CONFIG_PATH="")
    assert codes == ["ENV001", "ENV001", "DAT002"]


def test_another_engine_routes_rows_by_its_own_table():
    from tools.doctor.data import RowCheck

    check = RowCheck(None, is_native=False)
    row = {**ROW, "agent_ref": {"name": "an_agent_of_another_engine"}}
    assert check(json.dumps(row).encode())[1] == []
    assert [code for code, _ in check(json.dumps(PLACEHOLDER_ROW).encode())[1]] == ["DAT002"]


def test_validation_rows_that_are_training_rows_are_a_note(case):
    case.write_rows("train.jsonl", asking("Pick one."), asking("What IS\n2 + 2?"), asking("And 3 + 3?"))
    case.write_rows("val.jsonl", asking("Something else?"), asking("what is 2 + 2?"), asking("And 3 +  3?"))
    (finding,) = [finding for finding in case.examine() if finding.code == "DAT010"]
    assert finding.severity == "note"
    assert finding.problem.where == str(case.directory / "val.jsonl:2")
    expected = (
        f"2 of 3 validation rows have the text of a training row, the first that of {case.directory}/train.jsonl:2"
    )
    assert finding.problem.wrong == expected
    case.write_rows("val.jsonl", asking("Something else?"))
    assert "DAT010" not in case.codes()


@pytest.mark.parametrize(
    ("directory", "command"),
    [
        ("tiny-swe2", "make tiny BLEND=wide"),
        ("tiny-rlhf", "make tiny BLEND=wide"),
        ("rlvr1", "make data BLEND=rlvr1"),
        ("swe2-good", "make data BLEND=swe2"),
        ("tiny", "make data"),
        ("of-my-own", "make data"),
    ],
)
def test_a_missing_file_is_made_by_the_command_of_its_rows(directory, command):
    assert _maker(Path("data") / directory / "train-split.jsonl") == command
