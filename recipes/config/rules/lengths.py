"""Lengths in tokens: of a rollout, of a request, of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import CP, GENERATION, MAX_LEN, MEGATRON, TP, VLLM
from recipes.config.tree import Config


def engine_and_trainer_agree_on_length(config: Config) -> Iterator[KeyProblem]:
    """Require one context length: longer rollouts could not be trained on, shorter ones waste the trainer."""
    longest, context = config.policy.max_total_sequence_length, config.policy.generation.vllm_cfg.max_model_len
    key = f"{VLLM}.max_model_len"
    if context != longest:
        fix = "rollouts must fit both the engine and the trainer; delete this key"
        yield KeyProblem(key=key, got=str(context), expected=f"{MAX_LEN} = {longest}", fix=fix, also=(MAX_LEN,))
    asked = config.policy.generation.max_new_tokens
    if asked > context:
        expected, fix = f"at most {key} = {context}", "no request could be that long; lower it"
        own = f"{GENERATION}.max_new_tokens"
        yield KeyProblem(key=own, got=str(asked), expected=expected, fix=fix, also=(key,))


def lengths_are_divisible(config: Config) -> Iterator[KeyProblem]:
    """Require padded lengths that context and sequence parallel ranks can share evenly."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    cp, tp = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    need = (2 * cp if cp > 1 else 1) * (tp if megatron.sequence_parallel else 1)
    multiple = policy.make_sequence_length_divisible_by
    key = "policy.make_sequence_length_divisible_by"
    if multiple % need:
        expected = f"a multiple of {need} (2 * CP {cp} if CP > 1, times TP {tp} if sequence_parallel)"
        also, fix = (CP, TP, f"{MEGATRON}.sequence_parallel"), "delete this key: it follows from CP and TP"
        yield KeyProblem(key=key, got=str(multiple), expected=expected, fix=fix, also=also)
    longest = policy.max_total_sequence_length
    if longest % multiple:
        expected = f"a multiple of {key} = {multiple}"
        fix = f"the longest rollout would be padded past it; lower it to {longest // multiple * multiple}"
        yield KeyProblem(key=MAX_LEN, got=str(longest), expected=expected, fix=fix, also=(key, CP, TP))


def packing_fits_one_rollout(config: Config) -> Iterator[KeyProblem]:
    """Require micro-batches that hold the longest rollout."""
    packing, longest = config.policy.sequence_packing, config.policy.max_total_sequence_length
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(packing, name)
        if packing.enabled and tokens < longest:
            key, expected = f"policy.sequence_packing.{name}", f"{MAX_LEN} = {longest} or more"
            fix = "the longest rollout must fit one micro-batch; delete this key"
            yield KeyProblem(key=key, got=str(tokens), expected=expected, fix=fix, also=(MAX_LEN,))
