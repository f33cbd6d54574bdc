"""The shaping of rewards against numbers recorded from the reference implementation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.grpo.reward import AnswerFacts, is_on, scale, shape_effort, shape_length
from tests.configuration import block
from tests.recorded import cases


def facts_of(lengths: list[int], truncated: list[bool], marked: list[bool]) -> AnswerFacts:
    return AnswerFacts(
        first_lengths_B=torch.tensor(lengths, dtype=torch.float64),
        last_lengths_B=torch.tensor(lengths, dtype=torch.float64),
        is_truncated_B=torch.tensor(truncated),
        asks_low_effort_B=torch.tensor(marked),
    )


# The configuration's own checks refuse these before a run starts: a key without a value, a negative penalty.
REFUSED_BEFORE = ("dapo_missing_field", "dapo_negative_penalty")


@pytest.mark.parametrize("case", [c for c in cases("reward_shaping") if c.id not in REFUSED_BEFORE])
def test_reward_shaping(case: dict[str, Any]) -> None:
    given, cfg = case["inputs"], {"stop_properly_penalty_coef": None, **case["config"]}
    facts = facts_of(given["first_assistant_lengths"], given["truncated"], [False] * len(given["rewards"]))
    shaped = shape_length(
        torch.tensor(given["rewards"], dtype=torch.float64), facts, block("grpo.reward_shaping", **cfg)
    )
    assert shaped.tolist() == pytest.approx(case["expected"]["total_reward"], abs=1e-6)


@pytest.mark.parametrize("case", cases("reward_scaling"))
def test_reward_scaling(case: dict[str, Any]) -> None:
    scaled = scale(
        torch.tensor(case["inputs"]["rewards"], dtype=torch.float64), block("grpo.reward_scaling", **case["config"])
    )
    assert scaled.tolist() == pytest.approx(case["expected"]["total_reward"], abs=1e-6)


@pytest.mark.parametrize("case", cases("effort_levels"))
def test_effort_levels(case: dict[str, Any]) -> None:
    off = {"low_weight": 0.0, "low_penalty": 1.0, "low_ub": 64000, "low_string": ""}
    cfg = SimpleNamespace(**{**off, **(case["config"] or {}), "low_is_bounded": False})
    samples = case["inputs"]["samples"]
    rewards = torch.tensor([sample["reward"] for sample in samples], dtype=torch.float64)
    metrics: dict[str, float] = {}
    if is_on(cfg):
        asked = [[text for role, text in sample["input"] if role == "user"][-1] for sample in samples]
        lengths = [
            sample["last_message_tokens"] if sample["last_message_role"] == "assistant" else 0 for sample in samples
        ]
        marked = [cfg.low_string in text for text in asked]
        rewards, metrics = shape_effort(rewards, facts_of(lengths, [False] * len(samples), marked), cfg)
    assert rewards.tolist() == pytest.approx(case["expected"]["rewards"])
    shares = case["expected"]["length_rewards_low"]
    if shares:
        assert metrics["mean_length_reward_low"] == pytest.approx(sum(shares) / len(shares))
        low = case["expected"]["low_lengths"]
        assert metrics["mean_length_low"] == pytest.approx(sum(low) / len(low))
