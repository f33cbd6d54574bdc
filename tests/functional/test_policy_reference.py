"""The KL to the reference policy through real ranks: what it is measured against, and that it pulls back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import exported, load_case, local_ray, reference_logprobs, running, save_model
from random_batch import random_batch

from recipes.config.tree import Config
from recipes.types import TrainBatch

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


def penalised(model: Path, penalty: float, **overrides: Any) -> Config:
    config = load_case(model, **overrides)
    loss = replace(config.loss_fn, reference_policy_kl_penalty=penalty, use_on_policy_kl_approximation=False)
    return replace(config, loss_fn=loss)


def divergence(current_BS: torch.Tensor, start_BS: torch.Tensor, batch: TrainBatch) -> float:
    """The k3 estimate of the KL, written out: the mean over the tokens in the loss."""
    mask_BS = batch.token_mask_BS * batch.sample_mask_B[:, None]
    d_BS = (start_BS - current_BS) * mask_BS
    return float(((d_BS.exp() - 1 - d_BS) * mask_BS).sum() / mask_BS.sum())


def test_the_reference_is_what_the_stage_started_from_also_after_a_resume(tmp_path: Path) -> None:
    model, batch = save_model(tmp_path / "model"), random_batch(8)
    config = penalised(model, 0.5)
    start_BS = reference_logprobs(model, batch)
    with running(config) as policy:
        first = policy.train(batch)
        policy.train(batch)
        policy.save(tmp_path / "checkpoint")
    assert first["kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    idle = replace(batch, advantages_BS=torch.zeros_like(batch.advantages_BS))
    distances, penalties = [], []
    with running(config) as policy:
        policy.load(tmp_path / "checkpoint")
        for _ in range(20):
            distances.append(divergence(policy.logprobs(batch), start_BS, batch))
            penalties.append(policy.train(idle)["kl_penalty"])
    assert penalties == pytest.approx(distances, rel=1e-3)
    assert distances[0] > 1e-4  # the policy had left the reference, and without any advantage it only comes back
    assert distances[-1] < max(distances) / 4  # the momentum of the steps before it carries it on for a while


def test_the_penalty_bounds_the_drift_and_nothing_else(tmp_path: Path) -> None:
    """At the start weights the KL and its gradient are exactly 0, so the first step is that without a penalty."""
    model, batch = save_model(tmp_path / "model"), random_batch(8)
    start_BS = reference_logprobs(model, batch)
    drift, first = {}, {}
    for penalty in (0.0, 2.0):
        with running(penalised(model, penalty)) as policy:
            policy.train(batch)
            first[penalty] = exported(policy, tmp_path / str(penalty))
            for _ in range(7):
                policy.train(batch)
            drift[penalty] = divergence(policy.logprobs(batch), start_BS, batch)
    assert 0 < drift[2.0] < drift[0.0] / 2
    assert all(torch.equal(first[2.0][name], tensor) for name, tensor in first[0.0].items())


def test_positive_examples_become_more_likely(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    batch = random_batch(8)
    rows_B = torch.zeros(8)
    rows_B[1] = 1.0
    batch = replace(batch, advantages_BS=torch.zeros_like(batch.advantages_BS), nll_weight_B=rows_B)
    with running(load_case(model)) as policy:
        before_BS = policy.logprobs(batch)
        metrics = [policy.train(batch)["positive_nll_loss"] for _ in range(3)]
        after_BS = policy.logprobs(batch)
    mask_BS = batch.token_mask_BS
    means_B = [(logprobs_BS * mask_BS).sum(dim=1) / mask_BS.sum(dim=1) for logprobs_BS in (before_BS, after_BS)]
    assert metrics[0] == pytest.approx(-float(means_B[0][1]), rel=1e-4)
    assert metrics == sorted(metrics, reverse=True)
    assert means_B[1][1] > means_B[0][1] + 0.1
