"""Log-probabilities of given tokens from vocabulary-sharded logits, without ever holding all logits in float32.

Shape legend: T tokens of a packed row, V vocabulary (this rank holds V / tensor-parallel size), H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
