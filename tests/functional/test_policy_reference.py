"""The KL to the reference policy through real ranks: what it is measured against, and that it pulls back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import (
    exported,
    load_case,
    local_ray,
    loss_mask,
    policy_logprobs,
    reference_logprobs,
    running,
    save_model,
)
from random_batch import random_batch

from recipes.cluster.token_store import RayTokenStore
from recipes.config.tree import Config
from recipes.types import NUM_FLAGS, TrainBatch

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


def penalised(model: Path, penalty: float, **overrides: Any) -> Config:
    config = load_case(model, **overrides)
    loss = replace(config.loss_fn, reference_policy_kl_penalty=penalty, use_on_policy_kl_approximation=False)
    return replace(config, loss_fn=loss)


def divergence(current: torch.Tensor, start: torch.Tensor, batch: TrainBatch) -> float:
    """The k3 estimate of the KL, written out: the mean over the tokens in the loss."""
    mask = loss_mask(batch, RayTokenStore())
    d = (start - current) * mask
    return float(((d.exp() - 1 - d) * mask).sum() / mask.sum())


def without_advantages(batch: TrainBatch, **values: Any) -> TrainBatch:
    zeros_B = torch.zeros_like(batch.advantages_B)
    return replace(batch, advantages_B=zeros_B, flag_advantages=(None,) * NUM_FLAGS, **values)


def test_the_reference_is_what_the_stage_started_from_also_after_a_resume(tmp_path: Path) -> None:
    model, batch = save_model(tmp_path / "model"), random_batch(8, RayTokenStore())
    config = penalised(model, 0.5)
    start = reference_logprobs(model, batch, RayTokenStore())
    with running(config) as policy:
        first = policy.train(batch)
        policy.train(batch)
        policy.save(tmp_path / "checkpoint")
    assert first["kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    idle = without_advantages(batch)
    distances, penalties = [], []
    with running(config) as policy:
        policy.load(tmp_path / "checkpoint")
        for _ in range(20):
            distances.append(divergence(policy_logprobs(policy, batch), start, batch))
            penalties.append(policy.train(idle)["kl_penalty"])
    assert penalties == pytest.approx(distances, rel=1e-3)
    assert distances[0] > 1e-4  # the policy had left the reference, and without any advantage it only comes back
    assert distances[-1] < max(distances) / 4  # the momentum of the steps before it carries it on for a while


def test_the_penalty_bounds_the_drift_and_nothing_else(tmp_path: Path) -> None:
    """At the start weights the KL and its gradient are exactly 0, so the first step is that without a penalty."""
    model, batch = save_model(tmp_path / "model"), random_batch(8, RayTokenStore())
    start = reference_logprobs(model, batch, RayTokenStore())
    drift, first = {}, {}
    for penalty in (0.0, 2.0):
        with running(penalised(model, penalty)) as policy:
            policy.train(batch)
            first[penalty] = exported(policy, tmp_path / str(penalty))
            for _ in range(7):
                policy.train(batch)
            drift[penalty] = divergence(policy_logprobs(policy, batch), start, batch)
    assert 0 < drift[2.0] < drift[0.0] / 2
    assert all(torch.equal(first[2.0][name], tensor) for name, tensor in first[0.0].items())


def test_a_kl_in_the_reward_is_that_of_the_weights_before_the_step_and_bounds_the_drift(tmp_path: Path) -> None:
    """With k1 a token that has become more likely than at the start loses advantage, and one that is less likely gains.

    The sums over the batch are those of both ranks.
    """
    model, batch = save_model(tmp_path / "model"), random_batch(8, RayTokenStore())
    start, mask = reference_logprobs(model, batch, RayTokenStore()), loss_mask(batch, RayTokenStore())
    drift = {}
    for penalty in (1e-6, 5.0):
        config = penalised(model, penalty)
        loss = replace(config.loss_fn, use_kl_in_reward=True, reference_policy_kl_type="k1")
        with running(replace(config, loss_fn=loss), num_ranks=2) as policy:
            assert policy.train(batch)["kl_in_reward"] == pytest.approx(0.0, abs=1e-5)
            for _ in range(6):
                policy.train(batch)
            gap = (policy_logprobs(policy, batch) - start) * mask
            drift[penalty] = float(gap.abs().sum() / mask.sum())
            metrics = policy.train(batch)
        assert metrics["kl_in_reward"] == pytest.approx(float(gap.sum() / mask.sum()), rel=1e-3, abs=1e-4)
        assert "kl_penalty" not in metrics, "it would count twice"
        assert metrics["token_advantages_min"] < 0 < metrics["token_advantages_max"]
    assert 0 < drift[5.0] < 0.85 * drift[1e-6]  # measured: 0.94 and 1.38 nats


def test_positive_examples_become_more_likely(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    batch = random_batch(8, RayTokenStore())
    weights_B = torch.zeros(8)
    weights_B[1] = 1.0
    batch = without_advantages(batch, nll_weight_B=weights_B)
    with running(load_case(model)) as policy:
        before = policy.logprobs(batch)[1]
        metrics = [policy.train(batch)["positive_nll_loss"] for _ in range(3)]
        after = policy.logprobs(batch)[1]
    mask = torch.split(loss_mask(batch, RayTokenStore()) > 0, batch.lengths_B.tolist())[1]
    assert metrics[0] == pytest.approx(-float(before[mask].mean()), rel=1e-4)
    assert metrics == sorted(metrics, reverse=True)
    assert after[mask].mean() > before[mask].mean() + 0.1
