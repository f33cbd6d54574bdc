"""Two real steps on tasks with tools: what every turn has sampled is trained, and nothing else.

The tools of a third of the rows are in this process. Those of another third, and their verdicts, come by URL from a
server of a type that this project does not know. The others are the work of an agent program at a URL.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_program import running_agent
from mailroom import TOOL, Mailroom, mailroom, settings
from speed import patiently
from tiny_run import TWO_STEPS, run_environment
from tool_policy import AGENT, MAIL_AGENT, OUTSIDE_AGENT, write_policy

from tests.office import small_office

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

OUTSIDE = f"env.nemo_gym.{OUTSIDE_AGENT}.responses_api_agents.external_agent"
ROOT = Path(__file__).resolve().parents[2]
TABLES = "env.nemo_gym.workplace_assistant.resources_servers.workplace_assistant.tables"


@pytest.fixture
def server() -> Iterator[Mailroom]:
    with mailroom() as made:
        yield made


@pytest.fixture
def agent_url() -> Iterator[str]:
    with running_agent() as url:
        yield url


def test_turns_of_a_real_run_are_trained(tmp_path: Path, server: Mailroom, agent_url: str) -> None:
    write_policy(tmp_path, small_office())
    overrides = {
        **TWO_STEPS,
        "grpo.async_grpo.max_trajectory_age_steps": 0,  # else a step's weights may be newer than those that sampled
        "policy.max_total_sequence_length": 512,
        "policy.generation.max_new_tokens": 48,
        TABLES: small_office(),
        **settings(server.url),
        f"{OUTSIDE}.url": agent_url,
        f"{OUTSIDE}.resources_server.name": "workplace_assistant",
    }
    env = run_environment(tmp_path, overrides) | {"MODEL_PATH": str(tmp_path / "model"), "EXP_NAME": "tools"}
    done = subprocess.run(
        ["make", "stage1.1"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(580), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    records = [
        json.loads(line) for line in (tmp_path / "tools" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == 2
    for step in steps:
        num_rollouts = step["train/num_rollouts"]
        assert num_rollouts == 8
        agents = {name for name in (AGENT, MAIL_AGENT, OUTSIDE_AGENT) if f"train/{name}/valid_rate" in step}
        assert all(step[f"train/{name}/valid_rate"] == 1.0 for name in agents)
        assert step["train/num_prefix_breaks"] == 0
        assert step["train/turns_per_sample/mean"] >= 1.5  # a call, the tool's answer, a last word
        assert step["train/total_turns"] == pytest.approx(step["train/turns_per_sample/mean"] * num_rollouts)
        # Every sampled token of every turn, once; prompts and the tools' answers are more, and are not trained.
        num_sampled = step["train/gen_tokens_per_sample/mean"] * num_rollouts
        assert step["train/global_valid_toks"] == pytest.approx(num_sampled)
        assert step["train/total_num_tokens"] > 2 * step["train/global_valid_toks"]
        # The log-probabilities of the second turn agree with the engine's: its prompt was the ids that it had sampled.
        assert step["train/logprob_error_max"] < 1e-3
    rewards = [step[f"train/{MAIL_AGENT}/reward"] for step in steps if f"train/{MAIL_AGENT}/reward" in step]
    assert rewards, "no row of the server by URL was trained"
    assert server.calls[f"/{TOOL}"] > 0
    assert server.calls["/seed_session"] == server.calls["/verify"] >= 2
    assert any(f"train/{AGENT}/reward" in step for step in steps)
    captured = [step for step in steps if f"train/{OUTSIDE_AGENT}/reward" in step]
    assert captured, "no row of the agent by URL was trained"
    for step in captured:
        names = ("model_calls", "num_roots", "lost_share")
        calls, roots, lost = (step[f"train/{OUTSIDE_AGENT}/{name}/mean"] for name in names)
        assert calls > 1 and (roots, lost) == (1.0, 0.0)
    assert 0.0 < sum(step["train/reward"] for step in steps) / 2 < 1.0
