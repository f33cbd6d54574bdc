"""A launch as it is read: the stage table fills what is not set, texts stay texts."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config.load import find_stage
from recipes.errors import ConfigError, LaunchError
from tools.draft.contract import read_contract
from tools.draft.launch import ROOT as REPOSITORY
from tools.draft.launch import (
    as_text,
    choice_problems,
    launch_overrides,
    read_launch,
    stage_defaults,
    stage_environment,
)

ROOT = Path("/checkout")


def filled(name: str, environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return the variables with what the stage table fills; raises `LaunchError` for a choice that there is not."""
    if problems := choice_problems(environ):
        raise LaunchError(problems)
    return stage_environment(stage_defaults(find_stage(name), environ, root), environ)


def test_a_stage_that_needs_another_tiny_model_does_not_start_from_the_one_before():
    for stage, model in (("stage4", "nemotron-h-heads"), ("mopd", "nemotron-h"), ("nano-rl", "tools")):
        assert filled(stage, {"SCALE": "tiny"}, ROOT)["MODEL_PATH"] == f"/checkout/models/tiny-{model}-sft"
    assert filled("nano-dpo", {"SCALE": "tiny"}, ROOT)["TRAIN_PATH"] == "/checkout/data/tiny-tools/train-split.jsonl"
    assert filled("nano-dpo", {}, ROOT)["MODEL_PATH"] == "/checkout/results/nano3-rl/checkpoints/latest/hf"


def test_a_stage_with_a_model_of_its_own_asks_for_no_newer_parent(tmp_path):
    save(tmp_path, "stage3-rlhf-tiny", 1.0)
    environ = {"SCALE": "tiny", "RESULTS_DIR": str(tmp_path)}
    launch = read_launch("stage4", [], {**environ, "LAUNCHER": "local"}, REPOSITORY)
    assert "MDL012" not in {finding.code for finding in launch.findings}


def test_first_stage_at_scale_tiny_needs_nothing():
    env = filled("stage1.1", {"SCALE": "tiny"}, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1-tiny"
    assert env["MODEL_PATH"] == "/checkout/models/tiny-nemotron-h-sft"
    assert env["TRAIN_PATH"] == "/checkout/data/tiny/train-split.jsonl"
    assert env["VAL_PATH"] == "/checkout/data/tiny/val-split.jsonl"
    assert env["CONFIG_PATH"].endswith("configs/tiny/stage1_rlvr.yaml")
    assert env["STAGE"] == "stage1.1"


def test_first_production_stage_asks_for_the_sft_checkpoint():
    env = filled("rlvr1", {}, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1"
    assert env["TRAIN_PATH"] == "/checkout/data/rlvr1/train-split.jsonl"
    assert "MODEL_PATH" not in env


def test_later_stage_starts_from_its_parents_last_complete_export():
    env = filled("stage1.2", {"RESULTS_DIR": "/runs"}, ROOT)
    assert env["MODEL_PATH"] == "/runs/stage1.1-rlvr1/checkpoints/latest/hf"
    tiny = filled("stage1.2", {"SCALE": "tiny"}, ROOT)
    assert tiny["MODEL_PATH"] == "/checkout/results/stage1.1-rlvr1-tiny/checkpoints/latest/hf"


def save(results: Path, run: str, when: float) -> Path:
    """Leave the export of a run that saved at `when`."""
    step = results / run / "checkpoints" / "step_000010"
    (step / "hf").mkdir(parents=True)
    (step / "COMPLETE").touch()
    os.utime(step / "COMPLETE", (when, when))
    (step.parent / "latest").symlink_to(step.name)
    return step.parent / "latest" / "hf"


OWN, OWN_FILE = "stage1.1-rlvr1-mine", {"CONFIG_PATH": "/somewhere/mine.yaml"}
PARENTS = {  # the runs that are there, oldest first, with what the user has set -> the newer one that is named
    "only the stage's own": (["stage1.1-rlvr1"], {}, None),
    "none": ([], {}, None),
    "with a file of the user's, then without": ([OWN], {}, OWN),
    "an older one without": (["stage1.1-rlvr1", OWN], {}, OWN),
    "a newer one without": ([OWN, "stage1.1-rlvr1"], {}, None),
    "the same file for both": (["stage1.1-rlvr1", OWN], OWN_FILE, None),
    "an older one with the same file": ([OWN, "stage1.1-rlvr1"], OWN_FILE, "stage1.1-rlvr1"),
    "another file": (["stage1.1-rlvr1", OWN], {"CONFIG_PATH": "other.yaml"}, OWN),
    "another scale, another blend": (["stage1.1-rlvr1", "stage1.1-rlvr1-small", "stage1.1-rlvr1-tiny-wide"], {}, None),
    "another stage": (["stage1.1-rlvr1", "stage1.2-rlvr2"], {}, None),
    "weights of the user's choice": (["stage1.1-rlvr1", OWN], {"MODEL_PATH": "m"}, None),
}


@pytest.mark.parametrize("name", PARENTS)
def test_a_newer_run_of_the_parent_is_not_passed_over_in_silence(tmp_path, name):
    runs, variables, expected = PARENTS[name]
    exports = {run: save(tmp_path, run, float(when)) for when, run in enumerate(runs, start=1)}
    environ = {"RESULTS_DIR": str(tmp_path), "PERSISTENT_CACHE": "c", **variables}
    found = [one.problem for one in read_launch("stage1.2", [], environ, REPOSITORY).findings if one.code == "MDL012"]
    named = [problem.fix.partition(",")[0] for problem in found]
    assert named == ([f"set MODEL_PATH={exports[expected]}"] if expected else [])
    assert all("stage1.1 has saved" in problem.what for problem in found)


def test_paths_name_the_same_place_in_the_directory_of_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").symlink_to("step_1")
    given = {"MODEL_PATH": "latest/hf/", "TRAIN_PATH": "rows.jsonl", "PERSISTENT_CACHE": "cache", "SIF_DIR": "/sif"}
    contract, _ = read_contract(given)
    assert {name: contract[name] for name in given} == {
        "MODEL_PATH": f"{tmp_path}/latest/hf",  # the link is followed when the job starts
        "TRAIN_PATH": f"{tmp_path}/rows.jsonl",
        "PERSISTENT_CACHE": f"{tmp_path}/cache",
        "SIF_DIR": "/sif",
    }
    assert contract["VAL_PATH"] == ""


def test_swe_stages_have_their_own_image_where_one_is_given():
    images = {"CONTAINER": "training.sqsh", "SWE_CONTAINER": "swe.sqsh"}
    assert filled("stage2.2", images, ROOT)["CONTAINER"] == "swe.sqsh"
    assert filled("stage2.1", images, ROOT)["CONTAINER"] == "training.sqsh"
    assert filled("stage2.2", {"CONTAINER": "training.sqsh"}, ROOT)["CONTAINER"] == "training.sqsh"


def test_stage_2_2_trains_on_the_rows_whose_images_are_good(tmp_path):
    (tmp_path / "data/swe2-good").mkdir(parents=True)
    assert filled("stage2.2", {}, tmp_path)["TRAIN_PATH"] == f"{tmp_path}/data/swe2/train-split.jsonl"
    (tmp_path / "data/swe2-good/manifest.json").touch()  # the last thing that `make sif-check` writes
    env = filled("stage2.2", {}, tmp_path)
    assert env["TRAIN_PATH"] == f"{tmp_path}/data/swe2-good/train-split.jsonl"
    assert env["VAL_PATH"] == f"{tmp_path}/data/swe2-good/val-split.jsonl"
    assert filled("stage2.2", {"TRAIN_PATH": "mine"}, tmp_path)["TRAIN_PATH"] == "mine"
    assert filled("stage2.2", {"SCALE": "tiny"}, tmp_path)["TRAIN_PATH"].endswith("data/tiny-swe2/train-split.jsonl")


def test_the_wide_blend_has_its_own_rows_model_and_runs():
    variables = {"SCALE": "tiny", "BLEND": "wide"}
    env = filled("stage1.1", variables, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1-tiny-wide"
    assert env["MODEL_PATH"] == "/checkout/models/tiny-wide-sft"
    assert env["TRAIN_PATH"] == "/checkout/data/tiny-wide/train-split.jsonl"
    assert env["CONFIG_PATH"].endswith("configs/tiny/wide.yaml")
    env = filled("stage1.2", variables, ROOT)
    assert env["MODEL_PATH"] == "/checkout/results/stage1.1-rlvr1-tiny-wide/checkpoints/latest/hf"


@pytest.mark.parametrize(
    ("stage", "rows"), [("stage2.1", "tiny-swe1"), ("stage2.2", "tiny-swe2"), ("stage3", "tiny-rlhf")]
)
@pytest.mark.parametrize("blend", ["", "wide"])
def test_a_stage_with_environments_of_its_own_has_its_own_tiny_rows(stage, rows, blend):
    env = filled(stage, {"SCALE": "tiny", "BLEND": blend}, ROOT)
    assert env["VAL_PATH"] == f"/checkout/data/{rows}/val-split.jsonl"
    assert env["CONFIG_PATH"].endswith(("tiny/stage2_swe1.yaml", "tiny/stage2_swe2.yaml", "tiny/stage3_rlhf.yaml"))
    assert env.get("SIF_DIR", "") == ("/checkout/data/tiny-swe2/images" if stage == "stage2.2" else "")


def test_a_blend_that_is_not_there_is_refused_at_the_tiny_scale():
    with pytest.raises(LaunchError, match="BLEND"):
        filled("stage1.1", {"SCALE": "tiny", "BLEND": "wide1"}, ROOT)
    assert filled("stage1.1", {"BLEND": "rlvr1"}, ROOT)["TRAIN_PATH"].endswith("data/rlvr1/train-split.jsonl")


def test_what_is_set_wins_and_empty_counts_as_not_set():
    env = filled("stage1.1", {"EXP_NAME": "mine", "VAL_PATH": "", "CONFIG_PATH": "c.yaml"}, ROOT)
    assert env["EXP_NAME"] == "mine"
    assert env["CONFIG_PATH"] == "c.yaml"
    assert env["VAL_PATH"] == "/checkout/data/rlvr1/val-split.jsonl"


@pytest.mark.parametrize("variables", [{"SCALE": "huge"}, {"PLATFORM": "a100"}])
def test_wrong_scale_or_platform_is_refused(variables):
    with pytest.raises(LaunchError, match=next(iter(variables))):
        filled("stage1.1", variables, ROOT)


def test_stage_without_a_configuration_says_so():
    with pytest.raises(ConfigError, match=r"stage3.configs.small.b200: the stage has no file"):
        filled("stage3", {"SCALE": "small", "PLATFORM": "b200"}, ROOT)


@pytest.mark.parametrize("text", ["plain", "/a/path with spaces", "42", "1e-6", "no", "null", "a: b", "{x", "'", ""])
def test_texts_stay_texts_in_yaml(text):
    assert yaml.safe_load(as_text(text)) == text
    assert as_text("/plain/path") == "/plain/path"  # quoted only where needed


def test_seed_is_an_override_only_when_given():
    without, _ = read_contract({})
    assert not [word for word in launch_overrides(without) if word.startswith("grpo.seed")]
    with_seed, _ = read_contract({"SEED": "44"})
    assert launch_overrides(with_seed)[-1] == "grpo.seed=44"


@pytest.mark.parametrize(
    ("given", "is_on", "variables"),
    [({}, False, {}), ({"WANDB": "1"}, True, {}), ({"WANDB": "offline"}, True, {"WANDB_MODE": "offline"})],
)
def test_a_variable_switches_weights_and_biases_on(given, is_on, variables):
    launch = read_launch("stage1.1", (), {"SCALE": "tiny", "LAUNCHER": "local", **given})
    assert launch.config is not None
    assert launch.config.logger.wandb_enabled is is_on
    assert launch.job_variables == variables
    assert variables.items() <= launch.environ.items()
    own = read_launch("stage1.1", ("logger.wandb_enabled=false",), {"SCALE": "tiny", **given})
    assert own.config is not None
    assert not own.config.logger.wandb_enabled


def test_weights_and_biases_has_no_other_setting():
    _, findings = read_contract({"WANDB": "yes"})
    assert "WANDB: got yes, expected 0 or 1 or offline; correct the value" in [str(one.problem) for one in findings]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{instance_id}.sif", "{instance_id}.sif"),
        ('["a/{instance_id}.sif", "b.sif"]', ["a/{instance_id}.sif", "b.sif"]),
    ],
)
def test_names_of_task_images_reach_the_agent(names, expected):
    launch = read_launch("stage2.2", (), {"SCALE": "tiny", "CONTAINER_FORMATTER": names, "SIF_DIR": "/sif"})
    assert launch.config is not None
    assert launch.config.sif_dir == "/sif"
    agent = launch.config.env.nemo_gym.instances["swe_agents_train"]["responses_api_agents"]["swe_agents"]
    assert agent["container_formatter"] == expected


@pytest.mark.parametrize(
    ("variable", "override", "is_refused"),
    [
        ("TRAIN_PATH", "data.train.data_path=/data/other.jsonl", True),
        ("VAL_PATH", "data.validation.data_path=other.jsonl", True),
        ("MODEL_PATH", "policy.model_name=/models/other", True),
        ("SIF_DIR", "sif_dir=/other", True),
        ("TRAIN_PATH", "data.train.data_path=/data/one", False),
        ("VAL_PATH", "data.validation.data_path=null", False),
    ],
)
def test_an_input_is_named_by_its_variable_which_is_checked_and_recorded(variable, override, is_refused):
    launch = read_launch("stage1.1", (override,), {"SCALE": "tiny", variable: "/data/one"})
    found = [finding.problem for finding in launch.findings if finding.code == "ENV008"]
    assert [problem.expected for problem in found] == ([f"{variable}, /data/one"] if is_refused else [])


def test_a_configuration_of_ones_own_has_a_run_of_its_own(tmp_path):
    given = {"CONFIG_PATH": "configs/native_gpu.yaml", "RESULTS_DIR": str(tmp_path)}
    env = filled("stage1.1", given, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1-native_gpu"
    assert filled("stage1.2", given, ROOT)["MODEL_PATH"].startswith(f"{tmp_path}/stage1.1-rlvr1/")
    (tmp_path / env["EXP_NAME"]).mkdir()
    parent = filled("stage1.2", given, ROOT)["MODEL_PATH"]
    assert parent == f"{tmp_path}/stage1.1-rlvr1-native_gpu/checkpoints/latest/hf"


MAY_READ_THE_ENVIRONMENT = {  # what runs before a launch is read, or on a node; and what Slurm's programs inherit
    "tools/doctor/__main__.py": {"main"},
    "tools/launch/command.py": {"main"},
    "tools/draft/nemo_rl/driver.py": {"main"},
    "tools/draft/run_dir.py": {"this_process"},
    "tools/draft/slurm.py": {"asking_environment"},
}


def test_nobody_reads_the_environment_behind_a_launch():
    """Doctor and command read what `read_launch` has read: what is checked is then what is started."""
    readers: dict[str, set[str]] = {}
    for folder in ("doctor", "draft"):
        for path in (REPOSITORY / "tools" / folder).rglob("*.py"):
            readers |= functions_with_environ(path)
    readers |= functions_with_environ(REPOSITORY / "tools" / "launch" / "command.py")
    assert readers == MAY_READ_THE_ENVIRONMENT


def functions_with_environ(path: Path) -> dict[str, set[str]]:
    """Return file -> its functions that name `os.environ` or `os.getenv`; none where there is none."""
    found = {
        function.name
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv")
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            for node in ast.walk(function)
        )
    }
    return {str(path.relative_to(REPOSITORY)): found} if found else {}


def guessing(**variables: str) -> Any:
    env = {"CONFIG_PATH": "configs/stage1_rlvr.yaml", "MODEL_PATH": "/m", "TRAIN_PATH": "/t", "VAL_PATH": "/v"}
    return read_launch("", (), env | variables)


@pytest.mark.parametrize("file", ["stage1_rlvr.yaml", "nano_grpo.yaml", "tiny/stage1_rlvr.yaml"])
def test_engines_guess_tokens_as_the_published_launcher_has_them_do(file):
    launch = guessing(CONFIG_PATH=f"configs/{file}", ENABLE_MTP_INFERENCE="1", NUM_SPECULATIVE_TOKENS="3")
    assert not [finding for finding in launch.findings if finding.code == "CFG001"]
    kwargs = launch.loaded.tree["policy"]["generation"]["vllm_kwargs"]
    assert kwargs["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert "cudagraph_capture_sizes" not in kwargs["compilation_config"]
    assert kwargs.get("mamba_cache_mode") == ("align" if file == "stage1_rlvr.yaml" else None)


def test_a_variable_that_its_switch_leaves_without_effect_is_a_note():
    for switch, codes in (("false", ["ENV010"]), ("true", [])):
        launch = guessing(NUM_SPECULATIVE_TOKENS="4", ENABLE_MTP_INFERENCE=switch)
        found = [finding for finding in launch.findings if finding.code == "ENV010"]
        assert [finding.code for finding in found] == codes
        assert all(finding.severity == "note" and "ENABLE_MTP_INFERENCE" in str(finding) for finding in found)
