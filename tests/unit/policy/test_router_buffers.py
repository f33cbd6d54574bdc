"""The buffers of the routers: float32 in a rounded model, and biases that a skipped step leaves as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import add_heads
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_hybrid

from recipes.policy import hf, step
from recipes.policy.model import build_heads, build_model, transformer_config
from recipes.policy.shards import merge_optimizer_steps

_MORE_THAN_16_BITS_COUNT = 700


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_heads(save_hybrid(tmp_path_factory.mktemp("hybrid") / "model"))


def routers(trainer: step.Trainer) -> list[Any]:
    modules = [*trainer.model.modules(), *(() if trainer.heads is None else trainer.heads.modules())]
    return [module for module in modules if hasattr(module, "local_tokens_per_expert")]


def test_tokens_are_counted_exactly_in_a_rounded_model(model: Path) -> None:
    values: dict[str, Any] = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}
    config = load_case(model, **values, megatron_cfg__mtp_num_layers=2)
    with one_rank(config):
        found = routers(trainer_of(config))
        one_token = torch.zeros(1, 8, dtype=torch.bool)
        one_token[0, 3] = True
        for router in found:
            for _ in range(_MORE_THAN_16_BITS_COUNT):
                router._apply_expert_bias(one_token)
    counts = [router.local_tokens_per_expert.tolist() for router in found]
    assert len(counts) > 2 and all(own == [0, 0, 0, _MORE_THAN_16_BITS_COUNT, 0, 0, 0, 0] for own in counts)


def test_tokens_are_counted_on_the_device_of_the_routers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron makes their weights on the CPU, also where the model is built for another device."""
    policy = load_case(model).policy
    elsewhere = torch.device("meta")
    with one_rank(load_case(model)):
        monkeypatch.setattr("recipes.policy.model.device", lambda: elsewhere)
        hf_config, family = hf.read_config(model)
        config = transformer_config(family, hf_config, policy)
        built = build_model(family, hf_config, config, policy), build_heads(family, hf_config, config)
        found = [m for part in built for m in part.modules() if hasattr(m, "local_tokens_per_expert")]
    assert len(found) > 2
    assert all(router.weight.device == router._apply_expert_bias.tokens_E.device == elsewhere for router in found)


def test_a_skipped_step_leaves_the_biases_and_says_nothing_of_the_heads(model: Path) -> None:
    config = load_case(model, megatron_cfg__mtp_num_layers=2)
    good, bad = shard_of(0), shard_of(1, advantages_B=torch.full((4,), torch.inf))
    with one_rank(config):
        trainer = trainer_of(config)
        start = [router.expert_bias.clone() for router in routers(trainer)]
        taken = step.train_step(trainer, good)
        before = [router.expert_bias.clone() for router in routers(trainer)]
        skipped = step.train_step(trainer, bad)
        after = [router.expert_bias.clone() for router in routers(trainer)]
    assert (taken["skipped_steps"], skipped["skipped_steps"]) == (0.0, 1.0)
    assert not any(torch.equal(*pair) for pair in zip(start, before, strict=True))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert skipped["mtp/grad_norm"] == (0.0, 0.0)
    assert merge_optimizer_steps([taken, skipped])["mtp/grad_norm"] == taken["mtp/grad_norm"]
