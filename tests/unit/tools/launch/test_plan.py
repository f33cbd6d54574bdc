"""The parts of a plan: the stage table fills what is not set, texts stay texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipes.errors import ConfigError, LaunchError
from tools.planning.contract import read_contract
from tools.planning.draft import as_text, draft_launch, launch_overrides
from tools.planning.stage_env import stage_environment

ROOT = Path("/checkout")


def test_first_stage_at_scale_tiny_needs_nothing():
    env = stage_environment("stage1.1", {"SCALE": "tiny"}, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1-tiny"
    assert env["MODEL_PATH"] == "/checkout/models/tiny-sft"
    assert env["TRAIN_PATH"] == "/checkout/data/tiny/train-split.jsonl"
    assert env["VAL_PATH"] == "/checkout/data/tiny/val-split.jsonl"
    assert env["CONFIG_PATH"].endswith("configs/tiny/stage1_rlvr.yaml")
    assert env["STAGE"] == "stage1.1"


def test_first_production_stage_asks_for_the_sft_checkpoint():
    env = stage_environment("rlvr1", {}, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1"
    assert env["TRAIN_PATH"] == "/checkout/data/rlvr1/train-split.jsonl"
    assert "MODEL_PATH" not in env


def test_later_stage_starts_from_its_parents_last_complete_export():
    env = stage_environment("stage1.2", {"RESULTS_DIR": "/runs"}, ROOT)
    assert env["MODEL_PATH"] == "/runs/stage1.1-rlvr1/checkpoints/latest/hf"
    tiny = stage_environment("stage1.2", {"SCALE": "tiny"}, ROOT)
    assert tiny["MODEL_PATH"] == "/checkout/results/stage1.1-rlvr1-tiny/checkpoints/latest/hf"


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
    assert stage_environment("stage2.2", images, ROOT)["CONTAINER"] == "swe.sqsh"
    assert stage_environment("stage2.1", images, ROOT)["CONTAINER"] == "training.sqsh"
    assert stage_environment("stage2.2", {"CONTAINER": "training.sqsh"}, ROOT)["CONTAINER"] == "training.sqsh"


def test_stage_2_2_trains_on_the_rows_whose_images_are_good(tmp_path):
    (tmp_path / "data/swe2-good").mkdir(parents=True)
    assert stage_environment("stage2.2", {}, tmp_path)["TRAIN_PATH"] == f"{tmp_path}/data/swe2/train-split.jsonl"
    (tmp_path / "data/swe2-good/manifest.json").touch()  # the last thing that `make sif-check` writes
    env = stage_environment("stage2.2", {}, tmp_path)
    assert env["TRAIN_PATH"] == f"{tmp_path}/data/swe2-good/train-split.jsonl"
    assert env["VAL_PATH"] == f"{tmp_path}/data/swe2-good/val-split.jsonl"
    assert stage_environment("stage2.2", {"TRAIN_PATH": "mine"}, tmp_path)["TRAIN_PATH"] == "mine"
    assert stage_environment("stage2.2", {"SCALE": "tiny"}, tmp_path)["TRAIN_PATH"].endswith(
        "data/tiny-swe2/train-split.jsonl"
    )


def test_the_wide_blend_has_its_own_rows_model_and_runs():
    variables = {"SCALE": "tiny", "BLEND": "wide"}
    env = stage_environment("stage1.1", variables, ROOT)
    assert env["EXP_NAME"] == "stage1.1-rlvr1-tiny-wide"
    assert env["MODEL_PATH"] == "/checkout/models/tiny-wide-sft"
    assert env["TRAIN_PATH"] == "/checkout/data/tiny-wide/train-split.jsonl"
    assert env["CONFIG_PATH"].endswith("configs/tiny/wide.yaml")
    env = stage_environment("stage1.2", variables, ROOT)
    assert env["MODEL_PATH"] == "/checkout/results/stage1.1-rlvr1-tiny-wide/checkpoints/latest/hf"


@pytest.mark.parametrize(
    ("stage", "rows"), [("stage2.1", "tiny-swe1"), ("stage2.2", "tiny-swe2"), ("stage3", "tiny-rlhf")]
)
@pytest.mark.parametrize("blend", ["", "wide"])
def test_a_stage_with_environments_of_its_own_has_its_own_tiny_rows(stage, rows, blend):
    env = stage_environment(stage, {"SCALE": "tiny", "BLEND": blend}, ROOT)
    assert env["VAL_PATH"] == f"/checkout/data/{rows}/val-split.jsonl"
    assert env["CONFIG_PATH"].endswith(("tiny/stage2_swe1.yaml", "tiny/stage2_swe2.yaml", "tiny/stage3_rlhf.yaml"))
    assert env.get("SIF_DIR", "") == ("/checkout/data/tiny-swe2/images" if stage == "stage2.2" else "")


def test_a_blend_that_is_not_there_is_refused_at_the_tiny_scale():
    with pytest.raises(LaunchError, match="BLEND"):
        stage_environment("stage1.1", {"SCALE": "tiny", "BLEND": "wide1"}, ROOT)
    assert stage_environment("stage1.1", {"BLEND": "rlvr1"}, ROOT)["TRAIN_PATH"].endswith(
        "data/rlvr1/train-split.jsonl"
    )


def test_what_is_set_wins_and_empty_counts_as_not_set():
    env = stage_environment("stage1.1", {"EXP_NAME": "mine", "VAL_PATH": "", "CONFIG_PATH": "c.yaml"}, ROOT)
    assert env["EXP_NAME"] == "mine"
    assert env["CONFIG_PATH"] == "c.yaml"
    assert env["VAL_PATH"] == "/checkout/data/rlvr1/val-split.jsonl"


@pytest.mark.parametrize("variables", [{"SCALE": "huge"}, {"PLATFORM": "a100"}])
def test_wrong_scale_or_platform_is_refused(variables):
    with pytest.raises(LaunchError, match=next(iter(variables))):
        stage_environment("stage1.1", variables, ROOT)


def test_stage_without_a_configuration_says_so():
    with pytest.raises(ConfigError, match=r"stage3.configs.small.b200: the stage has no file"):
        stage_environment("stage3", {"SCALE": "small", "PLATFORM": "b200"}, ROOT)


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
    ("names", "expected"),
    [
        ("{instance_id}.sif", "{instance_id}.sif"),
        ('["a/{instance_id}.sif", "b.sif"]', ["a/{instance_id}.sif", "b.sif"]),
    ],
)
def test_names_of_task_images_reach_the_agent(names, expected):
    draft = draft_launch("stage2.2", (), {"SCALE": "tiny", "CONTAINER_FORMATTER": names, "SIF_DIR": "/sif"})
    assert draft.config is not None
    assert draft.config.sif_dir == "/sif"
    agent = draft.config.env.nemo_gym.instances["swe_agents_train"]["responses_api_agents"]["swe_agents"]
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
    draft = draft_launch("stage1.1", (override,), {"SCALE": "tiny", variable: "/data/one"})
    found = [finding.problem for finding in draft.findings if finding.code == "ENV008"]
    assert [problem.expected for problem in found] == ([f"{variable}, /data/one"] if is_refused else [])
