"""Held-out rewards: over what had a verdict, and nothing where nothing had."""

from __future__ import annotations

from recipes.grpo.validate import reward_metrics
from recipes.types import Group, Rollout, RolloutStatus, Turn
from tests.groups import group_of

TURN = Turn(prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-1.0, -1.0), versions=(), finish_reason="stop")


def group(agent: str, *rewards: float | None) -> Group:
    rollouts = tuple(
        Rollout(
            turns=(TURN,),
            status=RolloutStatus.ENV_FAILED if reward is None else RolloutStatus.COMPLETED,
            reason="",
            reward=reward,
        )
        for reward in rewards
    )
    return group_of(rollouts, agent=agent)


def test_by_hand() -> None:
    groups = [group("math", 1.0, 0.0), group("math", 0.0, None), group("mcqa", 1.0, 1.0)]
    assert reward_metrics(groups, "greedy_") == {
        "greedy_accuracy": 3 / 5,
        "greedy_pass_k": 2 / 3,
        "math/greedy_accuracy": 1 / 3,
        "mcqa/greedy_accuracy": 1.0,
        "greedy_avg_length": 2.0,
        "greedy_num_failed": 1.0,
    }


def test_without_a_verdict_there_is_no_reward() -> None:
    groups = [group("math", None, None), group("mcqa", 1.0, 0.0)]
    got = reward_metrics(groups, "")
    assert (got["accuracy"], got["pass_k"], got["num_failed"]) == (0.5, 1.0, 2.0)
    assert "math/accuracy" not in got
    assert reward_metrics(groups[:1], "") == {"avg_length": 2.0, "num_failed": 2.0}
