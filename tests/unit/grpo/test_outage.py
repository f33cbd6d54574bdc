"""The loop on fakes while an environment gives no verdicts: no prompt is lost, and one that stays down is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.errors import StalledError
from recipes.types import ModelClient, Rollout, RolloutStatus, Row
from tests.unit.grpo.loop_case import LoopEnvironments, drive, make_run, policy_step, records, trained

BREAKER = (
    "env.circuit_breaker.window_rollouts=4",
    "env.circuit_breaker.max_no_verdict_share=0.5",
    "env.circuit_breaker.probe_seconds=0.05",
)


class Outage(LoopEnvironments):
    """One environment that gives no verdicts until it was asked `length` times."""

    def __init__(self, agent: str, length: int) -> None:
        super().__init__()
        self.agent, self.length, self.num_lost = agent, length, 0

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        if row["agent_ref"]["name"] == self.agent and self.num_lost < self.length:
            self.num_lost += 1
            await asyncio.sleep(0)
            return Rollout(turns=(), status=RolloutStatus.ENV_FAILED, reason="down", reward=None)
        return await super().run(row, model, max_tokens=max_tokens)


@pytest.mark.parametrize("names", [["math", "code"], ["code"]])
def test_an_outage_of_an_environment_costs_none_of_its_prompts(tmp_path: Path, names: list[str]) -> None:
    rows = [f"{names[number % len(names)]}:{number}" for number in range(16)]
    run = make_run(tmp_path, rows, *BREAKER, environments=Outage("code", 30))
    assert drive(run) is None
    assert sorted(trained(tmp_path)) == list(range(16)), "a prompt was lost"
    lines = records(tmp_path)
    if len(names) == 2:
        paused = [record for record in lines if record["train/num_paused_environments"]]
        assert paused, "never paused"
        assert all(record["train/code/paused_seconds"] > 0 for record in paused)
        assert paused[-1]["train/num_prompts_set_aside"] > 0


def test_a_resume_while_an_environment_is_paused_loses_none_of_its_prompts(tmp_path: Path) -> None:
    rows = [f"{('math', 'code')[number % 2]}:{number}" for number in range(16)]
    run = make_run(tmp_path, rows, *BREAKER, "grpo.max_num_steps=4", environments=Outage("code", 10**6))
    assert drive(run) is None
    assert sorted(trained(tmp_path)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert drive(make_run(tmp_path, rows)) is None
    assert sorted(trained(tmp_path)) == list(range(16))


def test_an_environment_that_stays_down_ends_the_run_by_name_and_saved(tmp_path: Path) -> None:
    rows = [f"{('math', 'code')[number % 2]}:{number}" for number in range(16)]
    run = make_run(tmp_path, rows, *BREAKER, environments=Outage("code", 10**6))
    run.config = replace(run.config, deadlines=replace(run.config.deadlines, progress=3.0))
    failure = drive(run)
    assert isinstance(failure, StalledError)
    assert "code" in str(failure)
    assert policy_step(tmp_path) in (3, 4), "a prompt that probes the environment may hold a place of the fourth step"
