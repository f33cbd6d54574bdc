"""A stand-in for DeepEP's kernels over gloo: what Megatron's flex dispatcher asks of them, by gathering all tokens.

Shape legend: T tokens of this rank, A tokens of all ranks of the group, N those of them that this rank computes, H
their size, K experts that a token goes to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.config.packages import package_problems


def stand_in() -> None:
    """Let Megatron find DeepEP in this process, and the policy refuse no package."""
    from megatron.core.transformer.moe import token_dispatcher

    from recipes.policy import step

    token_dispatcher.fused_dispatch, token_dispatcher.fused_combine = dispatch, combine
    token_dispatcher.set_deepep_num_sms = lambda num_sms: None
    assert step.package_problems in (package_problems, _no_problems)
    step.package_problems = _no_problems  # type: ignore[assignment]


def _no_problems(*_: Any, **__: Any) -> list[Any]:
    return []


def dispatch(
    x_TH: Tensor,
    indices_TK: Tensor,
    probs_TK: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Return the tokens of this rank's experts, which of them each goes to (else -1), by how much, and counts."""
    del async_finish, allocate_on_comm_stream
    assert probs_TK.dtype == torch.float32, "DeepEP only supports float32 probs"
    assert indices_TK.dtype == torch.int64 and x_TH.is_contiguous()
    sizes: list[Any] = [None] * group.size()
    dist.all_gather_object(sizes, len(x_TH), group=group)
    x_AH, indices_AK, probs_AK = (_gather(rows, group, sizes) for rows in (x_TH, indices_TK, probs_TK))
    num_local = num_experts // group.size()
    is_own_AK = indices_AK // num_local == group.rank()
    taken_N = is_own_AK.any(1).nonzero()[:, 0]
    own_NK = is_own_AK[taken_N]
    local_NK = torch.where(own_NK, indices_AK[taken_N] - group.rank() * num_local, -1)
    counts = torch.bincount(local_NK[own_NK], minlength=num_local)
    return x_AH[taken_N], local_NK, probs_AK[taken_N] * own_NK, counts, (taken_N, sizes)


def combine(
    x_NH: Tensor,
    group: dist.ProcessGroup,
    handle: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, None]:
    """Return each of this rank's tokens as the sum of what the ranks have made of it."""
    from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region

    del async_finish, allocate_on_comm_stream
    taken_N, sizes = handle
    all_AH = x_NH.new_zeros(sum(sizes), x_NH.shape[1]).index_add(0, taken_N, x_NH)
    return reduce_scatter_to_sequence_parallel_region(all_AH, group=group, input_split_sizes=sizes), None


def _gather(rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered: Tensor = gather_from_sequence_parallel_region(rows, group=group, output_split_sizes=sizes)
    return gathered
