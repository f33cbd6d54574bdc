"""A program that knows the `openai` package and nothing of this project: it is trained by its URL, and gets better."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_program import running_agent
from speed import patiently
from tiny_run import run_environment
from tool_policy import OUTSIDE_AGENT, make_lunch_row, write_policy

from tests.office import small_office

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(3600)]

OUTSIDE = f"env.nemo_gym.{OUTSIDE_AGENT}.responses_api_agents.external_agent"
TABLES = "env.nemo_gym.workplace_assistant.resources_servers.workplace_assistant.tables"
ROOT = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 80  # after them one rollout of twenty is malformed; after 40, one of four
NUM_STEPS, PROMPTS, SAMPLES = 16, 4, 8
NUM_COMPARED = 4  # steps at each end, of which the mean reward is compared
MIN_GAIN = 0.2  # one run went from 0.52 to 0.97
MAX_CALLS = 4


async def work(row: dict[str, Any]) -> dict[str, Any]:
    """Do one task: ask the policy, do what its calls say, until it makes none."""
    asked, server = row["responses_create_params"], row["model_server"]
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}}
        for tool in asked["tools"]
    ]
    messages: list[Any] = list(asked["input"])
    async with openai.AsyncOpenAI(base_url=server["base_url"], api_key="any", timeout=300) as client:
        for _ in range(MAX_CALLS):
            reply = await client.chat.completions.create(model=server["model"], messages=messages, tools=tools)  # type: ignore[arg-type]
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "Email deleted."} for call in message.tool_calls
            ]
    return {**row, "note": "done"}


def test_an_agent_written_with_the_openai_package_gets_better(tmp_path: Path) -> None:
    """Both emails are equally likely at first, and the model is never told which one is about lunch."""
    num_rows = NUM_STEPS * PROMPTS
    write_policy(tmp_path, small_office(), kinds=[make_lunch_row], num_rows=num_rows, num_steps=WARM_UP_STEPS)
    with running_agent(work) as url:
        overrides = {
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": SAMPLES,
            "grpo.max_num_steps": NUM_STEPS,
            "grpo.val_at_start": "false",
            "deadlines.rollout": 600,  # on a busy machine
            "deadlines.generation": 300,
            "grpo.val_at_end": "false",
            "grpo.async_grpo.max_trajectory_age_steps": 0,  # else a step's weights may be newer than those that sampled
            "policy.max_total_sequence_length": 512,
            "policy.generation.max_new_tokens": 48,
            "policy.megatron_cfg.optimizer.lr": 5.0e-4,
            TABLES: small_office(),
            f"{OUTSIDE}.url": url,
            f"{OUTSIDE}.resources_server.name": "workplace_assistant",
        }
        env = run_environment(tmp_path, overrides) | {"MODEL_PATH": str(tmp_path / "model"), "EXP_NAME": "agent"}
        done = subprocess.run(
            ["make", "stage1.1"],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=patiently(1200),
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    records = [
        json.loads(line) for line in (tmp_path / "agent" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step[f"train/{OUTSIDE_AGENT}/valid_rate"] == 1.0
        assert step[f"train/{OUTSIDE_AGENT}/lost_share/mean"] == 0.0
        # Each token that the engine sampled is trained, once, and the trainer finds it as likely as the engine did.
        num_sampled = step["train/gen_tokens_per_sample/mean"] * step["train/num_rollouts"]
        assert step["train/global_valid_toks"] == pytest.approx(num_sampled)
        assert step["train/logprob_error_max"] < 1e-3
    rewards = [step["train/reward"] for step in steps]
    before, after = statistics.fmean(rewards[:NUM_COMPARED]), statistics.fmean(rewards[-NUM_COMPARED:])
    assert after >= before + MIN_GAIN, rewards
