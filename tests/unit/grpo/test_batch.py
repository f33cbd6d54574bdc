"""From rollouts to rows: every sampled token once, at its place, and nothing else in the loss."""

from __future__ import annotations

import pytest

from recipes.grpo.batch import build_batch
from recipes.grpo.reward import verdicts
from recipes.policy.shards import BatchShard
from recipes.tokens import RowTokens
from recipes.types import Group, Rollout, RolloutStatus, TrainBatch, Turn
from tests.groups import group_of


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...], logprob: float = -0.5) -> Turn:
    return Turn(
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=(logprob,) * len(sampled),
        versions=(),
        finish_reason="stop",
    )


def rollout(*turns: Turn, reward: float | None = 1.0, **options: object) -> Rollout:
    status = RolloutStatus.COMPLETED if reward is not None else RolloutStatus.ENV_FAILED
    return Rollout(**{"turns": turns, "status": status, "reason": "r", "reward": reward, **options})  # type: ignore[arg-type]


def build(*groups: Group, overlong_filtering: bool = False, mask_flagged: bool = True) -> TrainBatch:
    return build_batch(groups, verdicts(groups), overlong_filtering=overlong_filtering, mask_flagged=mask_flagged)


def row_of(batch: TrainBatch, row: int) -> RowTokens:
    return BatchShard(batch=batch, microbatches=()).row(row)


def group(*rollouts: Rollout) -> Group:
    return group_of(rollouts)


def test_two_turns_become_one_row() -> None:
    got = build(group(rollout(turn((1, 2), (3, 4)), turn((5,), (6,)), reward=0.25)))
    row = row_of(got, 0)
    assert got.lengths_B.tolist() == [6]
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.token_mask().tolist() == [0, 0, 1, 1, 0, 1]
    assert row.logprobs().tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert got.rewards_B.tolist() == [0.25]


def test_a_failure_keeps_its_row_and_never_becomes_a_number() -> None:
    failed = rollout(reward=None)
    got = build(group(rollout(turn((1,), (2,))), failed), group(rollout(turn((1,), (2,)), reward=None)))
    assert got.sample_mask_B.tolist() == [1.0, 0.0, 0.0]
    assert got.rewards_B.isnan().tolist() == [False, True, True]
    assert got.group_B.tolist() == [0, 0, 1]
    assert got.lengths_B.tolist() == [2, 1, 2]
    assert row_of(got, 1).token_mask().tolist() == [0.0]


def test_an_answer_without_tokens_is_not_a_reward() -> None:
    assert verdicts([group(rollout(turn((1,), ()), reward=1.0))]).isnan().all()


@pytest.mark.parametrize(("filtering", "mask"), [(False, [1.0, 1.0, 0.0]), (True, [1.0, 0.0, 0.0])])
def test_overlong_filter_and_flags(filtering: bool, mask: list[float]) -> None:
    cut = rollout(turn((1,), (2,)), status=RolloutStatus.TRUNCATED)
    flagged = rollout(turn((1,), (2,)), is_flagged=True)
    assert (
        build(group(rollout(turn((1,), (2,))), cut, flagged), overlong_filtering=filtering).sample_mask_B.tolist()
        == mask
    )


def test_flags_are_ignored_when_asked_to() -> None:
    flagged = rollout(turn((1,), (2,)), is_flagged=True)
    assert build(group(flagged), mask_flagged=False).sample_mask_B.tolist() == [1.0]
