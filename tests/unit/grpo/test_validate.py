"""Held-out rewards: over what had a verdict, and nothing where nothing had."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from recipes.grpo.validate import ValidationSet, reward_metrics
from recipes.rollouts.group import StoredGroup
from recipes.tokens import pack_rollouts
from recipes.types import Group, Rollout, RolloutStatus, Row, Sampling, Turn
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


def test_calls_of_tools_that_are_not_offered_are_a_share_of_calls() -> None:
    called = group("math", 1.0, 0.0)
    headers = [replace(one, tool_calls=calls) for one, calls in zip(called.rollouts, [(3, 1), (1, 0)], strict=True)]
    assert reward_metrics([replace(called, rollouts=tuple(headers))], "")["unknown_tool_rate"] == 1 / 4


def test_without_a_verdict_there_is_no_reward() -> None:
    groups = [group("math", None, None), group("mcqa", 1.0, 0.0)]
    got = reward_metrics(groups, "")
    assert (got["accuracy"], got["pass_k"], got["num_failed"]) == (0.5, 1.0, 2.0)
    assert "math/accuracy" not in got
    assert reward_metrics(groups[:1], "") == {"avg_length": 2.0, "num_failed": 2.0}


def test_rows_whose_answers_are_compared_are_left_out_of_the_greedy_pass() -> None:
    asked: list[tuple[str, int]] = []

    class Collector:
        def run_group(self, row: Row, sampling: Sampling, *, affinity: int, num: int) -> StoredGroup:
            asked.append((row["agent_ref"]["name"], num))
            rollout = Rollout(turns=(TURN,), status=RolloutStatus.COMPLETED, reason="", reward=1.0)
            return pack_rollouts((rollout,) * num)

        def submit(self, group: StoredGroup) -> Future[StoredGroup]:
            future: Future[StoredGroup] = Future()
            future.set_result(group)
            return future

    rows = [
        {"responses_create_params": {"input": name}, "agent_ref": {"name": name}} for name in ("math", "genrm", "mcqa")
    ]
    validation = ValidationSet(
        dataset=rows,  # type: ignore[arg-type]
        sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=8),
        num_generations=2,
        greedy=True,
        deadline_seconds=30.0,
        compares=lambda row: row["agent_ref"]["name"] == "genrm",
    )
    measured = validation.run(Collector(), step=3, is_stopped=lambda: False)  # type: ignore[arg-type]
    assert measured is not None
    metrics, sampled = measured
    assert asked == [("math", 2), ("genrm", 2), ("mcqa", 2), ("math", 1), ("mcqa", 1)]
    assert [group.prompt.row_index for group in sampled] == [0, 1, 2]
    assert metrics["genrm/accuracy"] == 1.0 and "genrm/greedy_accuracy" not in metrics
    assert metrics["greedy_num_failed"] == 0.0
