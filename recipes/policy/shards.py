"""Split a batch over data-parallel ranks and bring their results together again. Runs in the driver; no Megatron.

Lengths alone decide. A rank is sent one value per row and field, and references to the groups in which it has rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from recipes.config.tree import PolicyConfig
from recipes.policy.packing import Shard, round_up, shard_packed, shard_plain
from recipes.tokens import GroupTokens, RowTokens, TokenStore
from recipes.types import TrainBatch

Measured = float | tuple[float, float]
"""One metric of `LossSums`; a pair is a sum and what it is divided by at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShard:
    """What one data-parallel rank computes in one call."""

    batch: TrainBatch  # this rank's rows, in the order of `microbatches`
    microbatches: tuple[tuple[int, ...], ...]  # rows of `batch`

    def fetched(self, store: TokenStore) -> BatchShard:
        """Return it with the arrays in place of the references."""
        return replace(self, batch=replace(self.batch, tokens=tuple(store.get(self.batch.tokens))))

    def row(self, row: int) -> RowTokens:
        """Return the tokens of a row; the shard has been fetched."""
        tokens: GroupTokens = self.batch.tokens[int(self.batch.group_B[row])]
        return tokens.row(int(self.batch.member_B[row]))


def optimizer_batches(batch: TrainBatch, size: int, *, num_shards: int = 1) -> list[TrainBatch]:
    """Cut a batch into those of its optimizer steps: `size` rollouts each, in order; the last may have fewer.

    Rollouts with several sequences give any number of rows; `padded` makes it one that `num_shards` divides.
    """
    rollout_B = torch.arange(len(batch.lengths_B)) if batch.rollout_B is None else batch.rollout_B
    num_rollouts = int(rollout_B[-1]) + 1 if len(rollout_B) else 0
    step_B = rollout_B // size
    steps = [batch]
    if num_rollouts > size:
        steps = [_take(batch, (step_B == step).nonzero().ravel()) for step in range(int(step_B[-1]) + 1)]
    return [padded(_counted_by_rows(step), num_shards) for step in steps]


def _counted_by_rows(step: TrainBatch) -> TrainBatch:
    """Return a step whose mean over rollouts is the sum over its rows, divided by the number of those in the loss.

    That number is what a loss divides by, so shares of rollouts are multiplied by rows per rollout.
    """
    if step.row_weight_B is None or step.rollout_B is None:
        return step
    kept_B = step.sample_mask_B > 0
    rows_per_rollout = int(kept_B.sum()) / max(len(set(step.rollout_B[kept_B].tolist())), 1)
    nll_weight_B = None if step.nll_weight_B is None else step.nll_weight_B * rows_per_rollout
    return replace(step, row_weight_B=step.row_weight_B * rows_per_rollout, nll_weight_B=nll_weight_B)


def padded(batch: TrainBatch, multiple: int) -> TrainBatch:
    """Return a batch of which the rows divide evenly: its shortest row is repeated, out of the loss.

    Every rank computes equally many rows, or with packing equally many bins. Where each row fills a bin of its own,
    there are as many bins as ranks can share only if there are as many rows.
    """
    num_rows = len(batch.lengths_B)
    missing = -num_rows % multiple
    if batch.rollout_B is None or not missing:
        return batch
    shortest = batch.lengths_B.argmin().repeat(missing)
    result = _take(batch, torch.cat([torch.arange(num_rows), shortest]))
    mask_B = result.sample_mask_B.clone()
    mask_B[num_rows:] = 0.0
    return replace(result, sample_mask_B=mask_B)


def divide(batch: TrainBatch, cfg: PolicyConfig, *, num_shards: int, training: bool) -> list[Shard]:
    """Choose the rows and microbatches of every data-parallel rank."""
    packing = cfg.sequence_packing
    if not packing.enabled:
        size = cfg.train_micro_batch_size if training else cfg.logprob_batch_size
        return shard_plain(len(batch.lengths_B), micro_batch_size=size, num_shards=num_shards)
    multiple = cfg.make_sequence_length_divisible_by
    lengths = [round_up(length, multiple) for length in batch.lengths_B.tolist()]
    capacity = packing.train_mb_tokens if training else packing.logprob_mb_tokens
    return shard_packed(lengths, capacity, algorithm=packing.algorithm, num_shards=num_shards)


def split(batch: TrainBatch, shards: Sequence[Shard]) -> list[BatchShard]:
    """Pick the rows of every shard."""
    result = []
    for shard in shards:
        first = 0
        microbatches = []
        for microbatch in shard.microbatches:
            microbatches.append(tuple(range(first, first + len(microbatch))))
            first += len(microbatch)
        rows = torch.tensor(shard.rows, dtype=torch.int64)
        result.append(BatchShard(batch=_take(batch, rows), microbatches=tuple(microbatches)))
    return result


def scatter_rows(parts: Sequence[Tensor], shards: Sequence[Shard], lengths: Sequence[int]) -> list[Tensor]:
    """Return one tensor per row of the whole batch; a part holds the rows of its shard end to end."""
    rows: list[Tensor] = [torch.empty(0)] * len(lengths)
    for part, shard in zip(parts, shards, strict=True):
        ends = itertools.accumulate(lengths[row] for row in shard.rows)
        for row, end in zip(shard.rows, ends, strict=True):
            rows[row] = part[end - lengths[row] : end]
    return rows


_OF_A_STEP = frozenset({"grad_norm", "lr", "skipped_steps"})  # metrics that are equal on all ranks


def merge_metrics(parts: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """Combine what microbatches or ranks measured, as `LossSums` says."""
    return {name: _merged(name, [part[name] for part in parts]) for name in parts[0]}


def merge_optimizer_steps(parts: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """Combine what one rank measured in the optimizer steps of one batch.

    `lr` is that of the last step, `grad_norm` the largest of those that are finite, and `skipped_steps` adds up.
    """
    skipped = sum(_divided(part["skipped_steps"]) for part in parts)
    last: dict[str, Measured] = {"lr": parts[-1]["lr"], "skipped_steps": skipped}
    if norms := [_divided(part["grad_norm"]) for part in parts if "grad_norm" in part]:  # none of a frozen policy
        last["grad_norm"] = max(filter(math.isfinite, norms), default=math.nan)
    return merge_metrics([{name: part[name] for name in part if name not in last} for part in parts]) | last


def merge_step_metrics(parts: Sequence[Mapping[str, Measured]]) -> dict[str, float]:
    """Combine the answers of all data-parallel ranks to one training step.

    A mean of nothing is 0. The extremes of nothing are -1, those of `min_` and `max_` names are 0, as in the reference.
    """
    shared = {name: parts[0][name] for name in _OF_A_STEP & parts[0].keys()}
    merged = merge_metrics([{name: part[name] for name in part if name not in shared} for part in parts])
    metrics = {name: _divided(value) for name, value in (merged | shared).items()}
    nothing = {"min": math.inf, "max": -math.inf}
    empty = [name for name in metrics for kind, value in nothing.items() if _is(kind, name) and metrics[name] == value]
    return metrics | {name: 0.0 if name.startswith(("min_", "max_")) else -1.0 for name in empty}


def _merged(name: str, values: Sequence[Measured]) -> Measured:
    pairs = [value for value in values if isinstance(value, tuple)]
    if pairs:
        return _sum(total for total, _ in pairs), _sum(count for _, count in pairs)
    combine = min if _is("min", name) else max if _is("max", name) else _sum
    return combine(value for value in values if not isinstance(value, tuple))


def _sum(values: Iterable[float]) -> float:
    """Return the sum. `fsum` refuses two infinities of both signs; such a step is skipped, and must not raise."""
    found = list(values)
    return math.fsum(found) if all(map(math.isfinite, found)) else sum(found)


def _divided(value: Measured) -> float:
    if not isinstance(value, tuple):
        return value
    total, count = value
    return total / count if count else 0.0


def _is(kind: str, name: str) -> bool:
    return name.startswith(f"{kind}_") or name.endswith(f"_{kind}")


def _take(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    taken = replace(batch, **{name: value_B.index_select(0, rows) for name, value_B in values.items()})
    groups = sorted(set(taken.group_B.tolist()))
    own_group_B = torch.searchsorted(torch.tensor(groups, dtype=torch.int64), taken.group_B)
    return replace(taken, group_B=own_group_B, tokens=tuple(batch.tokens[group] for group in groups))
