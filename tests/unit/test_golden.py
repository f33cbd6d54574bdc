"""The maths against numbers recorded from the reference implementation.

Cases that are deliberately different, or whose option does not exist here, are listed by name with the reason and
are still run: a listed case that starts to pass fails the test, so that the lists stay true.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.environments.chat.tool_calls import FlagPatterns, turn_flags
from recipes.grpo.advantage import (
    advantages_of_flags,
    estimate_advantages,
    group_baseline,
    rollout_advantages,
    subtract_group_mean,
    subtract_kl,
    whitening,
)
from recipes.grpo.batch import sample_masks
from recipes.grpo.loss import grpo_loss, kl_estimate, mask_mismatched, sampled_kl
from recipes.policy.shards import merge_step_metrics
from recipes.tokens import pack_rollouts
from recipes.types import LossInputs, PolicyRow, Rollout, RolloutStatus, Turn
from tests.configuration import block
from tests.recorded import cases

# The reference broadcasts [B, 1] against [B] here and logs a sum; ours is the mean over tokens.
DIFFERENT_METRICS = {("gspo", "sampling_importance_ratio"), ("gspo_no_is", "sampling_importance_ratio")}
# The reference reports 0 where no such term is computed; here the metric is absent.
NOT_COMPUTED = ("kl_penalty", "positive_nll_loss", "is_oob_ratio")
# Options that no stage of this recipe has: named here so that nobody believes they are covered.
NOT_BUILT = {
    "dynamic_batching.json": "policy.dynamic_batching is off in every stage and refused",
    "replay_buffer_traces.json": "our buffer orders groups by target and regenerates what is lost; see grpo/buffer.py",
}
NAMES = (
    "loss_clipped_pg",
    "kl_estimators",
    "advantages_grpo",
    "advantages_reinforce_pp",
    "baseline_valid_mask",
    "advantage_penalties",
    "seq_logprob_error",
    "sample_masks",
    "flatten_messages",
    "message_flags",
    "checkpoint_retention",
)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(json.loads(json.dumps(values), parse_constant=float), dtype=torch.float32)


def number(value: Any) -> float:
    return float(value)


# Recorded for parts that have tests of their own.
TESTED_ELSEWHERE = {
    "sequence_packing": "policy/test_packing.py",
    "sequence_packing_shards": "policy/test_packing.py",
    "aggregate_rollout_metrics": "grpo/test_metrics.py",
    "target_weights": "grpo/test_rollout.py",
    "reward_shaping": "test_golden_rewards.py",
    "reward_scaling": "test_golden_rewards.py",
    "effort_levels": "test_golden_rewards.py",
}


def test_every_recorded_file_is_accounted_for(golden_dir: Path) -> None:
    listed = {name.removesuffix(".json") for name in NOT_BUILT if name.endswith(".json")}
    recorded = {path.stem for path in (golden_dir / "grpo").glob("*.json")}
    assert recorded == listed | set(NAMES) | set(TESTED_ELSEWHERE)
    for path in TESTED_ELSEWHERE.values():
        assert (Path(__file__).parent / path).is_file(), path


def merged(parts: list[Any]) -> dict[str, float]:
    """Return the metrics of a step whose microbatches measured `parts`."""

    def number_of(value: Any) -> Any:
        return tuple(part.item() for part in value) if isinstance(value, tuple) else value.item()

    numbers = [{name: number_of(value) for name, value in part.items()} for part in parts]
    return merge_step_metrics([part | {"grad_norm": 0.0, "lr": 0.0, "skipped_steps": 0.0} for part in numbers])


def loss_config(config: dict[str, Any]) -> Any:
    return block("loss_fn", **{"use_cispo": False, "disable_ppo_ratio": False, **config})


@pytest.mark.parametrize("case", cases("loss_clipped_pg"))
def test_loss(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["expected"]
    logits = tensor(given["logits"])
    ids = torch.tensor(given["input_ids"])
    logprobs = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].requires_grad_()
    torch.testing.assert_close(logprobs.detach(), tensor(expected["next_token_logprobs"]), rtol=2e-5, atol=2e-5)
    inputs = LossInputs(
        token_mask_BT=tensor(given["token_mask"])[:, 1:],
        sample_mask_B=tensor(given["sample_mask"]),
        advantages_BT=tensor(given["advantages"])[:, 1:],
        prev_logprobs_BT=tensor(given["prev_logprobs"])[:, 1:],
        generation_logprobs_BT=tensor(given["generation_logprobs"])[:, 1:],
        reference_logprobs_BT=tensor(given["reference_policy_logprobs"])[:, 1:],
        rewards_B=torch.zeros(len(ids)),
    )
    sums = grpo_loss(logprobs, inputs, cfg=loss_config(case["config"]), mismatch_threshold=None)
    loss = sums.loss / sums.count.clamp(min=1)
    loss.backward()
    metrics = merged([sums.metrics])
    assert metrics["global_valid_toks"] == given["global_valid_toks"]
    assert metrics["global_valid_seqs"] == given["global_valid_seqs"]
    assert loss.item() == pytest.approx(number(expected["loss"]), rel=2e-5, abs=2e-5)
    torch.testing.assert_close(logprobs.grad, tensor(expected["grad_next_token_logprobs"]), rtol=2e-5, atol=2e-5)
    for name, value in expected["metrics"].items():
        if (case["name"], name) in DIFFERENT_METRICS:
            assert metrics[name] != pytest.approx(number(value), rel=1e-4)
        elif name in NOT_COMPUTED and name not in metrics:
            assert number(value) == 0.0, name
        else:
            assert metrics[name] == pytest.approx(number(value), rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("threshold", [None, 1.3])
def test_microbatches_add_up(threshold: float | None) -> None:
    (case,) = next(case for case in cases("loss_clipped_pg") if case.id == "tis_cap5_offpolicy").values
    given, cfg = case["inputs"], loss_config(case["config"])
    ids = torch.tensor(given["input_ids"])
    logprobs = torch.log_softmax(tensor(given["logits"]), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    def part(rows: slice) -> tuple[Any, Any]:
        current = logprobs[rows].clone().requires_grad_()
        inputs = LossInputs(
            token_mask_BT=tensor(given["token_mask"])[rows, 1:],
            sample_mask_B=tensor(given["sample_mask"])[rows],
            advantages_BT=tensor(given["advantages"])[rows, 1:],
            rewards_B=torch.zeros(len(current)),
            prev_logprobs_BT=tensor(given["prev_logprobs"])[rows, 1:],
            generation_logprobs_BT=tensor(given["generation_logprobs"])[rows, 1:],
        )
        sums = grpo_loss(current, inputs, cfg=cfg, mismatch_threshold=threshold)
        return sums, torch.autograd.grad(sums.loss, current)[0]

    (whole, gradient), (first, first_gradient) = part(slice(None)), part(slice(1))
    rest, rest_gradient = part(slice(1, None))
    torch.testing.assert_close(torch.cat([first_gradient, rest_gradient]), gradient)
    assert first.count + rest.count == whole.count
    assert merged([first.metrics, rest.metrics]) == pytest.approx(merged([whole.metrics]), rel=1e-5, abs=1e-6)
    masked = merged([whole.metrics])["num_masked_seqs_by_logprob_error"]
    assert masked > 0 if threshold else masked == 0


@pytest.mark.parametrize("case", cases("kl_estimators"))
def test_kl_estimators(case: dict[str, Any]) -> None:
    given = case["inputs"]
    weights = None if given["importance_sampling_weights"] is None else tensor(given["importance_sampling_weights"])
    kl = kl_estimate(
        tensor(given["logprobs"]),
        tensor(given["logprobs_reference"]),
        given["kl_type"],
        input_clamp=given["input_clamp_value"],
        weights=weights,
    )
    if given["output_clamp_value"] is not None:
        kl = kl.clamp(-given["output_clamp_value"], given["output_clamp_value"])
    torch.testing.assert_close(kl, tensor(case["expected"]["kl"]), rtol=2e-5, atol=2e-5)


# In the reference the deviation of these groups is float32 rounding noise, which it divides by; ours is exact.
CANCELLATION = ("near_zero", "inexact", "large_scale")


@pytest.mark.parametrize("case", cases("advantages_grpo"))
def test_advantages(case: dict[str, Any]) -> None:
    given, cfg, expected = case["inputs"], case["config"], case["expected"]
    groups = torch.tensor(given["group"])
    rewards = torch.tensor(given["rewards"], dtype=torch.float64)
    valid = torch.ones(len(rewards), dtype=torch.bool)
    for group in groups.unique():
        members = groups == group
        baseline, std = group_baseline(
            rewards[members], valid[members], leave_one_out=cfg["use_leave_one_out_baseline"]
        )
        want = torch.tensor(expected["baseline"], dtype=torch.float64)[members]
        torch.testing.assert_close(baseline, want, rtol=2e-5, atol=2e-5)
        if not any(word in case["name"] for word in CANCELLATION):
            want = torch.tensor(expected["std"], dtype=torch.float64)[members].nan_to_num(0.0)
            torch.testing.assert_close(std, want, rtol=1e-4, atol=1e-4)
    advantages = estimate_advantages(
        rewards,
        groups,
        valid,
        normalize=cfg["normalize_rewards"],
        leave_one_out=cfg["use_leave_one_out_baseline"],
    )
    if any(word in case["name"] for word in CANCELLATION):
        return
    want = torch.tensor(expected["advantage_per_sample"], dtype=torch.float64)
    torch.testing.assert_close(advantages, want, rtol=1e-4, atol=1e-4)
    clipped = (
        advantages.clamp(cfg["advantage_clip_low"], cfg["advantage_clip_high"])
        if cfg["advantage_clip_low"]
        else advantages
    )
    torch.testing.assert_close(
        clipped, torch.tensor(expected["clipped_per_sample"], dtype=torch.float64), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("case", cases("advantages_reinforce_pp"))
def test_advantages_of_reinforce_plus_plus(case: dict[str, Any]) -> None:
    given, cfg = case["inputs"], case["config"]
    groups, mask = torch.tensor(given["group"]), tensor(given["mask"]).double()
    rewards, valid = torch.tensor(given["rewards"], dtype=torch.float64), torch.ones(len(groups), dtype=torch.bool)
    advantages = subtract_group_mean(rewards, groups, valid) if cfg["minus_baseline"] else rewards
    kl = torch.zeros_like(mask)
    if cfg["use_kl_in_reward"]:
        logprobs, reference = (tensor(given[name]).double() for name in ("logprobs", "reference"))
        kl = kl_estimate(logprobs, reference, cfg["kl_type"], input_clamp=cfg["input_clamp"])
        kl = cfg["kl_coef"] * kl.clamp(-cfg["output_clamp"], cfg["output_clamp"])
    batch = whitening(
        advantages,
        mask.sum(dim=1),
        kl_sums_B=(kl * mask).sum(dim=1),
        kl_squares_B=(kl.square() * mask).sum(dim=1),
    )
    got = (advantages[:, None] - kl - batch.mean) * batch.scale
    torch.testing.assert_close(got, tensor(case["expected"]["advantages"]).double(), rtol=2e-5, atol=2e-5)
    if cfg["use_kl_in_reward"]:
        assert_ranks_agree(case, advantages, got)
    else:
        estimator = block("grpo.adv_estimator", name="reinforce_plus_plus", minus_baseline=cfg["minus_baseline"])
        per_rollout = rollout_advantages(rewards, groups, valid, mask.sum(dim=1), estimator)
        torch.testing.assert_close(per_rollout[:, None].expand_as(got), got)


def assert_ranks_agree(case: dict[str, Any], advantages: torch.Tensor, want: torch.Tensor) -> None:
    """Compute the case as the policy does: each of two ranks has every other row and adds up with the other."""
    given, cfg = case["inputs"], case["config"]
    logprobs, reference, mask = (tensor(given[name]) for name in ("logprobs", "reference", "mask"))
    rows = [
        PolicyRow(advantage=float(own), loss_mask_S=mask_S, logprobs_S=own_S, reference_logprobs_S=start_S)
        for own, mask_S, own_S, start_S in zip(advantages, mask, logprobs, reference, strict=True)
    ]
    loss = block(
        "loss_fn",
        reference_policy_kl_type=cfg["kl_type"],
        kl_input_clamp_value=cfg["input_clamp"],
        kl_output_clamp_value=cfg["output_clamp"],
    )
    sums: list[torch.Tensor] = []
    together = threading.Barrier(2, timeout=60)

    def total(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        together.wait()
        both = sums[-1] + sums[-2]
        together.wait()
        return both

    estimate = partial(sampled_kl, cfg=loss)

    def part_of(rank: int) -> list[torch.Tensor]:
        return subtract_kl(rows[rank::2], total, kl=estimate, weight=cfg["kl_coef"])[0]

    with ThreadPoolExecutor(2) as ranks:
        parts = list(ranks.map(part_of, (0, 1)))
    for rank, part in enumerate(parts):
        difference = (torch.stack(part).double() - want[rank::2]) * mask[rank::2]
        assert difference.abs().max() < 5e-5


@pytest.mark.parametrize("case", cases("baseline_valid_mask"))
def test_invalid_samples_do_not_vote(case: dict[str, Any]) -> None:
    valid = torch.tensor(case["inputs"]["valid_mask"], dtype=torch.bool)
    baseline, std = group_baseline(
        torch.tensor(case["inputs"]["rewards"], dtype=torch.float64),
        valid,
        leave_one_out=case["config"]["leave_one_out"],
    )
    want = torch.tensor(case["expected"]["baseline"], dtype=torch.float64)
    torch.testing.assert_close(baseline[valid], want[valid], rtol=2e-5, atol=2e-5)
    want = torch.tensor(case["expected"]["std"], dtype=torch.float64)
    torch.testing.assert_close(std[valid], want[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases("advantage_penalties"))
def test_penalties_overwrite_exactly_the_flagged_turn(case: dict[str, Any]) -> None:
    given, cfg = case["inputs"], case["config"]
    flagged = advantages_of_flags(
        invalid_tool_call=cfg["invalid_tool_call_advantage"], malformed_thinking=cfg["malformed_thinking_advantage"]
    )
    _, tokens = pack_rollouts([rollout_of(messages) for messages in given["message_logs"]])
    own = given["advantage_per_sample"]
    rows = [torch.tensor(tokens.row(row).advantages(value, flagged)) for row, value in enumerate(own)]
    expected = tensor(case["expected"]["advantages"])
    clipped = tensor(case["expected"]["clipped"])
    for row, got in enumerate(rows):
        torch.testing.assert_close(got, expected[row, : len(got)], rtol=2e-5, atol=2e-5)
        bounded = got.clamp(cfg["advantage_clip_low"], cfg["advantage_clip_high"])
        torch.testing.assert_close(bounded, clipped[row, : len(got)], rtol=2e-5, atol=2e-5)


def rollout_of(messages: Sequence[dict[str, Any]]) -> Rollout:
    """Return recorded messages as a rollout; a message gives its tokens, or only how many."""
    turns, waiting = [], []
    for message in messages:
        ids = message.get("token_ids") or [0] * message["length"]
        if not message.get("generated", message.get("generation_logprobs") is not None):
            waiting += ids
            continue
        flags = {name: message.get(name, False) for name in ("is_invalid_tool_call", "has_malformed_thinking")}
        logprobs = message.get("generation_logprobs") or [0.0] * len(ids)
        turns.append(
            Turn(
                prompt_token_ids=tuple(waiting),
                token_ids=tuple(ids),
                logprobs=tuple(logprobs),
                versions=(),
                finish_reason="stop",
                **flags,
            )
        )
        waiting = []
    if waiting:
        turns.append(
            Turn(prompt_token_ids=tuple(waiting), token_ids=(), logprobs=(), versions=(), finish_reason="stop")
        )
    return Rollout(turns=tuple(turns), status=RolloutStatus.COMPLETED, reason="", reward=0.0)


@pytest.mark.parametrize("case", cases("seq_logprob_error"))
def test_mismatch_mask(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["expected"]
    inputs = LossInputs(
        token_mask_BT=tensor(given["token_mask"]),
        sample_mask_B=tensor(given["sample_mask"]),
        advantages_BT=torch.zeros_like(tensor(given["token_mask"])),
        rewards_B=tensor(given["rewards"]).double(),
        prev_logprobs_BT=tensor(given["prev_logprobs"]),
        generation_logprobs_BT=tensor(given["generation_logprobs"]),
    )
    kept, sums = mask_mismatched(inputs, case["config"]["seq_logprob_error_threshold"])
    assert kept.sample_mask_B.tolist() == expected["sample_mask"]
    metrics = merged([sums])
    names = {"num_masked_seqs": "num_masked_seqs_by_logprob_error"}
    for name, value in expected["metrics"].items():
        assert metrics[names.get(name, name)] == pytest.approx(number(value), rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("case", [c for c in cases("sample_masks") if "/flags=" in c.values[0]["name"]])
def test_sample_masks(case: dict[str, Any]) -> None:
    given, cfg, expected = case["inputs"], case["config"], case["expected"]
    base = torch.tensor(given["loss_multiplier"])
    flagged = given["mask_sample"] if cfg["should_mask_flagged_samples"] else None
    mask = sample_masks(
        base, given["truncated"], flagged or [False] * len(base), overlong_filtering=cfg["overlong_filtering"]
    )
    assert mask.tolist() == expected["loss_multiplier"]


@pytest.mark.parametrize("case", cases("message_flags"))
def test_message_flags(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["expected"]
    patterns = FlagPatterns(
        invalid_tool_call=tuple(given["invalid_tool_call_patterns"]), thinking_tags=tuple(given["thinking_tags"])
    )
    assert turn_flags(given["item"], patterns) == (expected["is_invalid_tool_call"], expected["has_malformed_thinking"])


@pytest.mark.parametrize("case", cases("flatten_messages"))
def test_flatten(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["expected"]
    _, tokens = pack_rollouts([rollout_of(messages) for messages in given["message_logs"]])
    assert set(expected) == {"token_ids", "input_lengths", "token_loss_mask", "generation_logprobs"}
    for number, length in enumerate(expected["input_lengths"]):  # beyond the length the reference has pads
        row = tokens.row(number)
        assert row.token_ids.tolist() == expected["token_ids"][number][:length]
        assert row.token_mask().tolist() == expected["token_loss_mask"][number][:length]
        assert row.logprobs().tolist() == pytest.approx(expected["generation_logprobs"][number][:length])
