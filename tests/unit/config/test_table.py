"""Every stage at every scale, platform and engine: the published nodes, batch arithmetic and differing values."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recipes.config.keys.derive import derive
from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import PLATFORMS, SCALES, config_path, find_stage, load_config, load_stages, require_valid
from recipes.errors import ConfigError
from tools.draft.nemo_rl.export import export

MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
SERVING = f"{VLLM}.http_server_serving_chat_kwargs"
GENRM = "env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare"

# What differs between stages (H100 files), whatever the scale or platform: key -> stage 1, 2.1, 2.2, 3.
STAGES = ("stage1.1", "stage2.1", "stage2.2", "stage3")
BY_STAGE = {
    "grpo.num_prompts_per_step": (256, 64, 16, 128),
    "grpo.num_generations_per_prompt": (16, 16, 32, 16),
    "policy.train_global_batch_size": (4096, 1024, 512, 2048),
    "grpo.val_num_generations_per_prompt": (2, 1, 1, 2),
    "grpo.val_period": (-1, 10, 100, 10000),
    "grpo.max_num_epochs": (1, 100, 100, 1),
    "grpo.advantage_clip_low": (-50, -100, -100, -50),
    "grpo.advantage_clip_high": (50, 100, 100, 50),
    "grpo.overlong_filtering": (False, True, True, False),
    "loss_fn.reference_policy_kl_penalty": (0, 0, 0, 0.0001),
    "loss_fn.reference_policy_kl_type": ("k3", "k3", "k3", "k3"),
    "policy.max_total_sequence_length": (65536, 131072, 196608, 49152),
    f"{VLLM}.max_model_len": (65536, 131072, 196608, 49152),
    "policy.generation.max_new_tokens": (65536, 131072, 196608, 49152),
    f"{MEGATRON}.optimizer.lr": (0.000003, 0.000001, 0.000001, 0.000001),
    f"{MEGATRON}.optimizer.min_lr": (0.000003, 0.000001, 0.000001, 0.000001),
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": (True, False, False, True),
    f"{VLLM}.enable_prefix_caching": (True, True, True, True),
    f"{SERVING}.default_chat_template_kwargs": (None, {"enable_thinking": True}, {"enable_thinking": True}, None),
    "checkpointing.save_period": (10, 5, 2, 4),
    "checkpointing.keep_top_k": (None, 100, 100, None),  # 1000000 keeps all, as null does
    "checkpointing.checkpoint_must_save_by": (None, None, None, None),
    f"{GENRM}.num_rollouts_per_prompt": (16, None, None, 16),
    f"{GENRM}.group_reasoning_length_penalty_coeff": (0.1, None, None, 0.3),
    f"{GENRM}.group_answer_length_penalty_coeff": (0.1, None, None, 0.35),
    f"{GENRM}.group_style_penalty_coeff": (0.1, None, None, 0.05),
    f"{MEGATRON}.scheduler.lr_warmup_iters": (10, 10, 10, 10),
    f"{MEGATRON}.scheduler.lr_warmup_init": (3e-7, 3e-7, 3e-7, 3e-7),
    "grpo.seq_logprob_error_threshold": (2, 2, 2, 2),
    "grpo.async_grpo.max_trajectory_age_steps": (1, 1, 1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Sizes of one stage file, as published."""

    nodes: tuple[int, int, int, int]  # in total, that train, that generate, that hold judges
    parallel: tuple[int, int, int]  # TP, CP, EP of the policy
    divisor: int  # of padded lengths: 2 * CP * TP
    ranks: int  # data-parallel
    engines: int
    engine_tp: int
    memory: float  # gpu_memory_utilization


SIZES = {
    ("stage1.1", "prod", "h100"): Published((183, 32, 144, 7), (4, 8, 16), 64, 8, 144, 8, 0.8),
    ("stage2.1", "prod", "h100"): Published((64, 32, 32, 0), (8, 16, 8), 256, 2, 32, 8, 0.8),
    ("stage2.2", "prod", "h100"): Published((64, 32, 32, 0), (8, 16, 16), 256, 2, 32, 8, 0.75),
    ("stage3", "prod", "h100"): Published((100, 32, 64, 4), (4, 4, 32), 32, 16, 64, 8, 0.8),
    ("stage1.1", "small", "h100"): Published((27, 8, 12, 7), (4, 8, 16), 64, 2, 12, 8, 0.7),
    ("stage2.1", "small", "h100"): Published((20, 16, 4, 0), (8, 8, 16), 128, 2, 4, 8, 0.75),
    ("stage2.2", "small", "h100"): Published((20, 16, 4, 0), (8, 16, 16), 256, 1, 4, 8, 0.75),
    ("stage3", "small", "h100"): Published((28, 16, 8, 4), (4, 4, 32), 32, 8, 8, 8, 0.75),
    ("stage1.1", "prod", "b200"): Published((109, 32, 72, 5), (4, 8, 8), 64, 8, 144, 4, 0.8),
    ("stage2.1", "prod", "b200"): Published((64, 32, 32, 0), (8, 8, 8), 128, 4, 32, 8, 0.8),
    ("stage2.2", "prod", "b200"): Published((64, 32, 32, 0), (8, 8, 8), 128, 4, 32, 8, 0.8),
    ("stage3", "prod", "b200"): Published((72, 32, 32, 8), (4, 4, 8), 32, 16, 64, 4, 0.8),
}  # fmt: skip
SHARES = {"stage1.2": "stage1.1", "stage1.3": "stage1.1"}  # three stages, one configuration
HEALING = "stage4"  # nobody has published a file of it
NANO = "nano-rl"  # another model: its published values are below
DPO = "nano-dpo"  # nobody has published a file of it
MOPD = "mopd"  # nor of it; it runs at scale tiny alone


def values_of(stage: str, platform: str) -> dict[str, Any]:
    """Return what a stage has at every scale: the B200 files train no multi-token heads before stage 4."""
    column = STAGES.index(stage)
    heads = {f"{MEGATRON}.mtp_num_layers": 0 if platform == "b200" else 5}
    engines = {f"{KWARGS}.max_num_seqs": 1024, f"{KWARGS}.max_num_batched_tokens": 8480}  # published for 2.2 on H100
    return {key: values[column] for key, values in BY_STAGE.items()} | heads | engines


def path_of(stage: str, scale: str, platform: str) -> Path:
    return config_path(find_stage(stage), scale, platform)


@pytest.mark.parametrize("where", SIZES, ids=" ".join)
def test_stage_has_the_published_values(where: tuple[str, str, str]) -> None:
    tree = load_config(path_of(*where)).tree
    expected = values_of(where[0], where[2])
    assert {key: lookup(tree, key) for key in expected} == expected


@pytest.mark.parametrize("where", SIZES, ids=" ".join)
def test_stage_has_the_published_sizes(where: tuple[str, str, str]) -> None:
    config, published = require_valid(load_config(path_of(*where))), SIZES[where]
    sizes, policy = derive(config), config.policy
    megatron = policy.megatron_cfg
    assert published.nodes == (
        sizes.num_nodes, sizes.num_train_nodes, sizes.num_generation_nodes, sizes.num_judge_nodes,
    )  # fmt: skip
    assert published.parallel == (
        megatron.tensor_model_parallel_size, megatron.context_parallel_size, megatron.expert_model_parallel_size,
    )  # fmt: skip
    assert policy.make_sequence_length_divisible_by == published.divisor
    assert sizes.data_parallel_size == published.ranks
    assert sizes.num_engines == published.engines
    assert policy.generation.vllm_cfg.tensor_parallel_size == published.engine_tp
    assert policy.generation.vllm_cfg.gpu_memory_utilization == published.memory
    assert sizes.samples_per_step == policy.train_global_batch_size
    assert sizes.samples_per_rank * published.ranks == sizes.samples_per_step
    assert sizes.total_gpus == 8 * published.nodes[0]
    assert policy.max_total_sequence_length % published.divisor == 0


# What NeMo RL 0.7.0 calls a key of BY_STAGE, or where it has the value; None: it has no such key.
NEMO_RL_NAMES: dict[str, str | None] = {
    "grpo.val_num_generations_per_prompt": None,
    "grpo.max_num_epochs": "data.train.repeat",  # its asynchronous trainer reads the rows once
}
NEMO_RL_VALUES = {("checkpointing.keep_top_k", "None"): 1000000, ("data.train.repeat", "1"): None}


@pytest.mark.parametrize("where", SIZES, ids=" ".join)
def test_stage_has_the_published_values_in_the_form_of_nemo_rl(where: tuple[str, str, str]) -> None:
    exported = export(load_config(path_of(*where)))
    for key, value in values_of(where[0], where[2]).items():
        name = NEMO_RL_NAMES.get(key, key)
        if name is not None:
            assert lookup(exported.tree, name) == NEMO_RL_VALUES.get((name, str(value)), value), name
    assert exported.problems == ()  # a launch of any stage starts as it is


@pytest.mark.parametrize("where", SIZES, ids=" ".join)
def test_stage_has_the_published_sizes_in_the_form_of_nemo_rl(where: tuple[str, str, str]) -> None:
    """By its own arithmetic: engines on their nodes, training on the others of cluster.num_nodes, judges on top."""
    tree, published = export(load_config(path_of(*where))).tree, SIZES[where]
    policy, nodes, gpus = tree["policy"], tree["cluster"]["num_nodes"], tree["cluster"]["gpus_per_node"]
    megatron, vllm = policy["megatron_cfg"], policy["generation"]["vllm_cfg"]
    generating, judges = policy["generation"]["colocated"]["resources"], tree["env"]["nemo_gym"]["num_gpu_nodes"]
    num = generating["num_nodes"]
    assert generating["gpus_per_node"] == gpus == 8  # its trainer asserts it
    assert published.nodes == (nodes + judges, nodes - num, num, judges)
    sizes = tuple(megatron[f"{kind}_model_parallel_size"] for kind in ("tensor", "expert"))
    assert (sizes[0], megatron["context_parallel_size"], sizes[1]) == published.parallel
    assert policy["make_sequence_length_divisible_by"] == published.divisor
    assert (nodes - num) * gpus // (sizes[0] * megatron["context_parallel_size"]) == published.ranks
    assert num * gpus // vllm["tensor_parallel_size"] == published.engines
    assert (vllm["tensor_parallel_size"], vllm["gpu_memory_utilization"]) == (published.engine_tp, published.memory)
    samples = tree["grpo"]["num_prompts_per_step"] * tree["grpo"]["num_generations_per_prompt"]
    assert policy["train_global_batch_size"] == samples  # its trainer asserts it
    assert samples % published.ranks == 0


def test_every_configuration_of_the_table_is_published_or_tiny() -> None:
    for stage, scale, platform in product(load_stages(), SCALES, PLATFORMS):
        where = (SHARES.get(stage.id, stage.id), scale, platform)
        if stage.id == HEALING and ("stage1.1", scale, platform) in SIZES:
            rlvr, healing = (load_config(path_of(name, scale, platform)).tree for name in ("stage1.1", HEALING))
            assert healing["cluster"] == rlvr["cluster"] and healing["env"] == rlvr["env"]
            assert lookup(healing, f"{MEGATRON}.freeze_trunk") and lookup(healing, f"{MEGATRON}.mtp_num_layers") == 5
        elif stage.id in (NANO, DPO) and (platform == "h100" or scale == "tiny"):
            assert path_of(NANO, "prod", "h100") == CONFIG_DIR / "nano_grpo.yaml"
        elif stage.id == MOPD and scale == "tiny":
            assert derive(require_valid(load_config(path_of(MOPD, scale, platform)))).judge_units == 3  # its teachers
        elif where in SIZES or scale == "tiny":
            assert path_of(stage.id, scale, platform) == path_of(*where)
        else:
            with pytest.raises(ConfigError, match="the stage has no file"):
                path_of(stage.id, scale, platform)


@pytest.mark.parametrize("stage", [stage.id for stage in load_stages() if stage.configs["small"]])
def test_tiny_stage_is_small_scale_in_what_decides_the_algorithm(stage: str) -> None:
    tiny, small = (load_config(path_of(stage, scale, "h100")) for scale in ("tiny", "small"))
    for key in (
        "loss_fn", "grpo.async_grpo", "grpo.adv_estimator", "grpo.advantage_clip_high", "grpo.overlong_filtering",
        "grpo.seq_logprob_error_threshold", "grpo.invalid_tool_call_advantage", "grpo.val_period",
        "grpo.val_num_generations_per_prompt", "policy.generation.temperature", "policy.max_grad_norm", SERVING,
        "checkpointing.save_period", "checkpointing.metric_name",
    ):  # fmt: skip
        if (stage, key) != ("stage2.2", "grpo.val_num_generations_per_prompt"):  # its few held-out tasks need more
            assert lookup(tiny.tree, key) == lookup(small.tree, key), key
    assert set(small.files) < set(tiny.files)
    sizes = derive(require_valid(tiny))
    assert (sizes.num_nodes, sizes.train_gpus, sizes.generation_gpus, sizes.judge_gpus) == (
        (2, 1, 1, 2) if stage == "stage3" else (1, 1, 1, 0)
    )
    assert sizes.judge_units == (stage == "stage3")  # one engine for the judge


def test_each_resolves_in_under_a_second_and_without_torch() -> None:
    """For both engines, by CPU time, which a busy machine does not change; in a process where only this imports."""
    paths = sorted(
        {str(path_of(stage.id, "tiny", "h100")) for stage in load_stages()} | {str(path_of(*w)) for w in SIZES}
    )
    code = (
        "import json, sys, time\n"
        "from recipes.config.load import load_config\n"
        "from tools.draft.nemo_rl.export import export\n"
        "seconds = []\n"
        f"for path in {paths!r}:\n"
        "    start = time.process_time()\n"
        "    loaded = load_config(path)\n"
        "    assert not loaded.problems\n"
        "    assert export(loaded).tree\n"
        "    seconds.append(time.process_time() - start)\n"
        "print(json.dumps([seconds, sorted({'torch', 'ray', 'vllm', 'megatron', 'numpy'} & set(sys.modules))]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    seconds, heavy = json.loads(output)
    assert heavy == []
    assert len(seconds) == len(paths) == 20
    assert max(seconds) < 1.0


def test_nano_stage_is_synchronous_grpo() -> None:
    config = require_valid(load_config(path_of(NANO, "prod", "h100")))
    sizes, megatron = derive(config), config.policy.megatron_cfg
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (128, 16)
    assert config.policy.train_global_batch_size == 2048
    assert config.grpo.async_grpo.max_trajectory_age_steps == 0
    assert config.policy.max_total_sequence_length == 49152
    assert config.grpo.overlong_filtering
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 2)
    assert (megatron.context_parallel_size, megatron.expert_model_parallel_size) == (4, 8)
    assert megatron.optimizer.lr == megatron.optimizer.min_lr == 0.000003
    assert (sizes.num_nodes, sizes.num_train_nodes, sizes.num_generation_nodes) == (32, 16, 16)
    assert (sizes.data_parallel_size, sizes.num_engines) == (8, 32)
    assert config.policy.make_sequence_length_divisible_by == 16
    assert (config.grpo.val_period, config.grpo.val_num_generations_per_prompt) == (5, 4)
    assert config.loss_fn.truncated_importance_sampling_ratio is None


@pytest.mark.parametrize("scale", ["prod", "small"])
def test_dpo_has_the_values_of_the_report_on_nanos_nodes(scale: str) -> None:
    """Appendix C: 50 steps, preference 1.0, SFT 0.2, KL 0.05, learning rate 3e-6."""
    rl, dpo = (load_config(path_of(name, scale, "h100")) for name in (NANO, DPO))
    config = require_valid(dpo)
    assert (config.grpo.max_num_steps, config.grpo.adv_estimator.name) == (50, "dpo")
    assert (config.dpo.preference_loss_weight, config.dpo.sft_loss_weight) == (1.0, 0.2)
    assert config.dpo.reference_policy_kl_penalty == 0.05
    assert config.policy.megatron_cfg.optimizer.lr == 3.0e-6
    for key in ("cluster", "policy", "env", "loss_fn", "grpo.num_prompts_per_step", "grpo.async_grpo"):
        assert lookup(dpo.tree, key) == lookup(rl.tree, key), key


def test_nano_fits_one_node_with_what_decides_the_algorithm() -> None:
    published, own = (load_config(path_of(NANO, scale, "h100")) for scale in ("prod", "small"))
    for key in ("grpo", "loss_fn", "env", "policy.max_total_sequence_length", f"{MEGATRON}.optimizer.lr"):
        assert lookup(own.tree, key) == lookup(published.tree, key), key
    sizes = derive(require_valid(own))
    assert (sizes.num_nodes, sizes.train_gpus, sizes.generation_gpus, sizes.num_engines) == (1, 4, 4, 1)
    assert (sizes.data_parallel_size, sizes.samples_per_step) == (1, 2048)
