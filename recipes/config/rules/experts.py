"""How tokens reach the experts of the policy, and what runs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import DEEPEP, DISPATCHER, EP, ETP, GPUS, MEGATRON, NODES
from recipes.config.tree import Config

_DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # that release 1.2.1 has settings for
_DEEPEP_NODE = 8  # GPUs of a node, where a group of ranks has several


def deepep_is_the_flex_dispatcher(config: Config) -> Iterator[KeyProblem]:
    """Require the flex dispatcher and DeepEP together: it has no other kernels here, and they serve no other."""
    megatron = config.policy.megatron_cfg
    is_flex, is_on = megatron.moe_token_dispatcher_type == "flex", megatron.moe_enable_deepep
    if is_flex != is_on:
        change = "set it to flex, or this to false" if is_on else "set this to true, or that to alltoall"
        fix = f"{DISPATCHER} is {megatron.moe_token_dispatcher_type}; {change}"
        got, expected = str(is_on).lower(), str(is_flex).lower()
        yield KeyProblem(key=DEEPEP, got=got, expected=expected, fix=fix, also=(DISPATCHER,))


def deepep_can_carry_the_tokens(config: Config) -> Iterator[KeyProblem]:
    """Require what DeepEP's kernels carry: bfloat16 states, float32 shares, between numbers of ranks that it knows."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.moe_enable_deepep:
        return
    formats: dict[str, tuple[str, str, str]] = {
        "policy.precision": (policy.precision, "bfloat16", "states of tokens"),
        f"{MEGATRON}.moe_router_dtype": (megatron.moe_router_dtype, "fp32", "the router's shares"),
    }
    for key, (got, expected, what) in formats.items():
        if got != expected:
            fix = f"DeepEP sends {what} in this format alone; change it, or set {DEEPEP} to false"
            yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=(DEEPEP,))
    per_node = config.cluster.gpus_per_node
    ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    got = f"EP {megatron.expert_model_parallel_size} * ETP {megatron.expert_tensor_parallel_size} = {ranks}"
    if ranks not in _DEEPEP_RANKS:
        expected = f"EP * ETP to be one of {', '.join(map(str, _DEEPEP_RANKS))}"
        fix = f"DeepEP has settings for no other number of ranks; change it, or set {DEEPEP} to false"
        yield KeyProblem(key=EP, got=got, expected=expected, fix=fix, also=(ETP, DEEPEP))
    elif config.cluster.num_nodes > 1 and per_node % ranks and per_node != _DEEPEP_NODE:
        expected = f"EP * ETP to divide {GPUS} = {per_node}"
        fix = f"DeepEP goes beyond a node where nodes have {_DEEPEP_NODE} GPUs; change it, or set {DEEPEP} to false"
        yield KeyProblem(key=EP, got=got, expected=expected, fix=fix, also=(ETP, GPUS, NODES, DEEPEP))


def fused_activation_has_grouped_experts(config: Config) -> Iterator[KeyProblem]:
    """Require the grouped GEMM where the activation of experts is fused: Megatron fuses it there alone."""
    megatron, needed = config.policy.megatron_cfg, f"{MEGATRON}.moe_grouped_gemm"
    if megatron.use_fused_weighted_squared_relu and not megatron.moe_grouped_gemm:
        key, fix = f"{MEGATRON}.use_fused_weighted_squared_relu", f"{needed} is false; set it to true, or this to false"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(needed,))


def grouped_experts_are_rounded(config: Config) -> Iterator[KeyProblem]:
    """Require bfloat16 where experts are grouped: Transformer Engine multiplies float32 as TF32, with 10 bits."""
    megatron, precision = config.policy.megatron_cfg, "policy.precision"
    if megatron.moe_grouped_gemm and config.policy.precision == "float32":
        key, fix = f"{MEGATRON}.moe_grouped_gemm", f"{precision} is float32, which its kernels round; set this to false"
        yield KeyProblem(key=key, got="true", expected="false (native engine)", fix=fix, also=(precision,))


def shared_expert_overlaps_an_exchange(config: Config) -> Iterator[KeyProblem]:
    """Require an all-to-all exchange where the shared expert runs beside it: Megatron runs it beside no other."""
    megatron = config.policy.megatron_cfg
    if megatron.moe_shared_expert_overlap and megatron.moe_token_dispatcher_type != "alltoall":
        fix = f"{DISPATCHER} is {megatron.moe_token_dispatcher_type}; set this to false, or that to alltoall"
        key = f"{MEGATRON}.moe_shared_expert_overlap"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(DISPATCHER,))
