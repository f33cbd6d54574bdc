"""A policy of several ranks: equal to transformers, saved under one layout and loaded under another, a rank lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import (
    GRADIENT_SCALE,
    exported,
    load_case,
    local_ray,
    policy_logprobs,
    running,
    save_model,
    showing_gradients,
)
from random_batch import batch_of, padded, random_batch, random_rollouts
from speed import patiently
from torch import Tensor
from transformers import AutoModelForCausalLM

from recipes.cluster.token_store import RayTokenStore
from recipes.errors import CheckpointError, PolicyError
from recipes.grpo.loss import grpo_loss
from tests.groups import LocalStore

pytestmark = pytest.mark.functional

_TENSOR = {"megatron_cfg__tensor_model_parallel_size": 2}
_SEQUENCE = _TENSOR | {"megatron_cfg__sequence_parallel": "true"}
_OVERLAP = {
    "megatron_cfg__distributed_data_parallel_config__overlap_grad_reduce": "true",
    "megatron_cfg__distributed_data_parallel_config__overlap_param_gather": "true",
}
_ANY_LAYOUT = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one training step did."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    logprobs: Tensor


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return _step(model, tmp_path_factory.mktemp("one"), num_ranks=1)


def _step(model: Path, directory: Path, *, num_ranks: int, **overrides: Any) -> Outcome:
    batch = random_batch(10, RayTokenStore())
    with running(showing_gradients(load_case(model, **overrides)), num_ranks=num_ranks) as policy:
        logprobs = policy_logprobs(policy, batch)
        before = exported(policy, directory / "before")
        metrics = policy.train(batch)
        after = exported(policy, directory / "after")
    gradients = {name: (before[name] - after[name]) / GRADIENT_SCALE for name in before}
    return Outcome(metrics=metrics, gradients=gradients, logprobs=logprobs)


def _relative_errors(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert gradients.keys() == expected.keys()
    return {
        name: ((gradients[name] - tensor).abs().max() / tensor.abs().max()).item() for name, tensor in expected.items()
    }


def test_one_rank_equals_transformers(model: Path, one_rank: Outcome) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rollouts = random_rollouts(10)
    ids_BS, inputs = padded(rollouts, batch_of(rollouts, LocalStore()))
    scores = (
        reference(ids_BS).logits[:, :-1].log_softmax(-1)
    )  # causal: the pads on the right change nothing before them
    current_BT = scores.gather(-1, ids_BS[:, 1:, None])[..., 0]
    inputs = replace(inputs, prev_logprobs_BT=current_BT.detach())
    sums = grpo_loss(current_BT, inputs, cfg=load_case(model).loss_fn, mismatch_threshold=None)
    loss = sums.loss / sums.count
    loss.backward()
    expected = {name: param.grad for name, param in reference.named_parameters()}
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    assert one_rank.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert one_rank.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    errors = _relative_errors(one_rank.gradients, expected)
    assert max(errors.values()) < 1e-5, errors


def test_a_tensor_parallel_checkpoint_continues_on_one_rank(model: Path, tmp_path: Path) -> None:
    first, second = random_batch(8, RayTokenStore(), seed=1), random_batch(8, RayTokenStore(), seed=2)
    with running(load_case(model, **_SEQUENCE), num_ranks=2) as policy:
        policy.train(first)
        policy.save(tmp_path / "usual")
    with running(load_case(model, **_SEQUENCE, **_ANY_LAYOUT), num_ranks=2) as policy:
        policy.load(tmp_path / "usual")
        policy.save(tmp_path / "checkpoint")
        saved = exported(policy, tmp_path / "saved")
        metrics = policy.train(second)
    with running(load_case(model)) as policy:
        with pytest.raises(CheckpointError, match=r"tensor_model_parallel_size: got 1, expected 2, as when .*usual"):
            policy.load(tmp_path / "usual")
        policy.load(tmp_path / "checkpoint")
        loaded = exported(policy, tmp_path / "loaded")
        assert policy.train(second) == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("form", [{}, _ANY_LAYOUT], ids=["usual", "any-layout"])
def test_a_checkpoint_of_two_data_parallel_ranks_continues_on_one(
    model: Path, tmp_path: Path, form: dict[str, str]
) -> None:
    first, second = random_batch(8, RayTokenStore(), seed=1), random_batch(8, RayTokenStore(), seed=2)
    with running(load_case(model, **_OVERLAP, **form), num_ranks=2) as policy:
        policy.train(first)
        policy.save(tmp_path / "checkpoint")
        policy.load(tmp_path / "checkpoint")
        saved = exported(policy, tmp_path / "saved")
        metrics = policy.train(second)
    written = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.distcp"))
    assert len({name.split("_")[2] for name in written}) == 2, "both ranks write"
    with running(load_case(model, **_OVERLAP)) as policy:
        policy.load(tmp_path / "checkpoint")
        loaded = exported(policy, tmp_path / "loaded")
        assert policy.train(second) == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_dead_rank_is_named_at_once(model: Path) -> None:
    with running(load_case(model), num_ranks=2, train=60.0) as policy:
        batch = random_batch(8, RayTokenStore())
        policy.train(batch)
        path = Path(policy.weight_layout().path)
        victim = policy.pids()[1]
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PolicyError, match=rf"rank 1 \(pid {victim} on node [0-9a-f]+"):
            policy.train(batch)
        assert time.monotonic() - began < patiently(30.0)
    assert not path.exists()


def test_a_late_rank_is_named_within_the_deadline(model: Path) -> None:
    with running(load_case(model), num_ranks=2, train=10.0) as policy:
        batch = random_batch(8, RayTokenStore())
        policy.train(batch)
        stopped = policy.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PolicyError, match=rf"no answer within 10 s from .*rank 1 \(pid {stopped}"):
            policy.train(batch)
        assert time.monotonic() - began < patiently(15.0)
