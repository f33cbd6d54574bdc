"""Step metrics and the reduction of rollouts; expected numbers are worked out by hand in the comments."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.grpo.causes import causes
from recipes.grpo.metrics import (
    StepMetrics,
    aggregate_rollouts,
    engine_samples,
    merge_groups,
    percentile,
    rates,
)
from recipes.types import PREFIX_BREAKS, Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import group_of


def make_turn(versions: dict[int, int], *, prompt: int = 3, finish_reason: str = "stop") -> Turn:
    """Build a turn whose tokens come from {weight version: number of tokens}, in that order."""
    spans, start = [], 0
    for version, count in versions.items():
        spans.append(VersionSpan(version=version, start=start, end=start + count))
        start += count
    return Turn(
        prompt_token_ids=tuple(range(prompt)),
        token_ids=tuple(range(start)),
        logprobs=(-0.5,) * start,
        versions=tuple(spans),
        finish_reason=finish_reason,
    )


def make_rollout(reward: float | None, *turns: Turn, status: RolloutStatus | None = None, **extra: object) -> Rollout:
    if status is None:
        status = RolloutStatus.ENV_FAILED if reward is None else RolloutStatus.COMPLETED
    return Rollout(turns=turns, status=status, reason="because", reward=reward, **extra)  # type: ignore[arg-type]


def make_group(row: int, rollouts: list[Rollout], *, agent: str = "math", version: int = 4) -> Group:
    prompt = PromptRef(epoch=0, row_index=row, prompt_id=f"{row:016x}")
    return group_of(rollouts, prompt=prompt, agent=agent, prompt_text=f"question {row}", target_step=5, version=version)


@pytest.fixture
def groups() -> list[Group]:
    """Two agents; the first group has one rollout without a verdict and one that was cut off."""
    first = [
        make_rollout(1.0, make_turn({4: 10}), seconds=1.0, env_seconds=0.25, metrics={"exact": 1.0}),
        make_rollout(
            0.0,
            make_turn({4: 2, 5: 4}, finish_reason="length"),
            status=RolloutStatus.TRUNCATED,
            seconds=2.0,
            metrics={"exact": 0.0},
        ),
        make_rollout(None, make_turn({4: 100}), seconds=9.0),
        make_rollout(0.5, make_turn({5: 1}), make_turn({5: 3}, prompt=1), seconds=4.0),
    ]
    second = [make_rollout(1.0, make_turn({5: 6}), seconds=3.0), make_rollout(1.0, make_turn({5: 8}), seconds=5.0)]
    return [make_group(0, first), make_group(1, second, agent="mcqa", version=5)]


def test_rewards_are_taken_over_valid_members_and_groups_weigh_equally(groups: list[Group]) -> None:
    metrics = aggregate_rollouts(groups, version=5)
    assert metrics["math/reward"] == 0.5  # (1 + 0 + 0.5) / 3
    assert metrics["mcqa/reward"] == 1.0
    assert metrics["total_reward/mean"] == 0.75  # (0.5 + 1) / 2, not 3.5 / 5
    assert metrics["reward"] == 0.7  # over rollouts: (1 + 0 + 0.5 + 1 + 1) / 5
    assert metrics["total_reward/min"] == 0.0
    assert metrics["total_reward/max"] == 1.0
    assert metrics["total_reward/median"] == 0.75
    assert metrics["total_reward/stddev"] == 0.25  # (sqrt((.25 + .25 + 0) / 2) = 0.5; 0) averaged
    assert metrics["math/valid_rate"] == 0.75
    assert metrics["mcqa/valid_rate"] == 1.0


def test_lengths_ends_and_verifier_extras(groups: list[Group]) -> None:
    metrics = aggregate_rollouts(groups, version=5)
    assert metrics["gen_tokens_per_sample/mean"] == pytest.approx((20 / 3 + 7) / 2)  # 10, 6, 4; then 6, 8
    assert metrics["gen_tokens_per_sample/max"] == 10.0
    assert metrics["total_tokens_per_sample/max"] == 13.0  # 10 sampled and 3 of the prompt
    assert metrics["total_tokens_per_sample/min"] == 8.0  # 3 + 1 + 1 + 3
    assert metrics["max_gen_tokens_per_turn/max"] == 10.0
    assert metrics["total_turns"] == 6.0  # 1 + 1 + 2 and 1 + 1
    assert metrics["truncation_rate"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["natural_termination_rate"] == pytest.approx((2 / 3 + 1) / 2)
    assert metrics["math/exact/mean"] == 0.5
    assert "mcqa/exact/mean" not in metrics


@pytest.mark.parametrize("value", [sys.float_info.max, -sys.float_info.max, math.inf, math.nan])
def test_no_number_of_a_verifier_ends_a_run(value: float) -> None:
    rollouts = [make_rollout(1.0, make_turn({4: 2}), metrics={"limit": number}) for number in (value, value, 0.0)]
    found = aggregate_rollouts([make_group(0, rollouts), make_group(1, rollouts)], 4)
    assert found["math/reward"] == 1.0
    assert ("math/limit/mean" in found) == math.isfinite(value)
    assert all(map(math.isfinite, found.values()))


def test_tokens_and_flags_are_counted_over_all_rollouts(groups: list[Group]) -> None:
    flagged = make_group(2, [make_rollout(1.0, make_turn({5: 1}, prompt=11), is_flagged=True), make_rollout(None)])
    metrics = aggregate_rollouts([*groups, flagged], version=5)
    # Sampled: 10 + 6 + 100 + 1 + 3 + 6 + 8 + 1; prompts: seven turns of 3 but one of 1, and 11.
    assert metrics["total_num_tokens"] == 135 + 6 * 3 + 1 + 11
    assert metrics["mean_prompt_length"] == pytest.approx((6 * 3 + 11) / 7)  # of seven rollouts that have a turn
    assert metrics["num_flagged_samples"] == 1.0
    assert metrics["num_prefix_breaks"] == 0.0
    broken = make_group(2, [make_rollout(1.0), replace(make_rollout(None), metrics={PREFIX_BREAKS: 1.0})])
    assert aggregate_rollouts([flagged, broken], version=5)["num_prefix_breaks"] == 1.0
    assert "mean_prompt_length" not in aggregate_rollouts([make_group(0, [make_rollout(None)])], version=0)


def test_rates_per_second_and_gpu() -> None:
    values = {
        "train/total_num_tokens": 1200.0,
        "train/num_rollouts": 12.0,
        "train/global_valid_toks": 600.0,
        "timing/train/policy_training": 2.0,
    }
    assert rates(values, 4.0, train_gpus=3, generation_gpus=2) == {
        "performance/samples_per_sec": 3.0,
        "performance/tokens_per_sec": 300.0,
        "performance/tokens_per_sec_per_gpu": 60.0,
        "performance/train_tokens_per_sec": 150.0,
        "timing/train/valid_tokens_per_sec_per_gpu": 50.0,
        "performance/policy_training_tokens_per_sec": 600.0,
        "performance/policy_training_tokens_per_sec_per_gpu": 200.0,
    }


def test_ages_are_per_group_and_per_token(groups: list[Group]) -> None:
    metrics = aggregate_rollouts(groups, version=6)
    assert metrics["avg_trajectory_age"] == 1.5  # started at 4 and 5
    assert metrics["max_trajectory_age"] == 2.0
    # Version 4: 10 + 2 tokens, age 2; version 5: 4 + 1 + 3 + 6 + 8 = 22 tokens, age 1; the failed one is left out.
    assert metrics["token_age/mean"] == pytest.approx((12 * 2 + 22 * 1) / 34)
    assert metrics["token_age/max"] == 2.0


def test_counts_name_every_way_to_end_and_groups_without_signal(groups: list[Group]) -> None:
    dead = make_group(2, [make_rollout(1.0, make_turn({5: 1})), make_rollout(None)])
    metrics = aggregate_rollouts([*groups, dead], version=5)
    counts = {key: value for key, value in metrics.items() if key.startswith("rollout_status/")}
    assert counts == {
        "rollout_status/completed": 5.0,
        "rollout_status/truncated": 1.0,
        "rollout_status/env_failed": 2.0,
        "rollout_status/judge_failed": 0.0,
        "rollout_status/timed_out": 0.0,
        "rollout_status/aborted": 0.0,
    }
    assert metrics["num_rollouts"] == 8.0
    assert metrics["num_groups_zero_variance"] == 1.0  # mcqa: both 1.0
    assert metrics["num_groups_too_few_valid"] == 1.0  # one verdict of two
    assert metrics["math/valid_rate"] == 0.625  # (0.75 + 0.5) / 2


def test_where_nothing_is_compared_no_group_lacks_variance(groups: list[Group]) -> None:
    alone = make_group(2, [make_rollout(1.0, make_turn({5: 1})), make_rollout(None)])
    metrics = aggregate_rollouts([*groups, alone], version=5, compares=False)
    assert "num_groups_zero_variance" not in metrics
    assert metrics["num_groups_too_few_valid"] == 0.0  # the one that is valid trains
    found = causes({f"train/{name}": value for name, value in metrics.items()})
    assert "equal rewards" not in [cause.name for cause in found]


def test_durations_are_pooled_over_all_rollouts(groups: list[Group]) -> None:
    metrics = aggregate_rollouts(groups, version=5)
    assert metrics["trajectory_duration_s"] == 4.0  # (1 + 2 + 9 + 4 + 3 + 5) / 6
    assert metrics["trajectory_duration_s/max"] == 9.0
    assert metrics["trajectory_duration_s/p50"] == 4.0  # sorted 1 2 3 4 5 9, element 3
    assert metrics["trajectory_duration_s/p99"] == 9.0
    assert metrics["env_duration_s/max"] == 0.25


def test_a_batch_without_any_verdict_has_counts_but_no_reward() -> None:
    metrics = aggregate_rollouts([make_group(0, [make_rollout(None), make_rollout(None)])], version=0)
    assert metrics["rollout_status/env_failed"] == 2.0
    assert metrics["math/valid_rate"] == 0.0
    assert not [key for key in metrics if "reward" in key]
    assert aggregate_rollouts([], version=0)["num_groups"] == 0.0


def test_merge_matches_the_recorded_reference(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "grpo" / "aggregate_rollout_metrics.json").read_text(encoding="utf-8"))["cases"]
    assert cases
    for case in cases:
        assert merge_groups(case["inputs"]) == case["expected"], case["name"]


def test_percentile_is_an_element() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 41)), 0.95) == 39.0
    assert percentile([7.0], 0.99) == 7.0


def test_timed_adds_up_also_when_it_raises() -> None:
    ticks = iter([10.0, 12.5, 20.0, 20.25])
    metrics = StepMetrics(3, clock=lambda: next(ticks))
    with metrics.timed("weight_sync"):
        pass
    with pytest.raises(KeyError), metrics.timed("weight_sync"):
        raise KeyError
    assert metrics.as_dict() == {"timing/train/weight_sync": 2.75}


def test_a_key_has_one_writer() -> None:
    metrics = StepMetrics(3)
    metrics.add({"reward": 0.5})
    metrics.add({"reward": 0.25}, prefix="validation/")
    with pytest.raises(ValueError, match=r"train/reward.*step 3.*0\.5"):
        metrics.add({"reward": 0.75})
    assert metrics.as_dict() == {"train/reward": 0.5, "validation/reward": 0.25}


def test_the_running_phase_and_its_seconds_can_be_asked():
    times = iter((10.0, 12.5, 13.0))  # start, question, end
    metrics = StepMetrics(1, clock=times.__next__)
    assert metrics.phase() is None
    with metrics.timed("policy_training"):
        assert metrics.phase() == ("policy_training", 2.5)
    assert metrics.phase() is None
    assert metrics.as_dict()["timing/train/policy_training"] == 3.0


def test_samples_of_engines_are_kept_apart_and_taken_together() -> None:
    engines = [
        {"inflight_batch_sizes/mean": 2.0, "inflight_batch_sizes/max": 4.0, "generation_tokens": 10.0},
        {},  # started a moment ago, or silent
        {"inflight_batch_sizes/mean": 3.0, "inflight_batch_sizes/max": 3.0, "generation_tokens": 5.0},
    ]
    assert engine_samples(engines) == {
        "generation_metrics/engine_0/inflight_batch_sizes/mean": 2.0,
        "generation_metrics/engine_0/inflight_batch_sizes/max": 4.0,
        "generation_metrics/engine_0/generation_tokens": 10.0,
        "generation_metrics/engine_2/inflight_batch_sizes/mean": 3.0,
        "generation_metrics/engine_2/inflight_batch_sizes/max": 3.0,
        "generation_metrics/engine_2/generation_tokens": 5.0,
        "generation_metrics/inflight_batch_sizes/mean": 2.5,
        "generation_metrics/inflight_batch_sizes/max": 4.0,
        "generation_metrics/generation_tokens": 15.0,
    }
    assert engine_samples([]) == engine_samples([{}]) == {}


def test_drafts_of_all_engines_are_counted_together() -> None:
    engines = [
        {"spec_num_drafts": 10.0, "spec_num_draft_tokens": 20.0, "spec_num_accepted_tokens": 5.0},
        {"spec_num_drafts": 30.0, "spec_num_draft_tokens": 60.0, "spec_num_accepted_tokens": 35.0},
        {"generation_tokens": 1.0},  # started a moment ago
    ]
    found = {name: value for name, value in engine_samples(engines).items() if name.startswith("train/")}
    assert found == {
        "train/vllm/spec_num_drafts": 40.0,
        "train/vllm/spec_num_draft_tokens": 80.0,
        "train/vllm/spec_num_accepted_tokens": 40.0,
        "train/vllm/spec_acceptance_rate": 0.5,
        "train/vllm/spec_acceptance_length": 2.0,
    }
    none = dict.fromkeys(engines[0], 0.0)
    assert not [name for name in engine_samples([none]) if name.startswith("train/")]
