"""Loading: layers, overrides, interpolation, sources, speed."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.config import merge as config_merge
from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import LoadedConfig, load_config, require_runnable, require_valid
from recipes.errors import ConfigError

STAGE1 = CONFIG_DIR / "stage1_rlvr.yaml"
SMALL = CONFIG_DIR / "small_scale" / "stage1_rlvr_convergence_27node_h100.yaml"
TINY = CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"
GIVEN = ["policy.model_name=models/sft", "data.train.data_path=t.jsonl", "data.validation.data_path=v.jsonl"]


def overlay(tmp_path: Path, text: str, parent: Path = TINY) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(f"defaults: {parent}\n{text}", encoding="utf-8")
    return path


def lines(loaded: LoadedConfig) -> list[str]:
    return [str(problem) for problem in loaded.problems]


@pytest.mark.parametrize("path", [CONFIG_DIR / "grpo_base.yaml", STAGE1, SMALL, TINY], ids=lambda path: path.stem)
def test_shipped_file_is_valid(path: Path) -> None:
    assert lines(load_config(path)) == []


def test_tiny_runs_natively() -> None:
    config = require_runnable(load_config(TINY, GIVEN))
    assert config.policy.tokenizer.name == "models/sft"
    assert config.policy.precision == "float32"
    assert config.grpo.adv_estimator.use_leave_one_out_baseline


def test_launch_without_paths_names_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG_DIR.parent)
    with pytest.raises(ConfigError) as caught:
        require_runnable(load_config(TINY))
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == [
        "configs/grpo_base.yaml: data.train.data_path",
        "configs/grpo_base.yaml: data.validation.data_path",
        "configs/grpo_base.yaml: policy.model_name",
    ]


def test_production_is_refused_natively_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG_DIR.parent)
    with pytest.raises(ConfigError) as caught:
        require_runnable(load_config(STAGE1, [*GIVEN, "policy.generation.top_p=0.9"]))
    assert (
        "command line: policy.generation.top_p: got 0.9, expected 1 (native engine); the trainer does not filter as "
        "the engine would: every importance weight would be biased; change it, or launch with ENGINE=nemo_rl"
    ) in str(caught.value).splitlines()


def test_the_last_layer_wins_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG_DIR.parent)
    loaded = load_config(TINY, ["grpo.seed=7"])
    assert (lookup(loaded.tree, "grpo.seed"), loaded.sources["grpo.seed"]) == (7, "command line")
    assert loaded.sources["grpo.num_prompts_per_step"] == "configs/tiny/machine.yaml"
    assert loaded.sources["grpo.val_num_generations_per_prompt"] == "configs/stage1_rlvr.yaml"
    small = "configs/small_scale/stage1_rlvr_convergence_27node_h100.yaml"
    assert loaded.sources["policy.generation.vllm_cfg.gpu_memory_utilization"] == small
    assert loaded.sources["grpo.advantage_clip_low"] == "configs/grpo_base.yaml"
    assert loaded.files == (
        "configs/grpo_base.yaml",
        "configs/stage1_rlvr.yaml",
        small,
        "configs/tiny/model.yaml",
        "configs/tiny/machine.yaml",
        "configs/tiny/blend.yaml",
        "configs/tiny/stage1_rlvr.yaml",
    )


def test_what_follows_from_other_keys_follows_overrides() -> None:
    config = require_valid(load_config(TINY, ["grpo.num_prompts_per_step=4", "policy.max_total_sequence_length=512"]))
    assert config.policy.train_global_batch_size == 4 * 8
    assert config.policy.generation.max_new_tokens == config.policy.generation.vllm_cfg.max_model_len == 512
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 16
    assert config.policy.megatron_cfg.optimizer.min_lr == config.policy.megatron_cfg.optimizer.lr == 2.0e-4


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("grpo.seed=7", "grpo.seed", 7),
        ("++grpo.seed=7", "grpo.seed", 7),
        ("policy.megatron_cfg.optimizer.lr=1e-5", "policy.megatron_cfg.optimizer.lr", 1e-5),
        ("grpo.advantage_clip_low=null", "grpo.advantage_clip_low", None),
        ("policy.model_name=a=b", "policy.model_name", "a=b"),
        ("++policy.generation.vllm_kwargs.block_size=32", "policy.generation.vllm_kwargs.block_size", 32),
        ("~policy.generation.vllm_kwargs.max_num_seqs", "policy.generation.vllm_kwargs.max_num_seqs", None),
        ("grpo={seed: 7, val_period: 5}", "grpo.val_period", 5),
        ("policy.tokenizer.chat_template_kwargs={enable_thinking: true}", "policy.tokenizer.chat_template_kwargs",
         {"enable_thinking": True}),
        ('env.nemo_gym.thinking_tags=["<t>"]', "env.nemo_gym.thinking_tags", ["<t>"]),
        ("logger.wandb.name=${policy.precision}", "logger.wandb.name", "float32"),
    ],
)  # fmt: skip
def test_override(override: str, key: str, value: object) -> None:
    loaded = load_config(TINY, [override])
    assert lines(loaded) == []
    assert lookup(loaded.tree, key) == value
    assert "max_num_seqs" in lookup(loaded.tree, "policy.generation.vllm_kwargs") or override.startswith("~")


def test_list_made_from_another_key_is_not_blamed_for_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2.2 has a list of image names made from sif_dir."""
    monkeypatch.chdir(CONFIG_DIR.parent)
    problems = load_config(CONFIG_DIR / "stage2_swe2.yaml", ["logger.wandb.name=${no.such.key}"]).problems
    assert [problem.where for problem in problems] == ["command line: logger.wandb.name"]


def test_environment_variable_is_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPER_RL_TEST_MODEL", "/models/x")
    config = require_valid(load_config(TINY, ["policy.model_name=${oc.env:SUPER_RL_TEST_MODEL}"]))
    assert config.policy.model_name == "/models/x"


def test_server_instances_are_free_names_of_one_shape(tmp_path: Path) -> None:
    text = (
        "env:\n  nemo_gym:\n    mine:\n      resources_servers:\n        math_with_judge:\n"
        "          should_use_judge: false\n"
    )
    config = require_valid(load_config(overlay(tmp_path, text)))
    server = config.env.nemo_gym.instances["mine"]["resources_servers"]["math_with_judge"]
    assert server["should_use_judge"] is False


def test_instance_files_lie_under_the_block(tmp_path: Path) -> None:
    server = "code:\n  resources_servers:\n    code_gen: {{num_processes: {a}, unit_test_timeout_secs: {b}}}\n"
    for name, a, b in (("one", 1, 1), ("two", 2, 2)):
        (tmp_path / f"{name}.yaml").write_text(server.format(a=a, b=b), encoding="utf-8")
    text = (
        f"env:\n  nemo_gym:\n    config_paths: [{tmp_path}/one.yaml, {tmp_path}/two.yaml]\n"
        "    code:\n      resources_servers:\n        code_gen: {unit_test_timeout_secs: 3}\n"
    )
    loaded = load_config(overlay(tmp_path, text))
    assert lines(loaded) == []
    server = "env.nemo_gym.code.resources_servers.code_gen"
    assert lookup(loaded.tree, server) == {"num_processes": 2, "unit_test_timeout_secs": 3}
    assert loaded.sources[f"{server}.num_processes"].endswith("two.yaml")


@pytest.mark.parametrize("path", [STAGE1, SMALL, TINY, CONFIG_DIR / "stage2_swe2.yaml"], ids=lambda path: path.stem)
def test_quick_resolution_is_the_whole_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = load_config(path)
    monkeypatch.setattr(config_merge, "_resolved_parts", lambda raw: None)
    assert load_config(path).tree == quick.tree


@pytest.mark.parametrize(
    ("tree", "resolved"),
    [
        ({"a": 1, "b": "${a}"}, {"a": 1, "b": 1}),
        ({"a": {"x": 1, "y": "${.x}"}, "b": "${a}"}, {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 1}}),
        ({"a": {"b": {"c": "${..d}"}, "d": "${e}"}, "e": 3}, {"a": {"b": {"c": 3}, "d": 3}, "e": 3}),
        ({"a": 2, "b": ["${a}/x", {"c": "${a}"}]}, {"a": 2, "b": ["2/x", {"c": 2}]}),
        ({"a": 2, "b": "${mul:${a},${c}}", "c": "${a}"}, {"a": 2, "b": 4, "c": 2}),
        ({"a": "b", "b": 5, "c": "${${a}}"}, {"a": "b", "b": 5, "c": 5}),  # a name made at run time: the whole tree
        ({"x.y": "${z}", "z": 1}, {"x.y": 1, "z": 1}),  # a dot within a name
        ({"a": "???", "b": "${a}"}, {"a": "???", "b": "???"}),
        ({"a": {}, "b": "${a}"}, {"a": {}, "b": {}}),
    ],
)
def test_interpolation(tree: dict[str, object], resolved: dict[str, object]) -> None:
    assert config_merge.resolve(tree) == (resolved, {})


def test_config_travels_to_workers() -> None:
    config = require_valid(load_config(TINY))
    assert pickle.loads(pickle.dumps(config)) == config


def test_load_is_fast_and_light() -> None:
    code = (
        "import json, resource, sys\n"
        "from recipes.config.load import load_config\n"
        f"assert not load_config({str(TINY)!r}).problems\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules))\n"
        "print(json.dumps([usage.ru_utime + usage.ru_stime, heavy]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    seconds, heavy = json.loads(output)
    assert heavy == []
    assert seconds < 1.0  # CPU time of the whole process, interpreter start included: a busy machine does not change it
