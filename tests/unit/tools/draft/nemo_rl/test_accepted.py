"""The list of what NeMo RL reads: types, unknown keys, missing keys, server instances."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import load_config
from recipes.config.merge import drop, put
from tools.draft.nemo_rl.accepted import NemoRlKey, accepted, check, gym_files, is_known, is_setting
from tools.draft.nemo_rl.export import ExportedConfig, export


@pytest.fixture(scope="module")
def exported() -> ExportedConfig:
    return export(load_config(CONFIG_DIR / "stage1_rlvr.yaml"))


@pytest.fixture
def tree(exported: ExportedConfig) -> dict[str, Any]:
    return copy.deepcopy(dict(exported.tree))


def test_types_are_read_from_the_text() -> None:
    assert accepted()["loss_fn.kl_input_clamp_value"] == NemoRlKey(("number", "null"), False, True, 20.0)
    assert accepted()["grpo.num_prompts_per_step"] == NemoRlKey(("integer",), True, False, None)
    assert accepted()["policy.megatron_cfg.env_vars"].default is None


@pytest.mark.parametrize(
    ("types", "good", "bad"),
    [
        (("integer",), [0, -1], [1.5, True, "1", None]),
        (("number", "null"), [1, 1.5, None], [True, "x", []]),
        (("boolean",), [True, False], [0, 1, "true", None]),
        (("block",), [{}, {"a": 1}], [[], None]),
        (("string",), ["", "???"], [1, None]),
        (("integer",), ["${grpo.seed}", "???"], ["grpo.seed"]),
    ],
)
def test_type_takes_its_values_only(types: tuple[str, ...], good: list[Any], bad: list[Any]) -> None:
    key = NemoRlKey(types, False, False, None)
    assert all(key.takes(value) for value in good)
    assert not any(key.takes(value) for value in bad)


def test_export_is_accepted(tree: dict[str, Any]) -> None:
    assert check(tree, {}) == []


@pytest.mark.parametrize(
    ("key", "value", "what", "fix"),
    [
        ("grpo.num_prompts_per_stp", 4, "NeMo RL does not read this key", "did you mean grpo.num_prompts_per_step?"),
        ("grpo.lr", 1.0, "NeMo RL does not read this key", "did you mean policy.megatron_cfg.optimizer.lr?"),
        ("frobnicate", 1, "NeMo RL does not read this key", "delete it"),
        ("grpo.seed", "many", '"many"', "correct the value"),
        ("checkpointing.keep_top_k", None, "null", "correct the value"),
        ("env.nemo_gym.polcy_model", 4, "4", "delete it"),
        ("env.nemo_gym.code_gn", {"resources_servers": {"code_gen": {}}},
         "no file of config_paths declares this instance", "did you mean code_gen?"),
        ("env.nemo_gym.code_gen.resource_servers", {}, "{}", "name the kind of server"),
        ("env.nemo_gym.code_gen.resources_servers.code_gen.debugg", True, "the server does not read this setting",
         "did you mean debug?"),
    ],
)  # fmt: skip
def test_wrong_key_is_named_with_the_fix(tree: dict[str, Any], key: str, value: Any, what: str, fix: str) -> None:
    put(tree, key, value)
    (problem,) = check(tree, {key: "their.yaml"})
    assert key in problem.where
    assert (problem.got or problem.wrong, problem.fix) == (what, fix)


def test_missing_key_is_named(tree: dict[str, Any]) -> None:
    drop(tree, "grpo.max_rollout_turns")
    drop(tree, "policy.dtensor_cfg")
    problems = check(tree, {})
    assert {problem.where for problem in problems} == {"policy.dtensor_cfg", "grpo.max_rollout_turns"}
    assert all(problem.wrong == "NeMo RL needs this key" for problem in problems)


def test_misspelled_file_of_nemo_gym_is_named(tree: dict[str, Any]) -> None:
    paths = tree["env"]["nemo_gym"]["config_paths"]
    paths[paths.index("resources_servers/mcqa/configs/mcqa.yaml")] = "resources_servers/mcqa/config/mcqa.yaml"
    (problem,) = check(tree, {})
    assert problem.fix == "did you mean resources_servers/mcqa/configs/mcqa.yaml?"


def test_own_file_of_nemo_gym_may_declare_any_instance(tree: dict[str, Any]) -> None:
    tree["env"]["nemo_gym"]["config_paths"].append("/my/environments.yaml")
    put(tree, "env.nemo_gym.my_server", {"resources_servers": {"my_server": {"anything": 1}}})
    assert check(tree, {}) == []


def test_copied_or_complete_instance_is_declared_where_it_stands(tree: dict[str, Any]) -> None:
    put(tree, "env.nemo_gym.again", {"_copy": "policy_model", "responses_api_models": {"vllm_model": {}}})
    put(tree, "env.nemo_gym.mine", {"resources_servers": {"mine": {"entrypoint": "app.py"}}})
    assert check(tree, {}) == []


def test_free_blocks_take_any_key() -> None:
    assert is_known("policy.generation.vllm_kwargs.compilation_config.mode")
    assert is_known("policy.megatron_cfg.env_vars.NCCL_DEBUG")
    assert is_known("policy.megatron_cfg")
    assert not is_known("policy.megatron_cfg.env_var.NCCL_DEBUG")
    assert is_setting("env.nemo_gym.x.resources_servers.code_gen.debug")
    assert not is_setting("env.nemo_gym.x.resources_servers.code_gen.debugg")
    assert is_setting("env.nemo_gym.x.resources_servers.mine.anything")


def test_every_listed_file_declares_something() -> None:
    files = gym_files()
    assert len(files) > 10
    assert all(files.values())
