"""One policy rank through its real Ray actor, against transformers and against itself after a save and a restart."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import (
    exported,
    load_case,
    local_ray,
    lost_reference,
    policy_logprobs,
    reference_logprobs,
    running,
    save_model,
)
from random_batch import random_batch
from safetensors.torch import load_file
from speed import patiently

from recipes.cluster.token_store import RayTokenStore
from recipes.errors import CheckpointError, ConfigError, RunError, TokensLostError
from recipes.files import FileSum, sha256_of
from recipes.grpo.loss import grpo_loss
from recipes.policy.policy import Policy

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {}),
        ("llama", {"tied": True}),
        ("qwen2", {}),
        pytest.param("mistral", {"sliding_window": None}, marks=pytest.mark.slow),
    ],
)
def test_logprobs_and_export_agree_with_transformers(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    model = save_model(tmp_path / "model", family=family, **sizes)
    batch = random_batch(9, RayTokenStore())
    config = load_case(model, generation__temperature=0.7, logprob_chunk_size=16)
    with running(config) as policy:
        before = policy_logprobs(policy, batch)
        policy.train(batch)
        after = policy_logprobs(policy, batch)
        exported(policy, tmp_path / "hf")
    assert torch.allclose(before, reference_logprobs(model, batch, RayTokenStore(), temperature=0.7), atol=2e-5, rtol=0)
    assert torch.allclose(
        after, reference_logprobs(tmp_path / "hf", batch, RayTokenStore(), temperature=0.7), atol=2e-5, rtol=0
    )
    assert (after - before).abs().max() > 1e-3  # the step moved the model, so the second check is not the first


def test_a_batch_whose_tokens_are_lost_trains_nothing(tmp_path: Path) -> None:
    config = load_case(save_model(tmp_path / "model"))
    whole = random_batch(8, RayTokenStore())
    lost = replace(whole, tokens=(*whole.tokens[:-1], lost_reference()))
    with running(config, num_ranks=2) as policy:
        before = policy_logprobs(policy, whole)
        with pytest.raises(TokensLostError, match="cannot be read from the object store"):
            policy.train(lost)
        assert torch.equal(policy_logprobs(policy, whole), before)
        policy.train(whole)  # the same ranks go on
        assert not torch.equal(policy_logprobs(policy, whole), before)


def test_rows_without_packing_give_the_same_logprobs(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    batch = random_batch(8, RayTokenStore())
    config = load_case(model, sequence_packing__enabled="false", logprob_batch_size=3)
    with running(config) as policy:
        got = policy_logprobs(policy, batch)
    assert torch.allclose(got, reference_logprobs(model, batch, RayTokenStore()), atol=2e-5, rtol=0)


def test_tied_export_is_bit_equal_after_a_round_trip(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tied=True)
    with running(load_case(model)) as policy:
        policy.train(random_batch(8, RayTokenStore()))
        first = exported(policy, tmp_path / "first")
        layout = policy.weight_layout()
        policy.send_weights()
        raw = Path(layout.path).read_bytes()
    with running(load_case(tmp_path / "first")) as policy:
        second = exported(policy, tmp_path / "second")
    assert "lm_head.weight" not in first
    assert first.keys() == second.keys() == set(layout.names)
    for name, dtype, shape, offset in zip(layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True):
        assert torch.equal(first[name], second[name]), name
        assert (dtype, shape) == ("float32", tuple(first[name].shape))
        assert raw[offset : offset + 4 * first[name].numel()] == first[name].numpy().tobytes(), name
    assert not Path(layout.path).exists()


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    config = load_case(save_model(tmp_path / "model"))  # the learning rate goes from 1e-4 to 1e-3 in two steps
    batches = [random_batch(8, RayTokenStore(), seed=seed) for seed in range(4)]
    with running(config) as policy:
        rates = [policy.train(batch)["lr"] for batch in batches[:2]]
        policy.save(tmp_path / "checkpoint")
        straight_metrics = [policy.train(batch) for batch in batches[2:]]
        straight = exported(policy, tmp_path / "straight")
    with running(config) as policy:
        policy.load(tmp_path / "checkpoint")
        resumed_metrics = [policy.train(batch) for batch in batches[2:]]
        resumed = exported(policy, tmp_path / "resumed")
    assert rates + [metrics["lr"] for metrics in resumed_metrics] == pytest.approx([1e-4, 5.5e-4, 1e-3, 1e-3])
    assert resumed_metrics == straight_metrics
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


@pytest.mark.parametrize("is_distributed", ["true", "false"])
def test_training_does_not_change_a_snapshot_that_is_written_later(tmp_path: Path, is_distributed: str) -> None:
    script = Path(__file__).with_name("snapshot_case.py")
    command = [sys.executable, str(script), str(tmp_path), is_distributed]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patiently(300))
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_step_without_finite_gradients_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    config = load_case(save_model(tmp_path / "model"))
    bad, good = (random_batch(8, RayTokenStore(), seed=seed) for seed in range(2))
    advantages = bad.advantages_B.clone()
    advantages[next(row for row, kept in enumerate(bad.sample_mask_B.tolist()) if kept)] = torch.inf
    with running(config, num_ranks=2) as policy:
        policy.train(good)
        before = policy_logprobs(policy, good)
        skipped = policy.train(replace(bad, advantages_B=advantages))
        assert torch.equal(policy_logprobs(policy, good), before)
        trained = policy.train(good)
    assert (skipped["skipped_steps"], trained["skipped_steps"]) == (1.0, 0.0)
    assert not math.isfinite(skipped["grad_norm"])
    assert trained["lr"] == skipped["lr"], "the schedule counts steps that were taken"
    assert math.isfinite(trained["grad_norm"])


def test_a_save_while_training_goes_on_is_the_state_at_its_beginning(tmp_path: Path) -> None:
    config = load_case(save_model(tmp_path / "model"))
    batches = [random_batch(8, RayTokenStore(), seed=seed) for seed in range(3)]
    with running(config) as policy:
        policy.train(batches[0])
        before = exported(policy, tmp_path / "before")
        (tmp_path / "speed").mkdir()
        assert 0 < policy.expected_save_seconds(tmp_path / "speed") < patiently(60)
        assert list((tmp_path / "speed").iterdir()) == []
        with pytest.raises(RunError, match=r"policy rank 0 cannot write to .*/nowhere: FileNotFoundError"):
            policy.expected_save_seconds(tmp_path / "nowhere")
        policy.begin_save(tmp_path / "checkpoint", tmp_path / "hf")
        straight_metrics = [policy.train(batch) for batch in batches[1:]]
        while not policy.is_save_written():
            time.sleep(0.02)
        _, sums = policy.finish_save()
        files = [tmp_path / "checkpoint" / "__0_0.distcp", tmp_path / "hf" / "model.safetensors"]
        assert sums == {file: FileSum(sha256_of(file), file.stat().st_size) for file in files}
        assert policy.sha256s([*files, tmp_path / "nothing"]) == [*(sums[file].sha256 for file in files), None]
    copied = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == copied.keys() and all(torch.equal(copied[name], before[name]) for name in before)
    with running(config) as policy:
        policy.load(tmp_path / "checkpoint")
        assert [policy.train(batch) for batch in batches[1:]] == straight_metrics


@pytest.mark.parametrize("is_distributed", ["true", "false"])
def test_save_before_the_first_step_is_a_start(tmp_path: Path, is_distributed: str) -> None:
    config = load_case(
        save_model(tmp_path / "model"),
        megatron_cfg__optimizer__use_distributed_optimizer=is_distributed,
        megatron_cfg__distributed_data_parallel_config__overlap_param_gather=is_distributed,
    )
    batches = [random_batch(8, RayTokenStore(), seed=seed) for seed in range(3)]
    with running(config) as policy:
        policy.save(tmp_path / "checkpoint")
        straight_metrics = [policy.train(batch) for batch in batches]
        straight = exported(policy, tmp_path / "straight")
    with running(config) as policy:
        policy.train(batches[2])  # what was trained here is forgotten, the count of steps, too
        policy.load(tmp_path / "checkpoint")
        resumed_metrics = [policy.train(batch) for batch in batches]
        resumed = exported(policy, tmp_path / "resumed")
    assert resumed_metrics == straight_metrics
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_what_is_saved_without_the_optimizer_goes_on_with_the_weights_and_the_schedule(tmp_path: Path) -> None:
    config = load_case(save_model(tmp_path / "model"))
    batch = random_batch(8, RayTokenStore())
    sizes = {}
    with running(config) as policy:
        policy.train(batch)
        policy.train(batch)
        for name, is_whole in (("whole", True), ("weights", False)):
            policy.save(tmp_path / name, with_optimizer=is_whole)
            sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
        saved = torch.cat(policy.logprobs(batch))
        policy.train(batch)
        policy.load(tmp_path / "weights")  # over a later state
        again = torch.cat(policy.logprobs(batch))
        rate = policy.train(batch)["lr"]
        after = torch.cat(policy.logprobs(batch))
    assert sizes["weights"] < sizes["whole"] / 2  # two moments of each weight are left out
    assert torch.equal(again, saved)
    assert rate == pytest.approx(1e-3)  # the third step of the schedule
    assert (after - again).abs().max() > 1e-4


def test_two_optimizer_steps_on_one_batch_learn_with_the_clip_live(tmp_path: Path) -> None:
    model, batch = save_model(tmp_path / "model"), random_batch(8, RayTokenStore())
    schedule = {"megatron_cfg__scheduler__lr_warmup_iters": 0, "megatron_cfg__optimizer__lr": 3e-3}
    config = load_case(model, **schedule)
    halves = replace(config.policy, train_global_batch_size=4)
    clipped = replace(config.loss_fn, force_on_policy_ratio=False)
    with running(replace(config, policy=halves, loss_fn=clipped)) as policy:
        before = policy.logprobs(batch)
        both = policy.train(batch)
        after = policy.logprobs(batch)
    with running(config) as policy:
        one = policy.train(batch)
    assert one["probs_ratio_min"] == one["probs_ratio_max"] == 1.0
    # The second step sees the weights after the first, and compares them with those before it.
    assert both["probs_ratio_min"] < 0.8 < both["probs_ratio_clamped_min"] + 1e-3
    assert both["probs_ratio_max"] > 1.28 > both["probs_ratio_clamped_max"] - 1e-3
    assert both["global_valid_toks"] == one["global_valid_toks"]
    gains = [float((new - old).mean()) for new, old in zip(after, before, strict=True)]
    signs = batch.advantages_B.sign().tolist()
    kept = [n for n, weight in enumerate(batch.sample_mask_B.tolist()) if weight]
    assert sum(gains[n] * signs[n] for n in kept) > 0


def test_wrong_inputs_keep_their_own_error(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    config = load_case(model, megatron_cfg__pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match="= 2, expected a divisor of 3"):
        Policy.start(
            config.policy,
            loss=partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None),
            placement=[{}, {}, {}],
            deadlines=config.deadlines,
            seed=1,
        )
    empty = tmp_path / "empty"
    empty.mkdir()
    with (
        running(load_case(model)) as policy,
        pytest.raises(CheckpointError, match=r"metadata\.json is missing"),
    ):
        policy.load(empty)
