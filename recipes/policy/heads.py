"""The training of multi-token heads beside the policy: their inputs, their loss, their gradients and their clipping.

A head learns the tokens that the policy has sampled, and only those that stay in the policy's loss: the sum of their
negative log-probabilities over all heads, times `mtp_loss_scaling_factor` over the number of heads, divided by the
number of those tokens. Advantages play no part. The heads have gradient buffers and an optimizer of their own, so that
neither their gradients nor their norm, by which gradients are clipped, reach the policy.

With pipeline parallelism the last stage alone has the heads. What they add up is added up over the ranks of that stage,
and the first stage sends it the embedding before every step.

Shape legend: K heads, T tokens of a packed row, B rows of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from recipes.errors import ConfigError, Problem
from recipes.policy.layers.context import ContextSequences, gather_row
from recipes.policy.layers.router import pads_of_rank
from recipes.policy.layers.token_heads import TokenHeads
from recipes.policy.microbatch import Microbatch
from recipes.policy.optimizer import wrap_ddp
from recipes.policy.parallel import device

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig, PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTargets:
    """What the heads read of a packed row and predict in it; 0 beyond the end of a sequence."""

    tokens_KT: Tensor  # int64: row k - 1 has token t + k of the same sequence at place t
    labels_KT: Tensor  # int64: token t + k + 1
    mask_KT: Tensor  # float32: 1 where the label was sampled and stays in the loss
    count: Tensor  # float32 scalar: tokens of the rows that were sampled and stay in the loss


def head_targets(
    packed: Microbatch,
    ids: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.floating[Any]]],
    sample_mask_B: Tensor,
    *,
    num_heads: int,
) -> HeadTargets:
    """Shift the tokens and the masks of each row, one array each, within its own sequence.

    Args:
        masks: 1 on sampled tokens.
        sample_mask_B: 0 for rows that are out of the loss; on the device, where the loss decides it.
    """
    total = packed.tokens_1T.shape[1]
    tokens, mask = np.zeros((num_heads + 1, total), np.int64), np.zeros((num_heads + 1, total), np.float32)
    rows_T = np.zeros(total, np.int64)
    for row, (start, own, sampled) in enumerate(zip(packed.starts, ids, masks, strict=True)):
        rows_T[start : start + len(own)] = row
        for shift in range(1, min(num_heads + 2, len(own))):
            tokens[shift - 1, start : start + len(own) - shift] = own[shift:]
            mask[shift - 1, start : start + len(own) - shift] = sampled[shift:]
    where = packed.tokens_1T.device
    moved = torch.from_numpy(tokens).to(where)
    kept_KT = torch.from_numpy(mask).to(where) * sample_mask_B[torch.from_numpy(rows_T).to(where)]
    return HeadTargets(
        tokens_KT=moved[:-1],
        labels_KT=moved[1:],
        mask_KT=kept_KT[1:],
        count=kept_KT[0].sum(),  # moved by 1: all tokens but the first of each row, which nothing predicts
    )


class HeadTraining:
    """The heads of one rank while they are trained."""

    def __init__(
        self, model: DistributedDataParallel, embedding: Any, config: TransformerConfig, cfg: MegatronConfig
    ) -> None:
        """Take the heads in their gradient buffers, and the model's embedding or a copy of it."""
        self.model = model
        self.embedding = embedding
        self.num_heads = cfg.mtp_num_layers
        self._config = config
        self._scale = cfg.mtp_loss_scaling_factor / cfg.mtp_num_layers
        self._count: Tensor | None = None

    def begin(self) -> None:
        """Start a step: forget gradients and counts."""
        self.model.train()
        self.model.zero_grad_buffer()
        self._count = None

    def loss(
        self, trunk: Any, packed: Microbatch, targets: HeadTargets
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return what the microbatch adds to the loss of the heads, and `mtp/mtp_K_loss`, for each head its mean.

        Args:
            trunk: the model, after the forward pass of the microbatch.
        """
        logprobs_KT = self._logprobs(trunk, packed, targets)
        sums_K = -(logprobs_KT * targets.mask_KT).sum(1)
        own = targets.count if parallel_state.get_context_parallel_rank() == 0 else torch.zeros_like(targets.count)
        self._count = own if self._count is None else self._count + own
        pairs = zip(sums_K.detach(), targets.mask_KT.sum(1), strict=True)
        return self._scale * sums_K.sum(), {f"mtp/mtp_{k}_loss": pair for k, pair in enumerate(pairs, start=1)}

    def finish(self) -> None:
        """Add up the gradients over the ranks and divide them by the number of tokens.

        Collective over the ranks of the last stage. Megatron's own function for it waits for all stages.
        """
        self.model.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([self.model], self._config)
        if self._config.moe_router_enable_expert_bias:
            _update_router_expert_bias([self.model], self._config)
        reset_model_temporary_tensors(self._config, [self.model])
        count = torch.zeros((), device=device()) if self._count is None else self._count
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if count > 0:
            self.model.scale_gradients(1.0 / count)

    def _logprobs(self, trunk: Any, packed: Microbatch, targets: HeadTargets) -> Tensor:
        sequences, pads_1T = packed.sequences, packed.sequences.pads_1T
        tokens_KT, labels_KT = targets.tokens_KT, targets.labels_KT
        is_shared = isinstance(sequences, ContextSequences)
        if is_shared:
            tokens_KT, labels_KT, pads_1T = (values[:, sequences.own_O] for values in (tokens_KT, labels_KT, pads_1T))
        hidden_T1H, trunk.hidden = trunk.hidden, None
        with torch.no_grad():
            embeddings = [self.embedding(input_ids=tokens_T[None], position_ids=None) for tokens_T in tokens_KT]
        logprobs_KT: Tensor = self.model(
            hidden_T1H,
            embeddings,
            labels_KT,
            trunk=trunk,
            sequences=sequences,
            padding_mask=pads_of_rank(pads_1T, is_divided=self._config.sequence_parallel),
        )
        if not is_shared:
            return logprobs_KT
        group = parallel_state.get_context_parallel_group()
        return torch.cat([gather_row(row_T[None], sequences, group) for row_T in logprobs_KT])


def train_heads(
    heads: TokenHeads | None, trunk: Any, config: TransformerConfig, cfg: PolicyConfig
) -> HeadTraining | None:
    """Prepare the training of the heads, after that of the model `trunk`.

    None where no heads are to be trained, and on all pipeline stages but the last one. Raises `ConfigError` when the
    model has none to train.
    """
    if cfg.megatron_cfg.mtp_num_layers == 0 or not trunk.post_process:
        return None
    if heads is None:
        problem = Problem(
            where="policy.megatron_cfg.mtp_num_layers",
            wrong=f"{cfg.model_name} has no multi-token heads to train",
            fix="set it to 0, or train a model whose config.json has num_nextn_predict_layers: 1 and whose files have"
            " the weights",
        )
        raise ConfigError([problem])
    trunk.keeps_hidden = True
    if config.recompute_granularity == "full":
        _sum_outside_of_kernels(heads)
    wrapped = wrap_ddp(heads.requires_grad_(True), config, cfg.megatron_cfg)
    return HeadTraining(wrapped, _embedding(trunk), config, cfg.megatron_cfg)


def _sum_outside_of_kernels(heads: TokenHeads) -> None:
    """Take the gradients of linear layers as any others, whatever `gradient_accumulation_fusion` says.

    Torch recomputes heads with copies of their weights. Megatron would mark the copy as one whose gradient is in its
    sum already, and then miss the gradient of the weight itself.
    """
    for module in heads.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):  # Megatron's, Transformer Engine's
            if hasattr(module, name):
                setattr(module, name, False)


def share_embedding(trunk: Any, heads: HeadTraining | None, cfg: MegatronConfig) -> None:
    """Send the embedding of the first pipeline stage to the heads that are trained. Collective over all stages."""
    is_end = trunk.pre_process or trunk.post_process
    if cfg.mtp_num_layers == 0 or cfg.pipeline_model_parallel_size == 1 or not is_end:
        return
    embedding = trunk.embedding if heads is None else heads.embedding
    ends = parallel_state.get_embedding_group()
    dist.broadcast(embedding.word_embeddings.weight.data, dist.get_global_rank(ends, 0), group=ends)


def _embedding(trunk: Any) -> Any:
    """Return the model's embedding; on a stage that has none, a copy of it, which `share_embedding` fills."""
    if trunk.pre_process:
        return trunk.embedding
    copy = LanguageModelEmbedding(
        config=trunk.config,
        vocab_size=trunk.vocab_size,
        max_sequence_length=trunk.max_sequence_length,
        position_embedding_type="none",
        tp_group=trunk.pg_collection.tp,
    )
    return copy.to(device()).requires_grad_(False)
