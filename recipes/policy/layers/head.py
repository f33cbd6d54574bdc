"""The output of a policy model: log-probabilities of given tokens instead of logits or a loss.

Log-probabilities of given tokens from vocabulary-sharded logits, without ever holding all logits in float32.

Shape legend: T tokens of a packed row, V vocabulary (this rank holds V / tensor-parallel size), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class _VocabParallelLogProb(torch.autograd.Function):
    """log_softmax(logits / temperature)[label] over vocabulary shards: one MAX and one SUM all-reduce.

    The logits become float32 before they are divided: bfloat16 has 8 significant bits, and a quotient that is rounded
    to them is off by up to 0.4 %, while the engine divides in float32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels_T: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
        values = _scaled(logits, temperature)
        shard = values.shape[-1]
        local = labels_T - group.rank() * shard
        owned = (local >= 0) & (local < shard)
        local = local.clamp(0, shard - 1)

        peak_T = values.amax(-1)
        if group.size() > 1:
            dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(
            [
                (values - peak_T[:, None]).exp_().sum(-1),
                torch.where(owned, values.gather(-1, local[:, None])[:, 0], 0.0),
            ]
        )
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z_T = peak_T + sums[0].log()
        ctx.save_for_backward(logits, local, owned, log_z_T)
        ctx.temperature = temperature
        return sums[1] - log_z_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, owned, log_z_T = ctx.saved_tensors
        grad_T = grads[0] / ctx.temperature
        grad_logits = (_scaled(logits, ctx.temperature) - log_z_T[:, None]).exp_().mul_(-grad_T[:, None])
        grad_logits.scatter_add_(-1, local[:, None], (owned * grad_T)[:, None])
        return grad_logits.to(logits.dtype), None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    values = logits.float()
    return values if temperature == 1.0 else values / temperature


def label_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float,
    chunk_size: int | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return log p(label) [T] in float32, of softmax(hidden @ weight.T / temperature).

    Args:
        weight_VH: this rank's rows of the output embedding.
        chunk_size: tokens whose logits exist at a time, recomputed in the backward pass; None keeps all of them.
        group: the tensor-parallel group the vocabulary is split over.
    """

    def logprobs(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, weight_VH)
        result: Tensor = _VocabParallelLogProb.apply(logits, labels, temperature, group)  # type: ignore[no-untyped-call]
        return result

    if chunk_size is None or chunk_size >= len(labels_T):
        return logprobs(hidden_TH, labels_T)
    chunks = zip(torch.split(hidden_TH, chunk_size), torch.split(labels_T, chunk_size), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([logprobs(hidden, labels) for hidden, labels in chunks])
    return torch.cat([checkpoint(logprobs, hidden, labels, use_reentrant=False) for hidden, labels in chunks])


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
        is_frozen = not self.output_layer.weight.requires_grad  # then training passes have no gradient
        is_training = torch.is_grad_enabled() or is_frozen
        self.hidden = logits.detach() if self.keeps_hidden and is_training else None
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
