"""Why a step teaches little: each cause by its numbers, from the limit on, with what to change."""

from __future__ import annotations

import re

import pytest

from recipes.config.keys.schema import CONFIG_DIR
from recipes.grpo.causes import Cause, causes

GOOD = {
    "num_groups": 16.0,
    "num_groups_zero_variance": 3.0,
    "num_rollouts": 128.0,
    "num_sequences": 128.0,
    "rollout_status/timed_out": 12.0,
    "truncation_rate": 0.2,
    "num_masked_seqs_by_logprob_error": 12.0,
    "is_oob_ratio": 0.1,
    "invalid_tool_call_rate": 0.2,
    "total_reward/max": 1.0,
    "gen_tokens_per_sample/max": 2048.0,
    "token_age/mean": 1.25,
}


def found(**values: float) -> list[Cause]:
    """Return the causes of a good step with other values; `__` stands for a slash in their names."""
    changed = {name.replace("__", "/"): value for name, value in values.items()}
    return causes({f"train/{name}": value for name, value in (GOOD | changed).items()})


def test_a_good_step_and_a_validation_have_no_cause() -> None:
    assert found() == causes({}) == causes({"validation/accuracy": 0.0}) == []


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "no verdict",
            {"rollout_status__env_failed": 1.0},
            "13 of 128 rollouts have no verdict (1 env_failed, 12 timed",
        ),
        ("paused", {"num_paused_environments": 1.0, "num_prompts_set_aside": 7.0}, "1 environments are paused, since"),
        ("not finite", {"skipped_steps": 2.0}, "loss or gradients were not finite in 2 optimizer steps, which left"),
        ("masked", {"num_masked_seqs_by_logprob_error": 13.0}, "13 of 128 sequences are masked: engine and policy"),
        ("truncated", {"truncation_rate": 0.25}, "25% of the answers are cut at their limit (the longest has 2,048 t"),
        (
            "wrong form",
            {"invalid_tool_call_rate": 0.25, "num_penalized_turns": 32.0},
            "25% of the answers call a tool in a wrong form; grpo.invalid_tool_call_advantage replaces what",
        ),
        (
            "wrong form",
            {"malformed_thinking_rate": 0.5, "num_penalized_turns": 1.0},
            "50% of the answers think in a wrong form; grpo.malformed_",
        ),
        (  # a penalty that is off, or without effect since rewards do not decide, replaces nothing
            "wrong form",
            {"malformed_thinking_rate": 0.5},
            "50% of the answers think in a wrong form; check the tool and reasoning parsers",
        ),
        ("off policy", {"is_oob_ratio": 0.2}, "20% of the importance ratios are out of bounds (the mean token is 1.2"),
        (
            "equal rewards",
            {"num_groups_zero_variance": 15.0},
            "15 of 16 groups scored alike: hardly any gradient; take",
        ),
    ],
)
def test_each_cause_is_said_with_its_numbers(name: str, values: dict[str, float], said: str) -> None:
    [cause] = found(**values)
    assert cause.name == name
    assert cause.text.startswith(said)


@pytest.mark.parametrize(
    ("alike", "total", "best", "said"),
    [
        (16.0, 16.0, 0.0, "16 of 16 groups scored alike: no gradient; take easier rows ("),
        (15.0, 16.0, 1.0, "15 of 16 groups scored alike: hardly any gradient; take rows that are neither"),
        (14.0, 16.0, 0.0, ""),
        (1.0, 1.0, -1.0, "1 of 1 groups scored alike: no gradient; take easier"),
        (0.0, 0.0, 1.0, ""),
    ],
)
def test_equal_rewards_ask_for_other_rows(alike: float, total: float, best: float, said: str) -> None:
    texts = [cause.text for cause in found(num_groups_zero_variance=alike, num_groups=total, total_reward__max=best)]
    assert [text[: len(said)] for text in texts] == ([said] if said else [])
    assert all("make profile" in text for text in texts)


def test_causes_come_with_what_hides_others_first_and_name_keys_that_exist() -> None:
    worst = found(
        rollout_status__judge_failed=64.0,
        num_paused_environments=2.0,
        skipped_steps=1.0,
        num_masked_seqs_by_logprob_error=64.0,
        num_groups_zero_variance=16.0,
        truncation_rate=1.0,
        malformed_thinking_rate=1.0,
        is_oob_ratio=1.0,
    )
    assert [cause.name for cause in worst][:3] == ["no verdict", "paused", "not finite"] and len(worst) == 8
    base = (CONFIG_DIR / "grpo_base.yaml").read_text(encoding="utf-8")
    keys = {key for cause in worst for key in re.findall(r"\b(?:grpo|policy|loss_fn)\.[a-z_.]+[a-z]", cause.text)}
    assert len(keys) > 5
    assert not [key for key in keys if not re.search(rf"^ +{key.rpartition('.')[2]}:", base, re.MULTILINE)]
