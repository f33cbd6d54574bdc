"""The output of a policy model: log-probabilities of given tokens instead of logits or a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from recipes.policy.layers.logprobs import label_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """How log-probabilities are taken from the last hidden state."""

    temperature: float  # of generation: the logits are divided by it
    chunk_size: int | None  # tokens whose logits exist at a time


class LogProbModel(GPTModel):  # type: ignore[misc]
    """GPT whose last stage returns log p(label) [1, T] in float32."""

    def __init__(self, output: OutputConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output = output

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, **_: object) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            # Each rank's vocabulary shard gives a part of the gradient: the backward pass must sum them.
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        logprobs_T = label_logprobs(
            hidden[:, 0],
            weight_VH,
            labels[0],
            temperature=self.output.temperature,
            chunk_size=self.output.chunk_size,
            group=group,
        )
        return logprobs_T[None]
