"""Parts of layers that need no process group: shares of a row, pads, recomputation, counts of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recipes.policy.layers import context
from recipes.policy.layers.context import attend, held_positions, share_over_context
from recipes.policy.layers.norm import RMSNorm
from recipes.policy.layers.packed import packed_sequences
from recipes.policy.layers.recompute import recompute_in_backward
from recipes.policy.layers.router import _TokenCount

CPU = torch.device("cpu")


def test_a_rank_holds_an_early_and_a_late_chunk_of_each_sequence() -> None:
    bounds = torch.tensor([0, 8, 8, 12], dtype=torch.int32)  # an empty sequence is in between
    assert held_positions(bounds, rank=0, size=2).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_positions(bounds, rank=1, size=2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_query_sees_the_tokens_before_it_and_no_pads(rank: int) -> None:
    lengths = [12, 6, 30, 12]
    row = packed_sequences(lengths, CPU)
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: rank)
    share = share_over_context(row, group)
    assert torch.equal(
        torch.cat([held_positions(row.cu_seqlens_q, rank=r, size=3) for r in range(3)])[share.restore_T],
        torch.arange(sum(lengths)),
    )
    starts = row.cu_seqlens_q.tolist()
    seen: dict[int, list[int]] = {}
    for batch in share.context_batches:
        for queries, keys in zip(batch.queries_NL, batch.keys_NK, strict=True):
            earlier = len(keys) - len(queries)  # of all queries: the mask is causal at its lower right
            for place, query in enumerate(share.own_O[queries].tolist(), start=1):
                seen[query] = keys[: earlier + place].tolist()
    assert sorted(seen) == sorted(share.own_O.tolist())
    for query, keys in seen.items():
        first = max(start for start in starts if start <= query)
        assert keys == list(range(first, query + 1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_attention_over_a_shared_row_is_that_of_each_sequence(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, generator = [12, 6, 30, 12], torch.Generator().manual_seed(0)
    row = packed_sequences(lengths, CPU)
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: rank)
    share = share_over_context(row, group)
    query, key, value = (torch.randn(sum(lengths), heads, 4, generator=generator) for heads in (4, 2, 2))
    held = torch.cat([held_positions(row.cu_seqlens_q, rank=r, size=3) for r in range(3)])
    everyone = torch.cat([key, value], -1)[held]
    monkeypatch.setattr(context, "gather_from_sequence_parallel_region", lambda *_, **__: everyone)
    own = share.own_O
    got = attend(query[own], key[own], value[own], share, scale=0.3, group=group)
    parts = [x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)]
    expected = [
        functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True)
        for q, k, v in zip(*parts, strict=True)
    ]
    together = torch.cat([one[0].transpose(0, 1).flatten(1) for one in expected])
    assert torch.allclose(got, together[own], atol=1e-6)


def test_a_shared_row_is_described_in_memory_of_its_length() -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    share = share_over_context(packed_sequences([4096, 512], CPU), group)
    held = sum(batch.queries_NL.numel() + batch.keys_NK.numel() for batch in share.context_batches)
    assert held < 3 * (4096 + 512)


def test_pads_are_marked_within_sequences_and_after_them() -> None:
    row = packed_sequences([4, 2, 3], CPU, unpadded=[3, 2])
    assert row.pads_1T.tolist() == [[False, False, False, True, False, False, True, True, True]]
    assert not packed_sequences([4, 2], CPU).pads_1T.any()


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.calls = 0

    def forward(self, hidden_states: Tensor, bias: float) -> tuple[Tensor, None]:
        self.calls += 1
        return (hidden_states * self.weight).square() + bias, None


def test_a_layer_is_computed_again_in_the_backward_pass() -> None:
    plain, layer = _Layer(), _Layer()
    recompute_in_backward(layer)
    gradients = []
    for module in (plain, layer):
        x = torch.tensor([1.5, -0.5], requires_grad=True)
        module(hidden_states=x, bias=1.0)[0].sum().backward()
        gradients.append((x.grad, module.weight.grad))
    assert (plain.calls, layer.calls) == (1, 2)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    with torch.no_grad():
        layer(hidden_states=torch.ones(2), bias=1.0)
    assert layer.calls == 3


def test_pads_and_evaluation_are_not_counted() -> None:
    told: list[Any] = []
    router: Any = SimpleNamespace(
        weight=torch.zeros(3, 1), _apply_expert_bias=lambda chosen, padding_mask: told.append(padding_mask)
    )
    count = _TokenCount(router)
    chosen_TE = torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    pads_T = torch.tensor([False, True, False])
    count(chosen_TE, padding_mask=pads_T)
    assert count.tokens_E.tolist() == [1, 2, 1]
    assert torch.equal(told[0], pads_T[:, None])
    with torch.no_grad():
        count(chosen_TE, padding_mask=pads_T)
    count(chosen_TE)
    assert count.tokens_E.tolist() == [3, 4, 3]


def test_a_norm_equals_that_of_torch_and_keeps_only_its_input() -> None:
    config: Any = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)
    norm = RMSNorm(config, 24, eps=1e-6)
    x = torch.randn(7, 3, 24, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        own = norm(x)
    expected = functional.rms_norm(x, (24,), norm.weight, 1e-6)
    assert torch.equal(own, expected)
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() == x.numel()] == [x.data_ptr()]
    grad = torch.randn_like(x)
    for got, wanted in zip(
        *(torch.autograd.grad(output, (x, norm.weight), grad) for output in (own, expected)), strict=True
    ):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
