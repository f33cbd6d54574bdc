"""Pack sequences into microbatches and spread them over data-parallel ranks. Pure integer functions.

A bin is one microbatch: sequences laid end to end, at most `capacity` tokens. Orders of bins, and of the sequences
inside a bin, are part of the contract: the golden vectors compare them exactly.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Bins = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one data-parallel rank computes: rows of the batch, grouped into microbatches."""

    microbatches: tuple[tuple[int, ...], ...]  # row indices into the whole batch

    @property
    def rows(self) -> list[int]:
        """Row indices in the order in which the microbatches visit them."""
        return [row for microbatch in self.microbatches for row in microbatch]


def pack(
    lengths: Sequence[int],
    capacity: int,
    *,
    algorithm: str,
    min_bins: int = 1,
    bin_multiple: int = 1,
) -> Bins:
    """Return bins of indices into `lengths`, at least `min_bins` and a multiple of `bin_multiple` of them."""
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown packing algorithm {algorithm!r}; it is one of {', '.join(_ALGORITHMS)}")
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"sequence {index} has {length} tokens; a bin holds 1 to {capacity}")
    bins = _ALGORITHMS[algorithm](lengths, capacity)
    wanted = max(len(bins), min_bins)
    return _split_to(bins, -(-wanted // bin_multiple) * bin_multiple)


def shard_packed(lengths: Sequence[int], capacity: int, *, algorithm: str, num_shards: int) -> list[Shard]:
    """Pack the batch and deal bin j to rank j % num_shards, so that all ranks run equally many microbatches."""
    bins = pack(lengths, capacity, algorithm=algorithm, min_bins=num_shards, bin_multiple=num_shards)
    return [Shard(microbatches=tuple(tuple(b) for b in bins[rank::num_shards])) for rank in range(num_shards)]


def shard_plain(num_rows: int, *, micro_batch_size: int, num_shards: int) -> list[Shard]:
    """Give each rank a contiguous block of rows, cut into microbatches of `micro_batch_size` rows."""
    if num_rows % num_shards:
        raise ValueError(f"{num_rows} sequences do not divide over {num_shards} data-parallel ranks")
    per_shard = num_rows // num_shards
    shards = []
    for start in range(0, num_rows, per_shard):
        rows = range(start, start + per_shard)
        cuts = range(0, per_shard, micro_batch_size)
        shards.append(Shard(microbatches=tuple(tuple(rows[cut : cut + micro_batch_size]) for cut in cuts)))
    return shards


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def _split_to(bins: Bins, count: int) -> Bins:
    """Open bins until there are `count`; each takes the last item of the fullest bin that has more than one."""
    num_items = sum(len(b) for b in bins)
    if num_items < count:
        raise ValueError(f"{num_items} sequences cannot fill {count} bins; lower the data-parallel size")
    donors = sorted(range(len(bins)), key=lambda index: (len(bins[index]), index), reverse=True)
    for donor in donors:
        while len(bins) < count and len(bins[donor]) > 1:
            bins.append([bins[donor].pop()])
    return bins


def _concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """Fill bins in the order of the batch."""
    bins: Bins = []
    free = 0
    for index, length in enumerate(lengths):
        if length > free:
            bins.append([])
            free = capacity
        bins[-1].append(index)
        free -= length
    return bins


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Put each sequence, longest first, into the first bin with room."""
    bins: Bins = []
    free: list[int] = []
    for index in reversed(_ascending(lengths)):
        length = lengths[index]
        slot = next((i for i, room in enumerate(free) if room >= length), None)
        if slot is None:
            bins.append([])
            free.append(capacity)
            slot = len(bins) - 1
        bins[slot].append(index)
        free[slot] -= length
    return bins


def _modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pair large sequences with medium and small ones (Johnson and Garey's MFFD), then spread what is left."""
    order = _ascending(lengths)
    large = [i for i in order if lengths[i] * 2 > capacity]
    medium = [i for i in order if lengths[i] * 2 <= capacity < lengths[i] * 3]
    small = [i for i in order if lengths[i] * 3 <= capacity < lengths[i] * 6]
    tiny = [i for i in order if lengths[i] * 6 <= capacity]

    bins = [[index] for index in sorted(large, key=lambda index: -lengths[index])]
    free = [capacity - lengths[b[0]] for b in bins]

    def put(slot: int, pool: list[int], position: int) -> None:
        index = pool.pop(position)
        bins[slot].append(index)
        free[slot] -= lengths[index]

    has_medium = [False] * len(bins)
    for slot in range(len(bins)):
        position = _largest_fit(medium, lengths, free[slot])
        if position is not None:
            put(slot, medium, position)
            has_medium[slot] = True

    for slot in reversed(range(len(bins))):
        if has_medium[slot]:
            continue
        if len(small) < 2 or lengths[small[0]] + lengths[small[1]] > free[slot]:
            continue
        put(slot, small, 0)
        position = _largest_fit(small, lengths, free[slot])
        assert position is not None, "the second smallest was checked to fit"
        put(slot, small, position)

    rest = sorted(medium + small + tiny, key=lambda index: lengths[index])
    for slot in range(len(bins)):
        while (position := _largest_fit(rest, lengths, free[slot])) is not None:
            put(slot, rest, position)
    return bins + _emptiest_fit(sorted(rest, key=lambda index: -lengths[index]), lengths, capacity)


def _emptiest_fit(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Put each sequence into the emptiest bin, or a new one; return the bins from emptiest to fullest."""
    bins: list[tuple[int, list[int]]] = []
    for index in indices:
        if bins and bins[0][0] + lengths[index] <= capacity:
            load, items = bins.pop(0)
        else:
            load, items = 0, []
        bisect.insort_right(bins, (load + lengths[index], [*items, index]), key=lambda entry: entry[0])
    return [items for _, items in bins]


def _largest_fit(pool: Sequence[int], lengths: Sequence[int], room: int) -> int | None:
    """Return the position of the largest sequence of an ascending pool that fits, the first of equals, or None."""
    end = bisect.bisect_right(pool, room, key=lambda index: lengths[index])
    if end == 0:
        return None
    return bisect.bisect_left(pool, lengths[pool[end - 1]], key=lambda index: lengths[index])


def _ascending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: lengths[index])


_ALGORITHMS: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
    "first_fit_decreasing": _first_fit_decreasing,
    "concatenative": _concatenative,
}
