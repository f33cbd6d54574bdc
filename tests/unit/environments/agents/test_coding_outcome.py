"""What the end of a coding agent's work and its hidden tests come to: the reward, and what stays out of the loss."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.environments.agents.by_url.agent import error_metrics
from recipes.environments.agents.coding.outcome import Work, error_kind, verdict_on
from recipes.environments.contract.verifier import NoVerdict, Verdict
from recipes.environments.swe.contract import AgentEnd, Evaluation
from tests.recorded import env_cases

PASSED, FAILED = Evaluation(resolved=True, reason="all"), Evaluation(resolved=False, reason="test_a failed")
LATE, MEMORY = (
    Evaluation(resolved=False, reason="stopped", is_late=True),
    Evaluation(resolved=False, reason="stopped", out_of_memory=True),
)
TABLE: list[tuple[AgentEnd, Evaluation | None, float, bool]] = [
    (AgentEnd.FINISHED, PASSED, 1.0, False),
    (AgentEnd.FINISHED, FAILED, 0.0, False),
    (AgentEnd.FINISHED, None, 0.0, False),
    (AgentEnd.FINISHED, LATE, 0.0, True),
    (AgentEnd.FINISHED, MEMORY, 0.0, True),
    (AgentEnd.MAX_TURNS, PASSED, 1.0, True),
    (AgentEnd.MAX_TURNS, FAILED, 0.0, False),
    (AgentEnd.MAX_TURNS, None, 0.0, False),
    (AgentEnd.CONTEXT, PASSED, 1.0, True),
    (AgentEnd.CONTEXT, FAILED, 0.0, False),
    (AgentEnd.STUCK, PASSED, 1.0, False),
    (AgentEnd.STUCK, None, 0.0, False),
    (AgentEnd.MEMORY, None, 0.0, True),
    (AgentEnd.TIME, None, 0.0, True),
    (AgentEnd.OTHER, None, 0.0, False),
]


@pytest.mark.parametrize(("end", "evaluation", "reward", "is_flagged"), TABLE)
def test_verdicts_and_what_is_kept_out_of_the_loss(
    end: AgentEnd, evaluation: Evaluation | None, reward: float, is_flagged: bool
) -> None:
    verdict = verdict_on(Work(end=end, patch="x", evaluation=evaluation))
    assert isinstance(verdict, Verdict)
    assert (verdict.reward, verdict.is_flagged) == (reward, is_flagged)
    assert verdict.reason
    assert [kind for kind in AgentEnd if verdict.metrics[f"ended/{kind}"]] == [end]


def test_a_failed_evaluation_is_no_verdict_whatever_the_agent_did() -> None:
    for end in AgentEnd:
        found = verdict_on(Work(end=end, evaluation=Evaluation(resolved=True, reason="", failed="it broke")))
        assert isinstance(found, NoVerdict)


@pytest.mark.parametrize("case", env_cases("swe_agents_logic", "classify_error"))
def test_kinds_of_errors_are_the_references(case: dict[str, Any]) -> None:
    assert error_kind(case["error"]) == case["kind"]
    counted = {} if case["kind"] is None else {f"agent_error/{case['kind']}": 1.0}
    assert error_metrics({"error": case["error"], "note": "done"}) == counted
    assert error_metrics({"error": {"a": 1}}) == error_metrics({}) == {}
