"""Nemotron-H as the policy, against transformers: log-probabilities, packing without leaks, steps, export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import exported, load_case, local_ray, policy_logprobs, reference_logprobs, running, save_hybrid
from random_batch import random_batch

from recipes.cluster.token_store import RayTokenStore

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="latent"),
        pytest.param({"moe_latent_size": None}, id="plain", marks=pytest.mark.slow),
        pytest.param({"n_groups": 1}, id="one Mamba group", marks=pytest.mark.slow),
        pytest.param(
            {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 16}, id="expert groups"
        ),
    ],
)
def test_logprobs_and_export_agree_with_transformers(tmp_path: Path, sizes: dict[str, Any]) -> None:
    model = save_hybrid(tmp_path / "model", **sizes)
    batch = random_batch(9, RayTokenStore())
    with running(load_case(model, generation__temperature=0.7, logprob_chunk_size=16)) as policy:
        before = policy_logprobs(policy, batch)
        policy.train(batch)
        after = policy_logprobs(policy, batch)
        exported(policy, tmp_path / "hf")
    assert torch.allclose(before, reference_logprobs(model, batch, RayTokenStore(), temperature=0.7), atol=2e-5, rtol=0)
    assert torch.allclose(
        after, reference_logprobs(tmp_path / "hf", batch, RayTokenStore(), temperature=0.7), atol=2e-5, rtol=0
    )
    assert (after - before).abs().max() > 1e-3
