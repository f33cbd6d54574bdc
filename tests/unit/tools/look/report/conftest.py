"""A run directory as the loop leaves it, written by the real logger from made-up rollouts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.grpo.log import RunLogger
from recipes.grpo.metrics import StepMetrics, aggregate_rollouts
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import LocalStore, group_of

AGENTS = ("math_with_judge", "mcqa", "reasoning_gym", "structured_outputs")
START = {"math_with_judge": 0.30, "mcqa": 0.45, "reasoning_gym": 0.20, "structured_outputs": 0.35}
END = {"math_with_judge": 0.72, "mcqa": 0.81, "reasoning_gym": 0.55, "structured_outputs": 0.93}


@dataclass(frozen=True)
class LoggerCfg:
    tensorboard_enabled: bool = False
    wandb_enabled: bool = False
    prometheus_address: str | None = None
    wandb: None = None
    num_val_samples_to_print: int = 0


def skill(agent: str, step: int, num_steps: int) -> float:
    """Chance of a right answer after `step` steps."""
    return START[agent] + (END[agent] - START[agent]) * (1 - math.exp(-3 * step / max(1, num_steps)))


def sample_group(rng: random.Random, row: int, step: int, num_steps: int, size: int = 8) -> Group:
    """Make one group with some truncated and some failed members."""
    agent = AGENTS[row % len(AGENTS)]
    version = max(0, step - 2)
    rollouts = []
    for _ in range(size):
        length = max(3, round(rng.gauss(24 - 8 * step / max(1, num_steps), 6)))
        split = rng.randrange(length)
        spans = (
            VersionSpan(version=version, start=0, end=split),
            VersionSpan(version=max(0, step - 1), start=split, end=length),
        )
        fate, right = rng.random(), rng.random() < skill(agent, step, num_steps)
        status = RolloutStatus.TRUNCATED if fate < 0.04 else RolloutStatus.COMPLETED
        reward: float | None = float(right and status is RolloutStatus.COMPLETED)
        reason = "answered 12, key 12" if right else "answered 17, key 12 <b>not bold</b>"
        if fate > 0.99:
            status, reward, reason = RolloutStatus.TIMED_OUT, None, "no verdict within 30 s from resources server"
        answer = "12" if right else "17"
        turn = Turn(
            prompt_token_ids=tuple(range(18)),
            token_ids=tuple(range(length)),
            logprobs=(-0.7,) * length,
            versions=spans,
            finish_reason="length" if status is RolloutStatus.TRUNCATED else "stop",
        )
        rollouts.append(
            Rollout(
                turns=(turn,),
                status=status,
                reason=reason,
                reward=reward,
                output_text=f"<think>\n7 + 5 = {answer}\n</think>\n\\boxed{{{answer}}}<|im_end|>",
                seconds=rng.uniform(0.4, 1.5),
                env_seconds=rng.uniform(0.0, 0.1),
            )
        )
    prompt = PromptRef(epoch=0, row_index=row, prompt_id=f"{row:016x}")
    text = f"What is 7 + 5? Use \\boxed{{}} & <script>alert({row})</script>"
    return group_of(rollouts, prompt=prompt, agent=agent, prompt_text=text, target_step=step - 1, version=version)


def validation(metrics: StepMetrics, step: int, num_steps: int) -> None:
    values = {}
    for agent in AGENTS:
        values[f"{agent}/accuracy"] = skill(agent, step, num_steps)
        values[f"{agent}/greedy_accuracy"] = skill(agent, step, num_steps) * 1.05
    for name in ("accuracy", "greedy_accuracy"):
        values[name] = sum(values[f"{agent}/{name}"] for agent in AGENTS) / len(AGENTS)
    metrics.add(values, prefix="validation/")
    metrics.add({"validation": 2.5}, prefix="timing/train/")


def write_run(run_dir: Path, *, num_steps: int, planned: int = 40, val_period: int = 10) -> Path:
    """Write `num_steps` steps of a run that was to take `planned`."""
    rng = random.Random(7)
    run = RunLogger(run_dir, LoggerCfg(), num_steps=planned)
    for step in range(num_steps + 1):
        metrics = StepMetrics(step)
        if step:
            groups = [sample_group(rng, 4 * step + row, step, planned) for row in range(8)]
            add_training(metrics, groups, rng)
            run.log_rollouts("train", step, groups, LocalStore(), limit=8)
        if step % val_period == 0:
            validation(metrics, step, planned)
            held_out = [sample_group(rng, row, step, planned, size=1) for row in range(6)]
            run.log_rollouts("val", step, held_out, LocalStore(), limit=6)
        phases = [value for key, value in metrics.as_dict().items() if key.startswith("timing/train/")]
        metrics.add({"total_step_time": sum(phases) + 0.1}, prefix="timing/train/")
        run.log(metrics)
    run.close()
    resolved = {"grpo": {"max_num_steps": planned, "seed": 42}, "policy": {"model_name": "models/tiny-sft"}}
    (run_dir / "resolved.json").write_text(json.dumps(resolved), encoding="utf-8")
    lock = {
        "stage": "stage1.1",
        "seed": 42,
        "git": {"commit": "0123456789abcdef", "diff_sha256": ""},
        "data": {"train-split.jsonl": {"sha256": "77aa"}},
        "packages": {"torch": "2.13.0", "ray": "2.60.0"},
    }
    (run_dir / "run.lock.json").write_text(json.dumps(lock), encoding="utf-8")
    return run_dir


def add_training(metrics: StepMetrics, groups: list[Group], rng: random.Random) -> None:
    rollouts = aggregate_rollouts(groups, version=metrics.step - 1)
    metrics.add(rollouts)
    gap = 10 ** rng.gauss(-1.6, 0.15)
    metrics.add(
        {
            "loss": rng.gauss(0, 0.02),
            "grad_norm": rng.uniform(0.4, 1.4),
            "logprob_error_max": gap,
            "token_mult_prob_error": 1 + gap / 20,
        }
    )
    seconds = {
        "exposed_generation": rng.uniform(0.3, 0.8),
        "reward_calculation": 0.01,
        "advantage_calculation": 0.01,
        "data_processing": 0.03,
        "policy_training": rng.uniform(1.8, 2.2),
        "weight_sync": rng.uniform(0.1, 0.15),
    }
    metrics.add(seconds, prefix="timing/train/")
    speed = {"generation_tokens_per_sec": rng.gauss(620, 30), "train_tokens_per_sec": rng.gauss(1500, 50)}
    metrics.add(speed, prefix="performance/")
    metrics.add({"generation": 0.18, "policy": 0.17}, prefix="idle/")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run directory of the given number of steps."""
    return lambda **options: write_run(tmp_path / "smoke-s42", **options)
