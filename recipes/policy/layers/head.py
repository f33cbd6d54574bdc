"""The output of a policy model: log-probabilities of given tokens instead of logits or a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from recipes.policy.layers.logprobs import label_logprobs

_MASK = 5  # its place in what GPTModel prepares


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

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Prepare the input; `padding_mask` is of this rank's tokens, where Megatron would divide it at some stages."""
        prepared = super()._preprocess(*args, **kwargs)
        return (*prepared[:_MASK], padding_mask, *prepared[_MASK + 1 :])

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, **_: object) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return hidden_logprobs(self, hidden_states, weight_VH, labels, temperature=self.output.temperature)


class HybridLogProbModel(MambaModel):  # type: ignore[misc]
    """Hybrid of Mamba and attention whose last stage returns log p(label) [1, T] in float32."""

    def __init__(self, output: OutputConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output = output
        self.keeps_hidden = False  # whether training passes leave the last hidden state in `hidden`
        self.hidden: Tensor | None = None
        if self.post_process:
            self.output_layer.forward = _pass_on  # MambaModel has no hook between the last norm and the logits

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return log-probabilities; what arrives as `logits` is the hidden state that `_pass_on` has passed on."""
        self.hidden = logits.detach() if self.keeps_hidden and torch.is_grad_enabled() else None
        return hidden_logprobs(self, logits, self.output_layer.weight, labels, temperature=self.output.temperature)


def _pass_on(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    return hidden_states, None


def hidden_logprobs(
    model: Any, hidden_states: Tensor, weight_VH: Tensor, labels: Tensor, *, temperature: float
) -> Tensor:
    """Return log p(label) [1, T] in float32 from the last hidden state [T, 1, H] of this tensor-parallel rank."""
    group = model.pg_collection.tp
    if model.config.sequence_parallel:
        # Each rank's vocabulary shard gives a part of the gradient: the backward pass must sum them.
        hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    logprobs_T = label_logprobs(
        hidden[:, 0],
        weight_VH,
        labels[0],
        temperature=temperature,
        chunk_size=model.output.chunk_size,
        group=group,
    )
    return logprobs_T[None]
