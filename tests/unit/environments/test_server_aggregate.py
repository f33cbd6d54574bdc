"""Statistics of verdicts, over all of them and per prompt."""

from __future__ import annotations

import pytest

from recipes.environments.server.resources import aggregated


def test_over_all_and_per_prompt() -> None:
    replies = [
        {"_ng_task_index": 4, "_ng_rollout_index": 0, "reward": 1.0, "score": 2, "is_cut": True, "uuid": "a"},
        {"_ng_task_index": 2, "_ng_rollout_index": 0, "reward": 0.0},
        {"_ng_task_index": 4, "_ng_rollout_index": 1, "reward": 0.0, "score": 4},
        {"_ng_task_index": 2, "reward": 0.0, "_ng_failure_class": "judge_failed"},
        {"reward": 1.0},
    ]
    answer = aggregated({"verify_responses": replies})
    assert answer["key_metrics"] == {"mean/reward": 0.5}
    assert answer["agent_metrics"]["mean/score"] == 3.0
    first, second = answer["group_level_metrics"]
    assert (first["_ng_task_index"], first["mean/reward"], first["std/reward"]) == (2, 0.0, 0.0)
    expected = {"mean": 0.5, "max": 1.0, "min": 0.0, "median": 0.5, "std": pytest.approx(0.5**0.5)}
    assert {name: second[f"{name}/reward"] for name in expected} == expected
    assert {key.partition("/")[2] for key in second} == {"", "reward", "score"}


def test_without_verdicts() -> None:
    assert aggregated([]) == {"agent_metrics": {}, "key_metrics": {"mean/reward": None}, "group_level_metrics": []}


BODIES = [None, {}, "text", [1], {"verify_responses": {}}, {"verify_responses": [None]}]
BODIES += [[{}], [{"reward": "1.0"}], [{"reward": None}], [{"reward": True}], [{"reward": 1.0}, {"detail": "no"}]]


@pytest.mark.parametrize("body", BODIES)
def test_another_body_is_refused(body: object) -> None:
    with pytest.raises(ValueError, match="verify_responses"):
        aggregated(body)
