"""How tokens reach their experts by an all-gather, where ranks have different numbers of tokens.

Megatron's own all-gather takes the numbers for equal. Packed rows of two data-parallel ranks are not, and expert
parallelism makes one group of such ranks.

Shape legend: T tokens of this rank, A tokens of all ranks of the group, H hidden or latent size, E experts of a layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor


class UnevenAllGather(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Every rank of the group gets all tokens of the group, and computes those of its own experts."""

    routing_map: Tensor

    def token_dispatch(self, hidden_TH: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tokens, their shares of the experts and the map of who is routed where: [A, ...] each."""
        self._sizes = _sizes(len(hidden_TH), self.tp_ep_group, hidden_TH.device)
        self.routing_map = self._gather(self.routing_map)
        return self._gather(hidden_TH), self._gather(probs_TE)

    def token_combine(self, hidden_AH: Tensor) -> Tensor:
        """Add up what the experts of all ranks made of each token, where the token came from: [T, H]."""
        if len(self._sizes) == 1:
            return hidden_AH
        summed: Tensor = reduce_scatter_to_sequence_parallel_region(
            hidden_AH.to(self.local_probs.dtype), group=self.tp_ep_group, input_split_sizes=self._sizes
        )
        return summed.to(hidden_AH.dtype)

    def _gather(self, rows: Tensor) -> Tensor:
        if len(self._sizes) == 1:
            return rows
        gathered: Tensor = gather_from_sequence_parallel_region(
            rows.contiguous(), group=self.tp_ep_group, output_split_sizes=self._sizes
        )
        return gathered


def use_uneven_gather() -> None:
    """Let layers of experts that are built from now on take `UnevenAllGather` where they would take Megatron's."""
    moe_layer.MoEAllGatherTokenDispatcher = UnevenAllGather


def _sizes(num_tokens: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the number of tokens of each rank of the group."""
    if group.size() == 1:
        return [num_tokens]
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([num_tokens], device=device), group=group)
    found: list[int] = sizes.tolist()
    return found
