"""From verdicts to rewards: what has no verdict, and what shaping does to whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.config.load import BASE, load_config
from recipes.config.tree import Config
from recipes.grpo.reward import AnswerFacts, collect_rewards, shape_effort
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import group_of

MARKER = "{reasoning effort: low}"


@pytest.fixture(scope="module")
def config() -> Config:
    loaded = load_config(BASE).repaired
    assert loaded is not None
    return loaded


def with_effort(config: Config, **values: Any) -> Config:
    effort = replace(config.env.nemo_gym.effort_levels, **values)
    return replace(config, env=replace(config.env, nemo_gym=replace(config.env.nemo_gym, effort_levels=effort)))


def rollout(reward: float | None, *, length: int = 4, status: RolloutStatus = RolloutStatus.COMPLETED) -> Rollout:
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=(2,) * length,
        logprobs=(-1.0,) * length,
        versions=(VersionSpan(version=0, start=0, end=length),),
        finish_reason="stop",
    )
    return Rollout(turns=(turn,), status=status, reason="r", reward=reward)


def group(text: str, *rollouts: Rollout) -> Group:
    ref = PromptRef(epoch=0, row_index=0, prompt_id="0")
    return group_of(rollouts, prompt=ref, prompt_text=text)


def test_without_shaping_rewards_are_the_verdicts_and_no_verdict_is_nan(config: Config) -> None:
    failed = rollout(None, status=RolloutStatus.ENV_FAILED)
    rewards_B, metrics = collect_rewards([group("q", rollout(1.0), failed), group("q", rollout(0.25))], config)
    assert rewards_B.dtype == torch.float64
    assert rewards_B[[0, 2]].tolist() == [1.0, 0.25]
    assert rewards_B[1].isnan()
    assert metrics == {}


def test_effort_shaping_moves_marked_prompts_only(config: Config) -> None:
    on = with_effort(config, low_weight=0.2, low_ub=10, low_string=MARKER)
    short, long = rollout(1.0, length=5), rollout(1.0, length=15)
    groups = [group(f"q {MARKER}", short, long, rollout(None, status=RolloutStatus.TIMED_OUT)), group("q", long)]
    rewards_B, metrics = collect_rewards(groups, on)
    assert rewards_B[[0, 1, 3]].tolist() == pytest.approx([1.1, 0.9, 1.0])
    assert rewards_B[2].isnan()
    assert metrics["mean_length_high"] == 15.0
    assert metrics["mean_reward_low"] == pytest.approx(1.0)


@pytest.mark.parametrize(("is_bounded", "worst"), [(True, -0.2), (False, -2.0)])
def test_a_long_wrong_answer_loses_no_more_than_the_bound(config: Config, is_bounded: bool, worst: float) -> None:
    effort = with_effort(
        config, low_weight=0.2, low_ub=3000, low_string=MARKER, low_is_bounded=is_bounded
    ).env.nemo_gym.effort_levels
    facts = AnswerFacts(
        first_lengths_B=torch.tensor([33_000.0]),
        last_lengths_B=torch.tensor([33_000.0]),
        is_truncated_B=torch.tensor([False]),
        asks_low_effort_B=torch.tensor([True]),
    )
    shaped_B, _ = shape_effort(torch.zeros(1, dtype=torch.float64), facts, effort)
    assert shaped_B.tolist() == pytest.approx([worst])


def test_length_shaping_reads_the_first_turn_and_the_truncation(config: Config) -> None:
    shaping = replace(
        config.grpo.reward_shaping,
        enabled=True,
        max_response_length=10,
        overlong_buffer_length=4,
        overlong_buffer_penalty=1.0,
    )
    dapo = replace(config, grpo=replace(config.grpo, reward_shaping=shaping))
    rewards_B, metrics = collect_rewards([group("q", rollout(1.0, length=6), rollout(1.0, length=8))], dapo)
    assert rewards_B.tolist() == pytest.approx([1.0, 0.5])
    assert metrics["unshaped_reward"] == 1.0
    halved = replace(shaping, stop_properly_penalty_coef=0.5)
    cut = rollout(1.0, status=RolloutStatus.TRUNCATED)
    stop = replace(config, grpo=replace(config.grpo, reward_shaping=halved))
    assert collect_rewards([group("q", cut, rollout(1.0, length=9))], stop)[0].tolist() == [0.5, 1.0]
