"""How tokens reach the experts of the policy, and what runs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import DISPATCHER, MEGATRON
from recipes.config.tree import Config


def shared_expert_overlaps_an_exchange(config: Config) -> Iterator[KeyProblem]:
    """Require an all-to-all exchange where the shared expert runs beside it: Megatron runs it beside no other."""
    megatron = config.policy.megatron_cfg
    if megatron.moe_shared_expert_overlap and megatron.moe_token_dispatcher_type != "alltoall":
        fix = f"{DISPATCHER} is {megatron.moe_token_dispatcher_type}; set this to false, or that to alltoall"
        key = f"{MEGATRON}.moe_shared_expert_overlap"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(DISPATCHER,))
