"""A linear layer that every tensor-parallel rank holds whole, for Megatron layer specs without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional


class ReplicatedLinear(torch.nn.Module):
    """What Transformer Engine's linear is with `parallel_mode="duplicated"`: [..., inputs] to [..., outputs]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # With sequence parallelism each rank sees a part of the tokens: the gradient is summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product and no bias, as Megatron's linear layers do."""
        return functional.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight to a distributed checkpoint: whole on every rank."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return sharded
