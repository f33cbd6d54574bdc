"""What teachers say of the tokens of a rollout, and what becomes of one that no teacher answers about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from recipes.environments.contract.http import RefusedError
from recipes.environments.scoring.judge import JudgeFailedError
from recipes.rollouts.teachers import Teachers, read_logprobs
from recipes.types import Rollout, RolloutStatus, Turn


def reply(*entries: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None, *entries]}]}


def test_the_entry_of_the_token_itself_is_read() -> None:
    body = reply({"5": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"6": {"logprob": -2}})
    assert read_logprobs(body, [4, 5, 6]) == [0.0, -1.5, -2.0]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"prompt_logprobs": None}]}, reply({"5": {"logprob": -1}}),
        reply({"7": {"logprob": -1}}, {"6": {"logprob": -1}}), reply({"5": None}, {"6": {"logprob": -1}}),
        reply({"5": {"logprob": "x"}}, {"6": {"logprob": -1}}),
        reply({"5": {"logprob": float("-inf")}}, {"6": {"logprob": 0}}),
        reply(*[{"5": {"logprob": -1}}] * 4),
    ],
)  # fmt: skip
def test_a_reply_that_does_not_name_every_token_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="its reply"):
        read_logprobs(body, [4, 5, 6])


class Scripted:
    """A teacher that finds token t as likely as exp(-t), or answers nothing."""

    def __init__(self, *, answers: bool = True) -> None:
        self.asked: list[list[int]] = []
        self._answers = answers

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self.asked.append(list(token_ids))
        if not self._answers:
            raise JudgeFailedError("scripted: the context is too short")
        return [0.0, *(-float(token) for token in token_ids[1:])]


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
    return Turn(
        prompt_token_ids=prompt, token_ids=sampled, logprobs=(-1.0,) * len(sampled), versions=(), finish_reason="stop"
    )


def rollout(reward: float | None = 1.0) -> Rollout:
    return Rollout(
        turns=(turn((1, 2), (3, 4)), turn((5,), (6,))),
        branches=((turn((7,), (8,)),),),
        status=RolloutStatus.COMPLETED,
        reason="",
        reward=reward,
    )


async def scored(teachers: dict[str, Any], agent: str, one: Rollout) -> Rollout:
    [result] = await Teachers(teachers).score({"agent_ref": {"name": agent}}, [one])
    return result


async def test_every_sequence_is_scored_whole_by_the_teacher_of_its_agent() -> None:
    own, other = Scripted(), Scripted()
    result = await scored({"math": own, "default": other}, "math", rollout())
    assert own.asked == [[1, 2, 3, 4, 5, 6], [7, 8]] and other.asked == []
    assert [one.teacher_logprobs for one in result.all_turns()] == [(-3.0, -4.0), (-6.0,), (-8.0,)]
    await scored({"math": own, "default": other}, "code", rollout())
    assert len(other.asked) == 2


@pytest.mark.parametrize("teachers", [{}, {"math": Scripted(answers=False)}])
async def test_without_an_answer_a_rollout_is_out_of_the_loss(teachers: dict[str, Any]) -> None:
    result = await scored(teachers, "math", rollout())
    assert result.status is RolloutStatus.JUDGE_FAILED and result.reward is None and not result.is_valid
    assert "teacher" in result.reason


async def test_nobody_is_asked_about_a_rollout_without_a_verdict() -> None:
    teacher = Scripted()
    assert await scored({"default": teacher}, "math", rollout(reward=None)) == rollout(reward=None)
    assert teacher.asked == []
