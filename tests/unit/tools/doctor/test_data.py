"""Rows: equal problems once with their number, manifests, tools, and prompts that ask for low effort."""

from __future__ import annotations

import json
import re
import shlex
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.scoring.known_answers import KNOWN
from recipes.grpo.data import NO_LIMIT, few_rows
from tests.configuration import block
from tests.unit.tools.launch_case import PLACEHOLDER_ROW, ROW, LaunchCase, write_case
from tools.data.rows.validate import main
from tools.doctor import data as doctor_data
from tools.doctor import services
from tools.doctor.machine import maker_of
from tools.draft.launch import ROOT
from tools.environments.check.judge import Judge

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
    (case.directory / "train.jsonl").write_text("\nnot json\n", encoding="utf-8")
    assert [entry[:2] for entry in found(case)] == [("DAT004", "train.jsonl:2"), ("DAT006", "train.jsonl")]
    (case.directory / "train.jsonl").write_text("", encoding="utf-8")
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
    (case.directory / "manifest.json").write_text(json.dumps({"outputs": [output]}), encoding="utf-8")
    assert found(case) == [("DAT006", "train.jsonl", "rows 1")]
    output["rows"] = 1
    (case.directory / "manifest.json").write_text(json.dumps({"outputs": [output]}), encoding="utf-8")
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
        ("tiny-nano", "make tiny BLEND=tools"),
        ("tiny-tools", "make tiny BLEND=tools"),
        ("tiny-taught", "make tiny BLEND=teachers"),
        ("rlvr1", "make data BLEND=rlvr1"),
        ("swe2-good", "make data BLEND=swe2"),
        ("tiny", "make data"),
        ("of-my-own", "make data"),
    ],
)
def test_a_missing_file_is_made_by_the_command_of_its_rows(directory, command):
    assert maker_of(Path("data") / directory / "train-split.jsonl") == command


@pytest.mark.parametrize(
    ("rows", "epochs", "steps", "said"),
    [
        (24, 1, 6, "24 rows x 1 epoch / 16 prompts a step = 1 of the 6 steps asked for; 8 prompts are left over"),
        (24, 2, 6, "24 rows x 2 epochs / 16 prompts a step = 3 of the 6 steps asked for"),
        (24, 4, 6, ""),
        (24, 1, 1, ""),
        (24, 1, NO_LIMIT, ""),  # as the published stages: as many as there are
        (15, 1, 6, ""),  # not one step: refused elsewhere
    ],
)
def test_rows_that_suffice_for_fewer_steps_are_counted(tmp_path, rows, epochs, steps, said):
    cfg = block("grpo", max_num_epochs=epochs, num_prompts_per_step=16, max_num_steps=steps)
    problem = few_rows(tmp_path, rows, cfg)
    assert (problem.wrong if problem else "") == said


def test_few_rows_are_a_note_of_the_doctor(case):
    case.write_rows("train.jsonl", *(asking(f"Which is letter {n}?") for n in range(3)))
    assert found(case) == []
    asked = (
        "grpo.max_num_epochs=1",
        "grpo.max_num_steps=6",
        "grpo.num_prompts_per_step=2",
        "policy.train_global_batch_size=32",
    )
    [(code, _, text)] = found(case, *asked)
    assert code == "DAT011"
    assert text.startswith("3 rows x 1 epoch / 2 prompts a step = 1 of the 6 steps")


def test_the_published_number_of_steps_is_no_limit():
    assert f"max_num_steps: {NO_LIMIT} " in Path("configs/grpo_base.yaml").read_text(encoding="utf-8")


def test_what_the_chat_template_cannot_show_is_found_before_the_run(case):
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}<eos>"
    settings = {"eos_token": "<eos>", "chat_template": template}
    (case.export / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    case.write_rows("train.jsonl", asking("1 + 1"), asking("1 + 2", tools=[tool]), asking("1 + 3", tools=[tool]))
    expected = "responses_create_params: the chat template refuses the request (TemplateError: no tools)"
    refused = [entry for entry in found(case) if "template" in entry[2]]
    assert refused == [("DAT004", "train.jsonl:2", f"{expected} (and in 1 further rows)")]
    (case.export / "tokenizer_config.json").write_text("{", encoding="utf-8")
    assert not any("template" in text for _, _, text in found(case))  # the check of the model says what is wrong


def test_a_key_that_a_row_repeats_is_named_with_its_line(case):
    line = json.dumps(asking("1 + 1")).replace('"expected_answer"', '"expected_answer": "0", "expected_answer"')
    (case.directory / "train.jsonl").write_text(json.dumps(asking("1 + 2")) + "\n" + line + "\n", encoding="utf-8")
    expected = "invalid JSON (one object has the key 'expected_answer' 2 times)"
    assert ("DAT004", "train.jsonl:2", expected) in found(case)


def test_the_command_that_lists_all_bad_rows_reads_them_as_the_launch_does(case, capsys):
    lean = {"agent_ref": {"name": "math_formal_lean_refinement_agent"}, "header": "", "formal_statement": "theorem t"}
    case.write_rows("train.jsonl", asking("Prove it.") | lean, asking("Prove it again.") | lean)
    found = case.examine(CONFIG_PATH="configs/stage2_swe1.yaml")
    (finding,) = [finding for finding in found if finding.code == "DAT004" and "train" in finding.problem.where]
    (command,) = re.findall("`make data-validate (.*)` lists all", finding.problem.fix)
    blend, words = shlex.split(command)
    assert (ROOT / "data" / blend.removeprefix("BLEND=")).resolve() == case.directory
    files = ["--train", str(case.directory / "train.jsonl"), "--val", str(case.directory / "val.jsonl")]
    assert main([*files, *shlex.split(words.removeprefix("ARGS="))]) == 2
    assert finding.problem.wrong.split(" (and in")[0] in capsys.readouterr().err


def test_judges_that_answer_late_hold_the_doctor_for_a_moment_and_are_noted(case, monkeypatch):
    """All are asked side by side: a start waits longer for them."""
    over = threading.Event()
    row = {**KNOWN["multichallenge"].row, "agent_ref": {"name": "multichallenge_simple_agent"}}
    other = {**KNOWN["inverse_if"].row, "agent_ref": {"name": "inverse_if_simple_agent"}}
    case.write_rows("train.jsonl", row, other)
    assert doctor_data.JUDGE_SECONDS + services.PROBE_SECONDS < 60.0
    monkeypatch.setattr(doctor_data, "JUDGE_SECONDS", 1.0)
    with closing(Judge()) as judge:
        monkeypatch.setattr(judge, "says", lambda _request: str(over.wait(120)))
        server = f"{{responses_api_models: {{vllm_model: {{model: m, base_url: '{judge.url}'}}}}}}"
        names = ("multichallenge", "inverse_if")
        asks = (f"env.nemo_gym.{n}={{resources_servers: {{{n}: {{judge_model_server: {{name: j}}}}}}}}" for n in names)
        monkeypatch.setattr(services, "probe", lambda _url: "")
        said = case.examine("", "env.judge_probe='refuse'", f"env.nemo_gym.j={server}", *asks)
        over.set()
    found = [finding for finding in said if finding.code in ("JDG006", "JDG007")]
    assert [finding.code for finding in found] == ["JDG007"] * 2, said
    assert all("within 1 s" in finding.problem.wrong for finding in found)


@pytest.mark.parametrize(("choice", "code"), [("refuse", "JDG006"), ("warn", "JDG007"), ("off", None)])
def test_a_judge_by_url_is_asked_what_is_known_and_one_that_does_not_answer_is_not(case, choice, code):
    row = {**KNOWN["multichallenge"].row, "agent_ref": {"name": "multichallenge_simple_agent"}}
    case.write_rows("train.jsonl", row)
    with closing(Judge()) as judge:
        judge.approves = True  # of everything
        for url, expected in ((judge.url, code), ("http://127.0.0.1:9/v1", None)):
            asks = "multichallenge: {judge_model_server: {name: j}}"
            said = case.examine(
                "",
                f"env.judge_probe='{choice}'",
                f"env.nemo_gym.j={{responses_api_models: {{vllm_model: {{model: m, base_url: '{url}'}}}}}}",
                f"env.nemo_gym.multichallenge={{resources_servers: {{{asks}}}}}",
            )
            found = [finding for finding in said if finding.code in ("JDG006", "JDG007")]
            assert [finding.code for finding in found] == ([expected] if expected else []), said
            assert all("env.nemo_gym.j" in finding.problem.where for finding in found)
            assert not any(finding.code == "CFG001" for finding in said), said
