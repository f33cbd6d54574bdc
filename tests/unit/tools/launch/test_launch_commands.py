"""The command of every stage, scale and platform: a dry run prints what is executed, and that is what is recorded."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

import pytest

from recipes.config.load import find_stage, load_stages
from recipes.errors import LaunchError, Problem
from tests.unit.tools.launch_case import write_case
from tools.dev.golden import combinations, content, environment, in_order, name_of
from tools.draft.findings import CODES, errors, forced
from tools.draft.launch import ROOT, read_launch
from tools.draft.snapshot import CodeVersion
from tools.launch import command

GOLDEN = ROOT / "tests" / "golden" / "launch"
WHEN_MEANT = "when this is meant: make launch-golden, and look at the diff"
COMBINATIONS = list(combinations(load_stages()))


def words(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert command.main(arguments) == 0
    return capsys.readouterr().out.split("\0")


@pytest.mark.parametrize(("stage", "scale", "platform"), COMBINATIONS, ids=lambda part: getattr(part, "id", part))
def test_a_dry_run_prints_what_is_executed_and_recorded(stage, scale, platform, monkeypatch, capsys):
    prepared: list[command.Command] = []
    # Without the doctor and without writing: the inputs of these stages are not here, and no cluster is.
    monkeypatch.setattr(command, "examine", lambda _launch, **_how: [])
    monkeypatch.setattr(command, "start_findings", lambda _launch, **_how: [])
    monkeypatch.setattr(command, "prepare", lambda made: prepared.append(made) or [])
    code = CodeVersion(commit="0" * 40, diff="")  # the checkout may be edited meanwhile
    monkeypatch.setattr(command, "read_code", lambda _root: code)
    path = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(command.os, "environ", environment(stage, scale, platform) | path)
    printed, executed = (words([*option, "--stage", stage.id], capsys) for option in (["--dry-run"], []))
    assert printed[0] == "print"
    assert executed[0] == "exec"
    assert printed[1:] == executed[1:]
    assert executed[1:-1] == list(prepared[0].argv)
    recorded = GOLDEN / name_of(stage, scale, platform)
    assert content(executed[1:-1]) == recorded.read_text(encoding="utf-8"), WHEN_MEANT


@pytest.mark.parametrize("stage_id", ["stage1.1", "stage2.2"])
def test_the_launcher_prints_the_recorded_words(stage_id):
    stage = find_stage(stage_id)
    env = environment(stage, "prod", "b200") | {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    command = [str(ROOT / "super_launch.sh"), "--dry-run", stage_id]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)  # its inputs are not here
    assert content(shlex.split(done.stdout)) == (GOLDEN / name_of(stage, "prod", "b200")).read_text(encoding="utf-8"), (
        WHEN_MEANT
    )


def test_every_recorded_command_is_one_of_these():
    assert {path.name for path in GOLDEN.iterdir()} == {name_of(*combination) for combination in COMBINATIONS}


def test_mounts_have_one_order():
    assert in_order("--mounts=/b:/b,/a:/a:ro") == "--mounts=/a:/a:ro,/b:/b"
    assert in_order("--time=4:00:00") == "--time=4:00:00"


def test_what_fails_while_the_run_is_prepared_is_one_line_and_no_command(monkeypatch, capsys):
    def fail(_made: command.Command) -> list[str]:
        raise LaunchError(Problem(where="tools", got="files that changed", expected="none", fix="start again"))

    monkeypatch.setattr(command, "examine", lambda _launch, **_how: [])
    monkeypatch.setattr(command, "start_findings", lambda _launch, **_how: [])
    monkeypatch.setattr(command, "prepare", fail)
    monkeypatch.setattr(command, "read_code", lambda _root: CodeVersion(commit="0" * 40, diff=""))
    stage = find_stage("stage1.1")
    monkeypatch.setattr(command.os, "environ", environment(stage, "tiny", "h100") | {"PATH": os.environ["PATH"]})
    assert command.main(["--stage", stage.id]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "tools: got files that changed, expected none; start again" in output.err
    assert "Traceback" not in output.err


def test_a_finding_that_may_be_forced_leaves_a_command(tmp_path):
    results = tmp_path / "results"
    for name, when in (("stage1.1-rlvr1", 1.0), ("stage1.1-rlvr1-mine", 2.0)):
        step = results / name / "checkpoints" / "step_000010"
        (step / "hf").mkdir(parents=True)
        (step / "COMPLETE").touch()
        os.utime(step / "COMPLETE", (when, when))
        (step.parent / "latest").symlink_to(step.name)
    env = environment(find_stage("stage1.2"), "prod", "h100") | {"RESULTS_DIR": str(results)}
    launch = read_launch("stage1.2", (), env)
    assert [finding.code for finding in errors(launch.findings)] == ["MDL012"]
    assert not errors(forced(launch.findings))
    assert command.argv_of(launch, ROOT)[0] == "sbatch"


@pytest.mark.parametrize("how", [[], ["--force"]])
def test_a_launch_of_a_production_stage_in_words_of_ours_is_refused(how, tmp_path, monkeypatch, capsys):
    case = write_case(tmp_path)
    env = case.env | {"CONFIG_PATH": "configs/stage3_rlhf.yaml", "SCALE": "tiny", "LAUNCHER": "local"}
    monkeypatch.setattr(command.os, "environ", env | {"PATH": os.environ["PATH"]})
    assert command.main([*how, "env.judge_texts=own"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "super_launch.sh: JDG003 env.judge_texts: " in output.err


def test_what_may_be_forced_or_printed_is_said_by_the_finding_alone():
    """An error of variables or configuration that may be forced has a command: --force could start nothing else."""
    of_input = {code: kind for code, kind in CODES.items() if code[:3] in ("ENV", "CFG")}
    assert all(kind.has_command for kind in of_input.values() if kind.can_force)
    with_command = {code for code, kind in CODES.items() if kind.has_command}
    assert with_command == {"CFG002", "CFG003", "CFG004", "ENG009", "MDL012"}
