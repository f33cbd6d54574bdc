"""Routes packed and laid out again, whatever was cut, overlaps or is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipes import routes

LAYERS = (2, 5)  # of six, from 1


def chosen(num_tokens: int, *, num_experts: int, num_chosen: int, seed: int = 0) -> Any:
    """Return random experts of some tokens in six layers, of which two have experts."""
    draw = np.random.default_rng(seed)
    whole_TDK = np.zeros((num_tokens, 6, num_chosen), np.uint16)
    for layer in LAYERS:
        scores = draw.random((num_tokens, num_experts))
        whole_TDK[:, layer - 1] = scores.argsort(axis=1)[:, :num_chosen]
    return whole_TDK


def ascending(whole_TDK: Any) -> Any:
    return np.sort(whole_TDK[:, np.array(LAYERS) - 1], axis=2)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(1, 4, 2), (7, 8, 3), (40, 512, 22), (9, 2000, 4), (300, 256, 8)]
)
def test_what_was_packed_is_laid_out_again(num_tokens: int, num_experts: int, num_chosen: int) -> None:
    whole_TDK = chosen(num_tokens, num_experts=num_experts, num_chosen=num_chosen)
    packed = routes.pack(whole_TDK, 3)
    found = routes.laid_out(packed, num_tokens + 5, LAYERS, num_chosen)
    assert (found[3:-2] == ascending(whole_TDK)).all() and found.dtype == np.int16
    assert (found[:3] == routes.UNKNOWN).all() and (found[-2:] == routes.UNKNOWN).all()
    assert (routes.laid_out(packed, num_tokens + 5, LAYERS[1:], num_chosen) == found[:, 1:]).all()
    assert routes.num_unknown(packed, num_tokens + 5) == 4  # the last token counts neither way


def test_routes_of_many_experts_take_a_fraction_of_two_bytes_each() -> None:
    whole_TDK = chosen(400, num_experts=512, num_chosen=22)
    assert len(routes.pack(whole_TDK, 0)) < 0.45 * 2 * 400 * len(LAYERS) * 22


@pytest.mark.parametrize("end", [0, 3, 4, 9, 10, 50])
def test_routes_are_cut_before_a_place(end: int) -> None:
    parts = [chosen(6, num_experts=8, num_chosen=3), chosen(4, num_experts=8, num_chosen=3, seed=1)]
    packed = routes.pack(parts[0], 0) + routes.pack(parts[1], 6)
    whole = routes.laid_out(packed, 60, LAYERS, 3)
    found = routes.laid_out(routes.cut(packed, end), 60, LAYERS, 3)
    assert (found[:end] == whole[:end]).all() and (found[end:] == routes.UNKNOWN).all()


def test_of_routes_that_overlap_the_first_count() -> None:
    first, second = (chosen(6, num_experts=8, num_chosen=3, seed=seed) for seed in (1, 2))
    packed = routes.pack(first, 2) + routes.pack(second, 5)
    found = routes.laid_out(packed, 9, LAYERS, 3)  # a sequence may end before its routes do
    assert (found[2:8] == ascending(first)).all() and (found[8] == ascending(second)[3]).all()
    assert routes.num_unknown(packed, 9) == 2


def test_a_model_without_experts_has_no_routes() -> None:
    assert routes.pack(np.zeros((5, 3, 2), np.uint8), 0) == b"" == routes.cut(b"", 3)
    assert routes.num_unknown(b"", 1) == 0
    assert (routes.laid_out(b"", 4, LAYERS, 3) == routes.UNKNOWN).all()


@pytest.mark.parametrize(("layers", "num_chosen"), [((2, 4), 3), ((2,), 2)])
def test_routes_of_another_model_are_refused(layers: tuple[int, ...], num_chosen: int) -> None:
    packed = routes.pack(chosen(5, num_experts=8, num_chosen=3), 0)
    with pytest.raises(ValueError, match="they have not got the same model"):
        routes.laid_out(packed, 6, layers, num_chosen)


@pytest.mark.parametrize("num_experts", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_where_each_token_has_one_expert_the_first_one_counts_too(num_tokens: int, num_experts: int) -> None:
    for seed in range(20):
        whole_TDK = chosen(num_tokens, num_experts=num_experts, num_chosen=1, seed=seed)
        packed = routes.pack(whole_TDK, 2)
        found = routes.laid_out(packed, num_tokens + 3, LAYERS, 1)
        assert (found[2:-1] == ascending(whole_TDK)).all(), seed
        assert routes.num_unknown(packed, num_tokens + 3) == 2
        cut = routes.laid_out(routes.cut(packed, 3), num_tokens + 3, LAYERS, 1)
        assert (cut[2] == found[2]).all() and (cut[3:] == routes.UNKNOWN).all()
