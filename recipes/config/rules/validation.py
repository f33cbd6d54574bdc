"""When a validation runs, and what depends on one.

Waits that contain other waits.

Dotted keys that several rules name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipes.config.keys.derive import AGENTS, SWE_AGENTS, servers
from recipes.config.keys.schema import INSTANCES, KeyProblem
from recipes.config.tree import Config

CONTAINS = {"rollout": ("generation",), "progress": ("rollout", "refit", "train", "checkpoint")}


def waits_are_nested(config: Config) -> Iterator[KeyProblem]:
    """Require a wait that contains others to be at least as long as the longest of them."""
    for outer, inners in CONTAINS.items():
        limit = getattr(config.deadlines, outer)
        inner = max(inners, key=lambda name: float(getattr(config.deadlines, name)))
        longest = getattr(config.deadlines, inner)
        if limit < longest:
            expected = f"at least deadlines.{inner} = {longest:g} s"
            fix = "it contains that wait; raise it or lower the other"
            also = tuple(f"deadlines.{name}" for name in inners)
            yield KeyProblem(key=f"deadlines.{outer}", got=f"{limit:g} s", expected=expected, fix=fix, also=also)


def tasks_end_within_a_rollout(config: Config) -> Iterator[KeyProblem]:
    """Require a rollout to wait for as long as a whole task may take."""
    limit = config.deadlines.rollout
    for name, server, settings in servers(config, AGENTS):
        if server == SWE_AGENTS:
            parts = [settings.get(f"swebench_{part}_timeout", 0) for part in ("agent", "tests")]
            if sum(parts) > limit:
                key = f"{INSTANCES}.{name}.{AGENTS}.{server}.swebench_agent_timeout"
                fix = "lower swebench_agent_timeout or swebench_tests_timeout, or raise deadlines.rollout"
                got, expected = f"{parts[0]} + {parts[1]} = {sum(parts)} s", f"at most deadlines.rollout = {limit:g} s"
                yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=("deadlines.rollout",))


P, G = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
AGE = "grpo.async_grpo.max_trajectory_age_steps"
TIS = "loss_fn.truncated_importance_sampling"
MAX_LEN = "policy.max_total_sequence_length"
GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
GENERATION_PART = f"{GENERATION}.colocated.resources"
MEGATRON = "policy.megatron_cfg"
OPTIMIZER, SCHEDULER = f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler"
TP, CP, PP = (f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model"))
EP, ETP = f"{MEGATRON}.expert_model_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size"
DEEPEP = f"{MEGATRON}.moe_enable_deepep"
DISPATCHER = f"{MEGATRON}.moe_token_dispatcher_type"
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
SIZES = (TP, CP, PP, NODES, GPUS, f"{GENERATION_PART}.num_nodes", f"{GENERATION_PART}.gpus_per_node")


ROWS = "data.validation.data_path"
METRIC, THRESHOLD = "grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold"
SAMPLES = "grpo.val_num_generations_per_prompt"
RANKS = "checkpointing.metric_name"
MEASURED = re.compile(r"(?:.+/)?(?P<g>greedy_)?accuracy|(?P<h>greedy_)?(?:pass_k|avg_length|num_failed)|seconds")


def validation_can_run(config: Config) -> Iterator[KeyProblem]:
    """Require rows for a validation that is asked for, and a validation for what depends on one."""
    grpo = config.grpo
    asked = {"val_period": grpo.val_period > 0, "val_at_start": grpo.val_at_start, "val_at_end": grpo.val_at_end}
    if config.data.validation.data_path is None:
        for name in (name for name, is_on in asked.items() if is_on):
            wrong = f"is {str(getattr(grpo, name)).lower()} although {ROWS} is null"
            fix = "give the rows or switch this validation off"
            yield KeyProblem(key=f"grpo.{name}", wrong=wrong, fix=fix, also=(ROWS,))
    keys = tuple(f"grpo.{name}" for name in asked)
    metric = config.checkpointing.metric_name
    if metric is not None and metric.startswith("val:") and not any(asked.values()):
        fix = "no validation would ever run; set grpo.val_period or grpo.val_at_end, or use null or a train: metric"
        yield KeyProblem(key=RANKS, got=metric, expected="null or train:NAME", fix=fix, also=keys)
    yield from _early_stop(config, any(asked.values()), keys)


def _early_stop(config: Config, is_asked: bool, keys: tuple[str, ...]) -> Iterator[KeyProblem]:
    """Yield what is wrong with stopping at a validation metric; `keys` are those that ask for a validation."""
    stop, threshold = config.grpo.stop_at_validation_metric, config.grpo.stop_at_validation_threshold
    if (stop is None) != (threshold is None):
        key, other = (METRIC, THRESHOLD) if stop is None else (THRESHOLD, METRIC)
        yield KeyProblem(key=key, wrong=f"is null although {other} is set", fix="set both or neither", also=(other,))
    if stop is not None and not is_asked:
        fix = "no validation would ever run; set grpo.val_period"
        yield KeyProblem(key=METRIC, got=stop, expected="null", fix=fix, also=keys)
    if stop == "pass_k" and config.grpo.val_num_generations_per_prompt < 2:
        wrong, fix = "is pass_k, which needs more than one rollout per row", f"raise {SAMPLES}, or name another metric"
        yield KeyProblem(key=METRIC, wrong=wrong, fix=fix, also=(SAMPLES,))


def metrics_are_measured(config: Config) -> Iterator[KeyProblem]:
    """Refuse a validation metric that this engine never measures: no checkpoint would have it, no run stop at it."""
    ranks, stop = config.checkpointing.metric_name or "", config.grpo.stop_at_validation_metric
    asked = [(RANKS, "val:", ranks.removeprefix("val:"))] if ranks.startswith("val:") else []
    asked += [(METRIC, "", stop)] if stop is not None else []
    for key, prefix, name in asked:
        measured = MEASURED.fullmatch(name)
        if measured is None:
            names = ("accuracy", "AGENT/accuracy", "pass_k", "avg_length", "num_failed")
            expected = f"one of {', '.join(prefix + known for known in names)} (native engine)"
            fix = "name accuracy for the mean reward, which is total_reward/mean in published files"
            yield KeyProblem(key=key, got=prefix + name, expected=expected, fix=fix)
        elif (measured["g"] or measured["h"]) and not config.grpo.val_greedy:
            wrong, fix = f"is {prefix}{name}, which only greedy decoding measures", "set grpo.val_greedy"
            yield KeyProblem(key=key, wrong=wrong, fix=fix, also=("grpo.val_greedy",))


def greedy_validation_is_sampled_once(config: Config) -> Iterator[KeyProblem]:
    """Refuse several validation rollouts that are all the same."""
    num = config.grpo.val_num_generations_per_prompt
    if config.policy.generation.val_temperature == 0 and num > 1:
        fix = "policy.generation.val_temperature is 0, so all would be equal; use grpo.val_greedy for both"
        yield KeyProblem(key=SAMPLES, got=str(num), expected="1", fix=fix, also=("policy.generation.val_temperature",))
