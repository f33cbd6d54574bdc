"""Rows laid end to end and back, and attention that keeps sequences of a row apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from recipes.policy.layers.attention import CoreAttention
from recipes.policy.layers.packed import packed_sequences
from recipes.policy.microbatch import pack_microbatch


def test_rows_are_padded_labelled_and_found_again() -> None:
    ids = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]
    packed = pack_microbatch(ids, [0, 2], multiple=2, row_multiple=4, where=torch.device("cpu"))

    assert packed.tokens_1T.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert packed.labels_1T.tolist() == [[2, 3, 0, 0, 5, 0, 0, 0]]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 4, 6, 8]
    per_token_1T = torch.arange(8.0)[None] + 10
    assert packed.unpack(per_token_1T).tolist() == [[10.0, 11.0], [14.0, 0.0]]
    assert packed.real_BS.tolist() == [[True, True], [True, False]]
    values = [np.array([9.0, 1.0, 2.0], np.float32), np.array([9.0, 3.0], np.float32)]
    assert packed.align(values).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_rows_of_one_token_have_nothing_to_predict() -> None:
    packed = pack_microbatch([np.zeros(1, np.int32)] * 2, [0, 1], multiple=4, row_multiple=1, where=torch.device("cpu"))
    assert packed.tokens_1T.shape == (1, 8)
    assert packed.unpack(torch.zeros(1, 8)).shape == packed.align([np.zeros(1, np.float32)] * 2).shape == (2, 0)


@pytest.mark.parametrize("lengths", [[7, 1, 30, 12, 11, 29, 3], [5, 5, 5], [9], [3, 4]])
def test_attention_equals_one_call_per_sequence(lengths: list[int]) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2)
    attention = CoreAttention(config, 1, None, "self", softmax_scale=0.3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), heads, 4, generator=generator) for heads in (4, 2, 2))

    got = attention(query, key, value, None, packed_sequences(lengths, torch.device("cpu")))

    expected = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", functional.softmax(scores, dim=-1), v).flatten(1))
    assert torch.allclose(got, torch.cat(expected), atol=1e-6)


def test_similar_lengths_share_a_call() -> None:
    sequences = packed_sequences([40, 10, 39, 9, 31, 8], torch.device("cpu"))
    assert [tuple(batch.index_NL.shape) for batch in sequences.batches] == [(3, 40), (3, 10)]
