"""The gated activation and the rotary positions against the plain formulas, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from recipes.policy.layers.attention import rotary_angles, rotate
from recipes.policy.layers.context import held_positions, share_over_context
from recipes.policy.layers.norm import GatedSilu
from recipes.policy.layers.packed import packed_sequences

CPU = torch.device("cpu")


def with_gradient(function: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = function(x)
    (result * weight).sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gated_activation_is_the_plain_formula_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 14, generator=generator, dtype=dtype) * 4
    weight = torch.randn(5, 3, 7, generator=generator, dtype=dtype)

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    got, got_gradient = with_gradient(GatedSilu(None), x, weight)  # type: ignore[arg-type]
    expected, expected_gradient = with_gradient(plain, x, weight)
    assert torch.equal(got, expected)
    assert torch.equal(got_gradient, expected_gradient)


def test_the_gated_activation_keeps_its_input_and_nothing_else() -> None:
    kept: list[int] = []
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda x: x):
        GatedSilu(None)(x)  # type: ignore[arg-type]
    assert kept == [x.data_ptr()]


def test_rotation_is_that_of_transformers_and_its_gradient_turns_back() -> None:
    lengths = [7, 1, 12]
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, head_dim=8, rope_theta=5e5)
    positions_T = packed_sequences(lengths, CPU).positions_T
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(20, 4, 8, generator=generator) for _ in range(2))
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions_T[None])

    def theirs(x: Tensor) -> Tensor:
        heads_first = x.transpose(0, 1)[None]
        return apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0][0].transpose(0, 1)

    got, got_gradient = with_gradient(lambda x: rotate(x, rotary_angles(positions_T, 8, 5e5)), x, weight)
    expected, expected_gradient = with_gradient(theirs, x, weight)
    assert (expected - x).abs().max() > 0.1
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.allclose(got_gradient, expected_gradient, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_context_rotates_its_tokens_by_their_places_in_the_whole_sequence(rank: int) -> None:
    row = packed_sequences([8, 4], CPU)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    share = share_over_context(row, group)
    whole = [*range(8), *range(4)]
    assert share.positions_T.tolist() == [whole[place] for place in held_positions(row.cu_seqlens_q, rank=rank, size=2)]


@pytest.mark.parametrize(("lengths", "moves"), [([6, 6], False), ([6], False), ([6, 5], True), ([5, 6], True)])
def test_a_row_of_one_length_is_not_moved(lengths: list[int], moves: bool) -> None:
    sequences = packed_sequences(lengths, CPU)
    assert [batch.is_row for batch in sequences.batches] == [not moves]
    flat = sequences.batches[0].index_NL.flatten()
    assert torch.equal(flat[sequences.scatter_T], torch.arange(sum(lengths)))
    assert (len(flat) == sum(lengths)) is not moves
