"""Model families: one object each, and no model's name anywhere else in the policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipes.config.keys.native import ARCHITECTURES
from recipes.policy.families import mapping
from recipes.policy.families.family import FAMILIES, family_of
from recipes.policy.families.mapping import Sharding

POLICY = Path(__file__).resolve().parents[3] / "recipes" / "policy"
CONFIG = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=6)


def test_the_launcher_and_the_policy_know_the_same_architectures() -> None:
    assert tuple(name for family in FAMILIES for name in family.architectures) == ARCHITECTURES
    assert family_of("OtherModel") is None


def test_only_families_know_a_models_name() -> None:
    named = re.compile(r"qwen|nemotron|llama|mistral|lm_head|embed_tokens", re.IGNORECASE)
    others = [path for path in POLICY.rglob("*.py") if path.parent.name != "families"]
    assert others
    assert not [path.name for path in others if named.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("sharding", "rows", "columns"),
    [
        (Sharding.QKV, (24, 12, 12), (24,)),
        (Sharding.QKV, (24, 12, 12), ()),  # biases
        (Sharding.GATE_UP, (8, 8), (24,)),
        (Sharding.ROWS, (8,), (24,)),
        (Sharding.COLUMNS, (8,), (24,)),
        (Sharding.REPLICATED, (8,), (24,)),
    ],
)
def test_shards_join_to_what_was_split(
    sharding: Sharding, rows: tuple[int, ...], columns: tuple[int, ...], size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(count, *columns, generator=generator) for count in rows]
    shards: list[Tensor] = [mapping.split(sharding, full, CONFIG, size=size, rank=rank) for rank in range(size)]
    joined = mapping.join(sharding, shards[:1] if sharding is Sharding.REPLICATED else shards, CONFIG)
    assert [torch.equal(got, want) for got, want in zip(joined, full, strict=True)] == [True] * len(full)
    if sharding is not Sharding.REPLICATED:
        assert sum(shard.numel() for shard in shards) == sum(tensor.numel() for tensor in full)
