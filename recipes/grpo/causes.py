"""Why a step teaches little: each cause with its numbers and what to change, said alike in log, status and report.

A cause is read from the metrics of one step alone. `make why` adds what only the course of a run shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_ALIKE_SHARE = 0.9  # of a step's groups: when the answers to so many earn the same, hardly anything is learned
_LOST_SHARE = 0.1  # of the rollouts without a verdict
_TRUNCATED_SHARE = 0.25  # of the answers
_MASKED_SHARE = 0.1  # of the sequences, by the mismatch test
_WRONG_CALL_SHARE = 0.25  # of the rollouts
_OUT_SHARE = 0.2  # of the tokens or sequences that have an importance ratio
_NO_VERDICT = ("env_failed", "judge_failed", "timed_out", "aborted")


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a step taught little."""

    name: str
    text: str  # numbers, and after a semicolon what to change


def causes(values: Mapping[str, float]) -> list[Cause]:
    """Return why a step taught little, by its metrics; empty for one that taught as it should."""
    found = [(name, rule(values)) for name, rule in _RULES.items()]
    return [Cause(name, text) for name, text in found if text]


def _equal_rewards(values: Mapping[str, float]) -> str:
    alike, total = _count(values, "num_groups_zero_variance"), _count(values, "num_groups")
    if not total or alike / total < _ALIKE_SHARE:
        return ""
    none, nothing = "no" if alike == total else "hardly any", values.get("train/total_reward/max", 1.0) <= 0
    rows = "easier rows" if nothing else "rows that are neither solved always nor never"
    fix = f"take {rows} (`make profile` finds them), or raise grpo.num_generations_per_prompt"
    return f"{alike:.0f} of {total:.0f} groups scored alike: {none} gradient; {fix}"


def _no_verdict(values: Mapping[str, float]) -> str:
    lost = {name: _count(values, f"rollout_status/{name}") for name in _NO_VERDICT}
    total, num_lost = _count(values, "num_rollouts"), sum(lost.values())
    if not total or num_lost / total < _LOST_SHARE:
        return ""
    kinds = ", ".join(f"{count:.0f} {name}" for name, count in lost.items() if count)
    return (
        f"{num_lost:.0f} of {total:.0f} rollouts have no verdict ({kinds}) and are left out; correct what `reason` "
        "says of them in rollouts/train.jsonl"
    )


def _truncated(values: Mapping[str, float]) -> str:
    share = _count(values, "truncation_rate")
    if share < _TRUNCATED_SHARE:
        return ""
    longest = _count(values, "gen_tokens_per_sample/max")
    return (
        f"{share:.0%} of the answers are cut at their limit (the longest has {longest:,.0f} tokens); raise "
        "policy.generation.max_new_tokens and policy.max_total_sequence_length, or ask for shorter answers"
    )


def _masked(values: Mapping[str, float]) -> str:
    masked, total = _count(values, "num_masked_seqs_by_logprob_error"), _count(values, "num_sequences")
    if not total or masked / total < _MASKED_SHARE:
        return ""
    return (
        f"{masked:.0f} of {total:.0f} sequences are masked: engine and policy disagree on their tokens by more than "
        "grpo.seq_logprob_error_threshold; compare them on the start weights, and for experts set "
        "policy.router_replay.enabled"
    )


def _off_policy(values: Mapping[str, float]) -> str:
    share, age = _count(values, "is_oob_ratio"), _count(values, "token_age/mean")
    if share < _OUT_SHARE:
        return ""
    return (
        f"{share:.0%} of the importance ratios are out of bounds (the mean token is {age:.1f} weight versions old); "
        "lower grpo.async_grpo.max_trajectory_age_steps or policy.megatron_cfg.optimizer.lr"
    )


def _penalized(values: Mapping[str, float]) -> str:
    calls, thinking = _count(values, "invalid_tool_call_rate"), _count(values, "malformed_thinking_rate")
    if max(calls, thinking) < _WRONG_CALL_SHARE:
        return ""
    what, key = (
        (f"{calls:.0%} of the answers call a tool in a wrong form", "grpo.invalid_tool_call_advantage")
        if calls >= thinking
        else (f"{thinking:.0%} of the answers think in a wrong form", "grpo.malformed_thinking_advantage")
    )
    replaced = f"{key} replaces what they would earn: " if _count(values, "num_penalized_turns") else ""
    return f"{what}; {replaced}check the tool and reasoning parsers"


def _skipped(values: Mapping[str, float]) -> str:
    count = _count(values, "skipped_steps")
    if not count:
        return ""
    return (
        f"loss or gradients were not finite in {count:.0f} optimizer steps, which left the weights as they are; lower "
        "policy.megatron_cfg.optimizer.lr, or look at the rows of this step in pass_rates.jsonl"
    )


def _paused(values: Mapping[str, float]) -> str:
    count = _count(values, "num_paused_environments")
    if not count:
        return ""
    waiting = _count(values, "num_prompts_set_aside")
    return (
        f"{count:.0f} environments are paused, since too many of their rollouts end without a verdict, and "
        f"{waiting:.0f} prompts wait; correct what `reason` says of them in rollouts/train.jsonl"
    )


_RULES: Mapping[str, Callable[[Mapping[str, float]], str]] = {
    "no verdict": _no_verdict,
    "paused": _paused,
    "not finite": _skipped,
    "masked": _masked,
    "equal rewards": _equal_rewards,
    "truncated": _truncated,
    "wrong form": _penalized,
    "off policy": _off_policy,
}
"""Rules by the name of their cause, what hides other causes first."""


def _count(values: Mapping[str, float], name: str) -> float:
    return values.get(f"train/{name}", 0.0)
