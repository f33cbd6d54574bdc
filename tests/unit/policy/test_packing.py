"""Packing and sharding against the recorded reference layouts, and the guards of their inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.policy.packing import pack, round_up, shard_packed, shard_plain


def _cases(golden_dir: Path, name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((golden_dir / "grpo" / name).read_text(encoding="utf-8"))["cases"]
    assert cases
    return cases


def test_bins_equal_the_golden_layouts(golden_dir: Path) -> None:
    wrong = []
    for case in _cases(golden_dir, "sequence_packing.json"):
        inputs = case["inputs"]
        try:
            got: Any = pack(
                inputs["lengths"],
                inputs["bin_capacity"],
                algorithm=case["algorithm"],
                min_bins=inputs["min_bin_count"] or 1,
                bin_multiple=inputs["bin_count_multiple"] or 1,
            )
        except ValueError:
            got = "ValueError"
        expected = case["expected"].get("error") or case["expected"]["bins"]
        if got != expected:
            wrong.append(case["name"])
    assert wrong == []


def test_shards_equal_the_golden_layouts(golden_dir: Path) -> None:
    for case in _cases(golden_dir, "sequence_packing_shards.json"):
        inputs, expected = case["inputs"], case["expected"]["shards"]
        multiple, size = inputs["sequence_length_pad_multiple"], inputs["global_batch_size"]
        padded = [round_up(length, multiple) for length in inputs["lengths"]]
        rows: list[list[int]] = [[] for _ in expected]
        tokens: list[list[list[int]]] = [[] for _ in expected]
        for start in range(0, len(padded), size):
            shards = shard_packed(
                padded[start : start + size],
                inputs["max_tokens_per_microbatch"],
                algorithm="modified_first_fit_decreasing",
                num_shards=inputs["shards"],
            )
            for rank, shard in enumerate(shards):
                rows[rank] += [start + row for row in shard.rows]
                tokens[rank].append([sum(padded[start + row] for row in mb) for mb in shard.microbatches])
        assert rows == [shard["sample_indices"] for shard in expected], case["name"]
        assert tokens == [shard["micro_batch_lengths"] for shard in expected], case["name"]


# At capacity 60: large above 30, medium above 20, small above 10. Worked out by hand from the algorithm's description.
LIMITS = {
    "half a bin is medium": ([30, 30], [[0, 1]]),
    "a third of a bin is small, and pairs come before it": ([31, 20, 11, 12], [[0, 2, 3], [1]]),
    "a sixth of a bin is tiny, and no half of a pair": ([31, 10, 11], [[0, 2, 1]]),
    "a pair may fill the bin to the last token": ([36, 11, 13, 20], [[0, 1, 2], [3]]),
    "a pair that is one token too long waits": ([36, 12, 13, 20], [[0, 3], [2, 1]]),
    "pairs start from the last bin, and two are enough": ([32, 31, 11, 12], [[0], [1, 2, 3]]),
    "a bin with a medium one gets no pair": ([31, 21, 11, 12], [[0, 1], [3, 2]]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_at_the_limits_of_their_class(name: str) -> None:
    lengths, bins = LIMITS[name]
    assert pack(lengths, 60, algorithm="modified_first_fit_decreasing") == bins


def test_a_sequence_longer_than_a_bin_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 101 tokens; a bin holds 1 to 100"):
        pack([5, 101], 100, algorithm="concatenative")


def test_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="first_fit_decreasing, concatenative"):
        pack([5], 100, algorithm="best_fit")


def test_plain_shards_are_contiguous_and_cut_into_microbatches() -> None:
    first, second = shard_plain(10, micro_batch_size=2, num_shards=2)
    assert first.microbatches == ((0, 1), (2, 3), (4,))
    assert second.rows == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="10 sequences do not divide over 4"):
        shard_plain(10, micro_batch_size=2, num_shards=4)
