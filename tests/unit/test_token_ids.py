"""Tokens of a conversation: each value stays what it was, whatever is added to it, and nothing is copied needlessly."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from recipes.token_ids import TokenIds


def test_a_sum_has_both_and_leaves_its_parts() -> None:
    first = TokenIds([1, 2])
    sum_ = first.plus((3, 4))
    assert (tuple(first), tuple(sum_), len(sum_)) == ((1, 2), (1, 2, 3, 4), 4)
    assert sum_[-1] == 4 and sum_[1:3] == (2, 3) and sum_[::-1] == (4, 3, 2, 1) and sum_[-1:] == (4,)
    assert np.frombuffer(sum_.to_bytes(1), np.int32).tolist() == [2, 3, 4]
    assert first.to_bytes() == np.array([1, 2], np.int32).tobytes()
    with pytest.raises(IndexError):
        first[2]


def test_additions_to_the_same_tokens_do_not_meet() -> None:
    first = TokenIds(range(5))
    sums = [first.plus((7, 8)), first.plus((7, 9, 9)), first.plus((7,)), first.plus(()), first.plus((7, 8, 1))]
    assert [tuple(one)[5:] for one in sums] == [(7, 8), (7, 9, 9), (7,), (), (7, 8, 1)]
    again = sums[1].plus((2,))
    assert (tuple(again)[5:], tuple(sums[0])[5:], tuple(sums[4])[5:]) == ((7, 9, 9, 2), (7, 8), (7, 8, 1))


def test_a_turn_costs_what_is_new_in_it() -> None:
    seen = TokenIds(range(1_000_000))
    tracemalloc.start()
    for _ in range(20):
        seen = seen.plus((1, 2, 3))
    assert tracemalloc.get_traced_memory()[1] < 6_000_000, "it may grow once, by its own size"
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("first", "second", "count"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 5, 3), 1), ((1,), (1,), 1)]
)
def test_shared_tokens_are_counted(first: tuple[int, ...], second: tuple[int, ...], count: int) -> None:
    assert TokenIds(first).num_shared(TokenIds(second)) == count == TokenIds(second).num_shared(TokenIds(first))
    assert (TokenIds(first) == TokenIds(second)) == (first == second)


def test_an_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds([1 << 31])
    first = TokenIds([1])
    with pytest.raises(OverflowError):
        first.plus((2, 1 << 40))
    assert tuple(first.plus((3,))) == (1, 3)
