"""Split a batch over data-parallel ranks and bring their results together again. Runs in the driver; no Megatron.

Shape legend: B rows of the whole batch, S padded length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from recipes.config.tree import PolicyConfig
from recipes.policy.packing import Shard, round_up, shard_packed, shard_plain
from recipes.types import GlobalCounts, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShard:
    """What one data-parallel rank computes in one call."""

    batch: TrainBatch  # this rank's rows, in the order of `microbatches`
    microbatches: tuple[tuple[int, ...], ...]  # rows of `batch`
    counts: GlobalCounts  # of the whole batch


def global_counts(batch: TrainBatch) -> GlobalCounts:
    """Count what the loss divides by, over the whole batch: the first token of a row is never predicted."""
    mask_BS = batch.token_mask_BS[:, 1:].double() * batch.sample_mask_B.double()[:, None]
    return GlobalCounts(tokens=mask_BS.sum().item(), sequences=batch.sample_mask_B.double().sum().item())


def plan(batch: TrainBatch, cfg: PolicyConfig, *, num_shards: int, training: bool) -> list[Shard]:
    """Choose the rows and microbatches of every data-parallel rank."""
    packing = cfg.sequence_packing
    if not packing.enabled:
        size = cfg.train_micro_batch_size if training else cfg.logprob_batch_size
        return shard_plain(len(batch.input_lengths_B), micro_batch_size=size, num_shards=num_shards)
    multiple = cfg.make_sequence_length_divisible_by
    lengths = [round_up(int(length), multiple) for length in batch.input_lengths_B]
    capacity = packing.train_mb_tokens if training else packing.logprob_mb_tokens
    return shard_packed(lengths, capacity, algorithm=packing.algorithm, num_shards=num_shards)


def split(batch: TrainBatch, shards: Sequence[Shard]) -> list[BatchShard]:
    """Copy out the rows of every shard."""
    counts = global_counts(batch)
    result = []
    for shard in shards:
        first = 0
        microbatches = []
        for microbatch in shard.microbatches:
            microbatches.append(tuple(range(first, first + len(microbatch))))
            first += len(microbatch)
        rows = torch.tensor(shard.rows, dtype=torch.int64)
        result.append(BatchShard(batch=_take(batch, rows), microbatches=tuple(microbatches), counts=counts))
    return result


def scatter_rows(parts_BS: Sequence[Tensor], shards: Sequence[Shard], *, shape: tuple[int, int]) -> Tensor:
    """Put the rows that every shard returned back into the order of the whole batch."""
    result_BS = torch.zeros(shape, dtype=torch.float32)
    for part_BS, shard in zip(parts_BS, shards, strict=True):
        result_BS[torch.tensor(shard.rows, dtype=torch.int64)] = part_BS
    return result_BS


def merge_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine what microbatches or ranks measured: sums, and minima / maxima for `_min` / `_max` names."""
    merged: dict[str, float] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        combine = min if name.endswith("_min") else max if name.endswith("_max") else math.fsum
        merged[name] = combine(values)
    return merged


def merge_step_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the answers of all data-parallel ranks to one training step; the extremes of no token at all are -1."""
    shared = {name: parts[0][name] for name in ("grad_norm", "lr")}  # equal on all ranks
    merged = merge_metrics([{name: part[name] for name in part if name not in shared} for part in parts])
    nothing = {"_min": math.inf, "_max": -math.inf}
    return {name: -1.0 if value == nothing.get(name[-4:]) else value for name, value in merged.items()} | shared


def _take(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    return TrainBatch(**{name: tensor.index_select(0, rows) for name, tensor in tensors.items()})
