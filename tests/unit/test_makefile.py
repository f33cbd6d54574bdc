"""Every target has a help line that `make` prints, the stage targets are the stage table, and recipes stay short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from recipes.config.load import load_stages
from recipes.environments.agents.coding.programs import PROGRAMS
from tools.dev.stage_table import markdown, replaced, rows
from tools.draft.launch import TINY_DENSE_MODEL, TINY_MODEL, TOOLS_MODEL, WIDE_MODEL
from tools.tiny.model import BUILDERS
from tools.tiny.prepare import MADE, checkpoint_name

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MAX_RECIPE_LINES = 3


WIDTH = 100


def printed(*words: str) -> str:
    return subprocess.run(["make", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def help_text() -> str:
    return printed("help-all")


def test_make_alone_prints_the_targets_for_daily_use(help_text):
    daily = [line.split()[0] for line in printed().splitlines() if line.startswith("  ")]
    assert {"setup", "smoke", "stage1.1", "pipeline", "doctor", "data", "status", "report", "test"} <= set(daily)
    assert len(daily) <= 17
    for text in (printed(), help_text):
        assert max(len(line) for line in text.splitlines()) <= WIDTH


def phony_targets() -> list[str]:
    stages = re.search(r"^ALL_STAGES := (.*)$", MAKEFILE, re.MULTILINE)
    assert stages is not None
    return [
        target
        for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
        for target in line.replace("$(ALL_STAGES)", stages[1]).split()
    ]


@pytest.mark.parametrize("target", phony_targets())
def test_every_target_has_help(help_text, target):
    assert re.search(rf"^  {re.escape(target)} +\S.{{9,}}$", help_text, re.MULTILINE), f"no help for {target}"


def test_every_target_is_phony():
    documented = re.findall(r"^([a-zA-Z0-9._-]+):.*##[*]? ", MAKEFILE, re.MULTILINE)
    assert sorted(documented) == sorted(phony_targets())


def test_stage_targets_are_the_stage_table():
    stages = re.search(r"^ALL_STAGES := (.*)$", MAKEFILE, re.MULTILINE)
    assert stages is not None
    assert stages[1].split() == [stage.id for stage in load_stages()]
    for stage in load_stages():
        assert re.search(rf"^{re.escape(stage.id)}: ##[*]? .*\({stage.name}\)", MAKEFILE, re.MULTILINE)


def test_recipes_are_short():
    for rule in re.split(r"\n(?=\S)", MAKEFILE):
        recipe = re.sub(r"\\\n", "", rule).splitlines()[1:]
        assert len([line for line in recipe if line.startswith("\t")]) <= MAX_RECIPE_LINES, rule


def test_a_report_is_of_the_run_that_logged_last(tmp_path):
    assert (
        "no run in"
        in subprocess.run(
            ["make", "-n", "report", f"RESULTS_DIR={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=30
        ).stderr
    )
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        os.utime(tmp_path / name / "metrics.jsonl", (number, number))
    (tmp_path / "old" / "report.html").touch()
    (tmp_path / "profile-tiny").mkdir()  # no run
    command = printed("-n", "report", f"RESULTS_DIR={tmp_path}")
    assert command.rstrip().endswith(f"tools.look.report --run-dir '{tmp_path}/new'"), command


def test_results_may_lie_in_a_directory_with_a_space(tmp_path):
    results = tmp_path / "my results"
    (results / "run").mkdir(parents=True)
    (results / "run" / "metrics.jsonl").touch()
    words = shlex.split(printed("-n", "report", f"RESULTS_DIR={results}"))
    assert words[words.index("--run-dir") + 1 :] == [f"{results}/run"]
    for target in ("status", "watch", "swe-replay"):
        words = shlex.split(printed("-n", target, f"RESULTS_DIR={results}"))
        assert words[words.index("--results") + 1] == str(results)
    launched = printed("-n", "smoke", f"RESULTS_DIR={results}", "EXP_NAME=mine")
    assert launched.count(f"--run-dir '{results}/mine'") == 2


def test_the_name_of_the_machine_is_no_name_of_an_environment(monkeypatch):
    """As under WSL, which exports it as NAME."""
    monkeypatch.setenv("NAME", "DESKTOP-1")
    assert "DESKTOP-1" not in printed("-n", "env-check")
    assert "--name mcqa" in printed("-n", "env-check", "NAME=mcqa")


def test_no_warning_and_no_unknown_target():
    result = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.stderr == ""
    unknown = subprocess.run(["make", "frobnicate"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert unknown.returncode == 2


def dry_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)


def test_misspelt_variables_are_refused_by_every_target():
    for target in ("stage1.1", "data", "clean"):
        refused = dry_run(target, "CONATINER=image", "BLNED=rlvr1", "SCALE=tiny")
        assert refused.returncode == 2
        assert re.search("got (CONATINER BLNED|BLNED CONATINER), which nothing here reads", refused.stderr)
    assert (
        dry_run("stage1.1", "CONTAINER=x", "SIF_DIR=x", "BLEND=x", "MAX_RESTARTS=1", "WANDB_MODE=offline").returncode
        == 0
    )
    assert dry_run("container", "REGISTRY=x", "VLLM_VERSION=x").returncode == 0


# A variable of make that the target would have ignored, and one that it reads.
READ = {
    "smoke": ("MODEL_PATH", "MODEL"),
    "stage1.1": ("SEEDS", "MODEL_PATH"),
    "stage2.1": ("SEEDS", "CONFIG_PATH"),
    "pipeline": ("MODEL", "STAGES"),
    "doctor": ("SEEDS", "STAGE"),
    "plan": ("SEEDS", "MODEL_PATH"),
    "config": ("MODEL_PATH", "DIFF"),
    "data": ("MODEL_PATH", "BLEND"),
    "data-validate": ("STAGE", "BLEND"),
    "profile": ("EXP_NAME", "MODEL_PATH"),
    "curriculum": ("MODEL_PATH", "EXP_NAME"),
    "tiny": ("MODEL_PATH", "BLEND"),
    "status": ("RUN", "EXP_NAME"),
    "watch": ("ARGS", "EXP_NAME"),
    "report": ("ARGS", "EXP_NAME"),
    "ablate": ("MODEL", "SEEDS"),
    "env-check": ("BLEND", "NAME"),
    "bench-data": ("ROUNDS", "ARGS"),
    "lint": ("ARGS", ""),
    "clean": ("ARGS", ""),
}


@pytest.mark.parametrize("target", READ)
def test_a_variable_that_the_target_does_not_read_is_refused(target: str) -> None:
    other, read = READ[target]
    refused = dry_run(target, f"{other}=x")
    assert refused.returncode == 2
    assert f"got {other}, which " in refused.stderr
    accepted = dry_run(target, f"{read}=x" if read else "STAGE=", "SCALE=")
    assert "which `make" not in accepted.stderr and "nothing here reads" not in accepted.stderr


def test_what_a_target_reads_is_in_its_help(help_text: str) -> None:
    """Every variable in a target's own recipe, except those that others are made from, stands in its `#=` lines."""
    own = {"PYTHON", "READY", "VENV", "CURDIR", "MAKE", "ALL_STAGES", "TINY_STEPS", "MAKEFILE_LIST", "BEFORE"}
    for rule in re.findall(
        r"^([a-z][a-z0-9-]+):[^\n]*##(.*(?:\n#=.*)*)((?:\n(?:\t|ifeq|else|endif).*)*)", MAKEFILE, re.MULTILINE
    ):
        target, described, recipe = rule
        for name in set(re.findall(r"\$\((?:or \$\()?([A-Z][A-Z_]+)", recipe)) - own:
            made_from = re.search(rf"^(?:override )?{name} [:?]?= ?(.*)$", MAKEFILE, re.MULTILINE)
            is_of_user = re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE)
            if is_of_user and made_from:
                assert re.search(rf"\b{name}\b", described), f"{target} reads {name}"


def test_smoke_trains_with_two_processes_by_one_variable():
    def launched(*words: str) -> str:
        (line,) = [line for line in dry_run("smoke", *words).stdout.splitlines() if "super_launch.sh stage1.1" in line]
        return line

    parallel = "policy.megatron_cfg.{}_parallel_size=2"
    assert "gpus_per_node" not in launched()
    assert all("cluster.gpus_per_node=3" in launched(f"{kind}=2") for kind in ("TP", "DP", "EP"))
    assert parallel.format("tensor_model") in launched("TP=2")
    assert "_parallel_size" not in launched("DP=2")
    assert parallel.format("expert_model") in launched("EP=2")
    for words in (["TP=3"], ["TP=2", "DP=2"]):
        refused = dry_run("smoke", *words)
        assert refused.returncode == 2 and f"got {' '.join(words)}, expected one of TP=2, DP=2" in refused.stderr


def test_smoke_trains_the_hybrid_with_experts_unless_told_otherwise():
    def lines(*words: str) -> str:
        return " ".join(dry_run("smoke", *words).stdout.split())

    for words in ([], ["EP=2"], *([f"MODEL={name}"] for name in BUILDERS)):
        name = words[0].removeprefix("MODEL=") if words and "MODEL" in words[0] else "nemotron-h"
        assert f"MODEL_PATH={ROOT}/models/tiny-{name}-sft" in lines(*words)
        assert f"tools.tiny.prepare --models models --data data --model {name}" in lines(*words)


def test_smoke_trains_a_real_model_with_rows_sizes_and_steps_of_its_own():
    lines = " ".join(dry_run("smoke", "MODEL=smollm2", "ARGS=a=1").stdout.split())
    assert lines.count(f"MODEL_PATH={ROOT}/models/smollm2 CONFIG_PATH=configs/tiny/smollm2.yaml") == 2
    assert lines.count(f"VAL_PATH={ROOT}/data/english/val-split.jsonl ./super_launch.sh") == 2
    assert "stage1.1 a=1" in lines and "max_num_steps" not in lines and "-sft" not in lines
    assert "tools.tiny.prepare --models models --data data --model smollm2" in lines
    assert lines.count("--min-gain 0.15") == 2


def test_the_commands_after_smoke_take_the_model_that_it_makes() -> None:
    made = Path(TINY_MODEL)
    assert f"MODEL_PATH={ROOT}/{made} " in " ".join(dry_run("smoke").stdout.split())
    assert checkpoint_name("tiny", MADE["tiny"][2]) == made.name, "what `make tiny` makes, also before ablate"
    assert checkpoint_name("wide", MADE["wide"][2]) == Path(WIDE_MODEL).name
    assert checkpoint_name("tools", MADE["tools"][2]) == Path(TOOLS_MODEL).name
    own = MADE.keys() - {"teachers"}  # whose student is the plain one
    assert len({checkpoint_name(blend, model) for blend in own for model in BUILDERS}) == len(own) * len(BUILDERS)
    assert f"--model {made} " in dry_run("profile").stdout
    assert checkpoint_name("tiny", "qwen3") == Path(TINY_DENSE_MODEL).name
    assert "--model qwen3" in " ".join(dry_run("bench-train").stdout.split())


@pytest.mark.parametrize(("words", "is_made"), [([], True), (["ARGS=--check"], False), (["DRY_RUN=1"], False)])
def test_variants_that_are_only_checked_train_nothing(words: list[str], is_made: bool) -> None:
    assert ("tools.tiny.prepare" in dry_run("ablate", "SCALE=tiny", *words).stdout) is is_made


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["smoke", "ARGS=a=1"], "super_launch.sh --check stage1.1 grpo.max_num_steps=40 a=1"),
        (["ablate", "SCALE=tiny", "SEEDS=7"], '--seeds "7" --set grpo.max_num_steps=40 --check'),
        (["pipeline", "SCALE=tiny", "LAUNCHER=local", "ARGS=a=1"], "--check a=1"),
    ],
)
def test_a_wrong_input_is_said_before_the_warm_up(words, check):
    lines = " ".join(dry_run(*words).stdout.split())
    assert 0 <= lines.find(check) < lines.find("tools.tiny.prepare")
    assert "--check" not in dry_run("tiny").stdout


@pytest.mark.parametrize(
    "words", [["config"], ["plan"], ["data", "BLEND=rlvr1"], ["serve-env"], ["sandbox"], ["ablate"]]
)
def test_an_empty_variable_counts_as_not_given(words, monkeypatch):
    names = ("SCALE", "PLATFORM", "ENGINE", "STAGE", "RESULTS_DIR", "VAL_ROWS", "PORT", "SANDBOX", "SEEDS", "AGENT")
    expected = dry_run(*words).stdout
    assert dry_run(*words, *(f"{name}=" for name in names)).stdout == expected
    for name in names:
        monkeypatch.setenv(name, "")
    assert dry_run(*words).stdout == expected


def test_options_that_the_tiny_rows_do_not_have_are_refused():
    assert "give a BLEND with it" in dry_run("data", "VAL_ROWS=7").stderr
    assert "--data data --stratify agent" in " ".join(dry_run("data", "ARGS=--stratify agent").stdout.split())


def test_a_file_of_ones_own_can_be_shown():
    assert "--file my.yaml --scale" in dry_run("config", "FILE=my.yaml").stdout


def test_unknown_stage_is_answered_by_the_launcher():
    assert "./super_launch.sh stage1.4" in dry_run("stage1.4").stdout


def test_bench_refuses_options_that_only_one_of_its_parts_has():
    parts = [f"-m {module}" for module in ("tools.bench", "tools.bench.data", "tools.bench.verifiers", "slurm.bench")]
    assert all(re.search(rf"{part} *$", dry_run("bench").stdout, re.MULTILINE) for part in parts)
    assert "-m tools.bench.data --rounds 5" in dry_run("bench-data", "ARGS=--rounds 5").stdout
    refused = dry_run("bench", "ARGS=--rounds 5")
    assert refused.returncode == 2
    assert "ARGS: got --rounds 5, expected nothing; " in refused.stderr


def test_readme_has_the_current_stage_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert replaced(readme, markdown(rows(load_stages()))) == readme, "run: make stages"


def test_readme_names_only_targets_that_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z][a-z0-9.-]*)", readme)) | set(
        re.findall(r"^    make ([a-z][a-z0-9.-]*)", readme, re.MULTILINE)
    )
    assert {"smoke", "test"} <= named
    assert named <= set(phony_targets())


@pytest.mark.parametrize(("folder", "mark"), [("functional", "functional"), ("gpu", "gpu")])
def test_what_the_unit_tier_does_not_collect_is_of_another_tier(folder, mark):
    (recipe,) = re.findall(r"^\t\$\(PYTHON\) -m pytest -m 'not functional.*(?:\\\n.*)*", MAKEFILE, re.MULTILINE)
    assert f"--ignore tests/{folder} " in recipe
    for path in (ROOT / "tests" / folder).rglob("test_*.py"):
        marks = path.read_text(encoding="utf-8").partition("\npytestmark = ")[2].partition("\n\n")[0]
        assert re.search(rf"pytest\.mark\.{mark}\b", marks), path.name


@pytest.mark.parametrize(
    ("words", "makes"),
    [
        (["LAUNCHER=local"], "--models models --data data --stages ''"),
        (["LAUNCHER=local", "STAGES=stage1.1 mopd"], "--models models --data data --stages 'stage1.1 mopd'"),
        (["LAUNCHER=local", "BLEND=wide", "STAGES=stage1.1"], "--blend wide --stages 'stage1.1'"),
        (["LAUNCHER=local", "MODEL_PATH=/sft"], ""),
        (["LAUNCHER=local", "DRY_RUN=1"], ""),
        (["LAUNCHER=slurm"], ""),
    ],
)
def test_a_tiny_pipeline_on_this_machine_makes_what_it_starts_from(words: list[str], makes: str) -> None:
    lines = dry_run("pipeline", "SCALE=tiny", *words).stdout.splitlines()
    prepared = [line for line in lines if "tools.tiny.prepare" in line]
    [run] = [line for line in lines if "tools.launch.pipeline" in line and "--check" not in line]
    if "DRY_RUN=1" in words:  # it says what it would make, and makes nothing
        assert prepared == [run]
        assert '--first ".venv/bin/python -m tools.tiny.prepare' in run
        return
    assert len(prepared) == bool(makes)
    assert all(" ".join(line.split()).endswith(makes) for line in prepared)


def test_the_longest_tier_installs_every_agent_program() -> None:
    said = dry_run("test-all").stdout
    assert "warning" not in said
    for name in PROGRAMS:
        assert said.index(f"tools.dev.agent_programs {name}\n") < said.index("pytest -m 'not gpu'")
