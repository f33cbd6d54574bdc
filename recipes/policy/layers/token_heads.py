"""Multi-token heads: from the state of token t and the tokens after it to log-probabilities of later ones.

Head k predicts token t + k + 1 from the state that head k - 1 left and from the embedding of token t + k; head 0 is the
model itself. All heads are one block with the same weights. They are detached: the states, the embedding and the output
projection that they read get no gradient.

Shape legend: K heads, T tokens of a row, H hidden size. With sequence parallelism a rank has states of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipes.policy.layers.head import hidden_logprobs
from recipes.policy.layers.norm import RMSNorm
from recipes.policy.layers.packed import PackedSequences


class TokenHeads(MegatronModule):  # type: ignore[misc]
    """The block of an attention layer and a layer of experts that is applied once per head.

    Its layers are attributes, not a list: Megatron writes the parts of a list into a checkpoint as if every rank had
    the same ones.
    """

    def __init__(self, config: TransformerConfig, *, attention: ModuleSpec, experts: ModuleSpec) -> None:
        super().__init__(config=config)
        groups, size = ProcessGroupCollection.use_mpu_process_groups(), config.hidden_size
        self.enorm = RMSNorm(config, size, config.layernorm_epsilon)
        self.hnorm = RMSNorm(config, size, config.layernorm_epsilon)
        self.eh_proj = ColumnParallelLinear(
            2 * size,
            size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,  # not made for sequence parallelism
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        self.attention = build_module(attention, config=config, layer_number=1, pg_collection=groups)
        self.moe = build_module(experts, config=config, layer_number=2, pg_collection=groups)
        self.final_layernorm = RMSNorm(config, size, config.layernorm_epsilon)

    def forward(
        self,
        hidden_T1H: Tensor,
        embeddings: Sequence[Tensor],
        labels_KT: Tensor,
        *,
        trunk: Any,
        sequences: PackedSequences,
        padding_mask: Tensor,
    ) -> Tensor:
        """Return log p(label) [K, T] in float32, at temperature 1.

        Args:
            hidden_T1H: the model's state after its last norm.
            embeddings: K times [T, 1, H], without gradient; entry k - 1 has the embedding of token t + k at place t.
            labels_KT: row k - 1 has token t + k + 1 at place t.
            trunk: the model, whose output projection is used.
            padding_mask: True on pads, of this rank's tokens.
        """
        hidden_T1H = hidden_T1H.detach()
        weight_VH = trunk.output_layer.weight.detach()
        rows = []
        for embedding_T1H, labels_T in zip(embeddings, labels_KT, strict=True):
            if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
                hidden_T1H = checkpoint(
                    self._step, hidden_T1H, embedding_T1H, sequences, padding_mask, use_reentrant=False
                )
            else:
                hidden_T1H = self._step(hidden_T1H, embedding_T1H, sequences, padding_mask)
            rows.append(hidden_logprobs(trunk, hidden_T1H, weight_VH, labels_T[None], temperature=1.0)[0])
        return torch.stack(rows)

    def _step(
        self, hidden_T1H: Tensor, embedding_T1H: Tensor, sequences: PackedSequences, padding_mask: Tensor
    ) -> Tensor:
        """Return the state of the next head."""
        both = torch.cat([self.enorm(embedding_T1H), self.hnorm(hidden_T1H)], dim=-1)
        state = gather_from_tensor_model_parallel_region(self.eh_proj(both)[0])
        if self.config.sequence_parallel:
            state = scatter_to_sequence_parallel_region(state)
        others = {"attention_mask": None, "packed_seq_params": sequences, "padding_mask": padding_mask}
        for layer in (self.attention, self.moe):
            state, _ = layer(hidden_states=state, **others)
        result: Tensor = self.final_layernorm(state)
        return result
