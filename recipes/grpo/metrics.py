"""What is measured in one training step, and how many rollouts become a few numbers.

Invariant: a statistic of rewards is taken in float64 over valid rollouts only; a rollout without a verdict is counted,
never averaged. Groups weigh equally, however many valid members they have.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recipes.errors import RunError
from recipes.types import PREFIX_BREAKS, Group, RolloutHeader, RolloutStatus

logger = logging.getLogger(__name__)

TIMING_PREFIX = "timing/train/"
PASS_REWARD = 1.0  # smallest reward that counts as solved in pass rates
_SPECULATED = ("spec_num_drafts", "spec_num_draft_tokens", "spec_num_accepted_tokens")  # an engine's counts
_MAX_MASKED_SHARE, _MASKED_STEPS = 0.1, 5  # the alarm: of the sequences, for this many steps in a row
_LARGEST = (
    1e100  # of a verifier's number: a server may mean "no limit" by the largest there is, and sums must be finite
)
_MAX_KIND = 120  # characters of a reason that say its kind

PHASES: Mapping[str, str] = {
    "exposed_generation": "wait",
    "reward_calculation": "reward",
    "advantage_calculation": "adv",
    "data_processing": "data",
    "policy_training": "train",
    "weight_sync": "refit",
    "validation": "val",
    "checkpointing": "save",
}
"""Phases of a step in the order they run, with the short name that the progress line prints."""

DURATION_KEYS = frozenset({"trajectory_duration_s", "env_duration_s"})
"""Keys whose values are pooled over all rollouts of the batch: a percentile of group means would hide the slow ones."""


class StepMetrics:
    """Collects the metrics of one step. Each key is set once; the seconds of a phase that is entered again add up."""

    def __init__(self, step: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start an empty record of `step` (steps done when it is logged; 0 is before training)."""
        self.step = step
        self._clock = clock
        self._values: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._phase: tuple[str, float] | None = None  # name and start of the phase that runs now

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the block, also when it raises, to `timing/train/<name>`."""
        start = self._clock()
        self._phase = (name, start)
        try:
            yield
        finally:
            self._phase = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def phase(self) -> tuple[str, float] | None:
        """Return the phase that runs now and its seconds so far; None between phases. Any thread may ask."""
        phase = self._phase
        return None if phase is None else (phase[0], self._clock() - phase[1])

    def add(self, values: Mapping[str, float], *, prefix: str = "train/") -> None:
        """Add every entry of `values` under `prefix`; raises `ValueError` when a key is already set."""
        for name, value in values.items():
            key = prefix + name
            if key in self._values:
                raise ValueError(f"metric {key!r} of step {self.step} was already set to {self._values[key]}")
            self._values[key] = float(value)

    def as_dict(self) -> dict[str, float]:
        """Return all values and timings by their full key."""
        return {**self._values, **{TIMING_PREFIX + name: seconds for name, seconds in self._seconds.items()}}


def aggregate_rollouts(groups: Sequence[Group], version: int, *, compares: bool = True) -> dict[str, float]:
    """Summarise the rollouts of a batch that is trained at weight `version`.

    `compares`: a rollout is compared with the others of its group. Else a group of one trains, and so does one whose
    rewards are all equal.
    """
    columns: dict[str, list[Any]] = {}
    for group in groups:
        for key, value in _group_metrics(group).items():
            columns.setdefault(key, []).append(value)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    columns["trajectory_duration_s"] = [rollout.seconds for rollout in rollouts]
    columns["env_duration_s"] = [rollout.env_seconds for rollout in rollouts]
    metrics = merge_groups(columns)
    rewards = [float(rollout.reward) for rollout in rollouts if rollout.is_valid and rollout.reward is not None]
    if rewards:
        metrics["reward"] = math.fsum(rewards) / len(rewards)  # over rollouts; total_reward/mean is over groups
    for key in DURATION_KEYS:
        if columns[key]:
            metrics[f"{key}/p50"] = percentile(columns[key], 0.50)
            metrics[f"{key}/p99"] = percentile(columns[key], 0.99)
    return {**metrics, **_counts(groups, rollouts, compares=compares), **_ages(groups, version)}


def rates(values: Mapping[str, float], seconds: float, *, train_gpus: int, generation_gpus: int) -> dict[str, float]:
    """Return what a step of `seconds` did per second, and per second and GPU, from its other metrics.

    Where there are no GPUs, a worker of the policy and an engine count as one each.
    """
    tokens, samples = values["train/total_num_tokens"], values["train/num_rollouts"]
    training = values["timing/train/policy_training"]
    found = {
        "performance/samples_per_sec": samples / seconds,
        "performance/tokens_per_sec": tokens / seconds,
        "performance/tokens_per_sec_per_gpu": tokens / seconds / (train_gpus + generation_gpus),
        "performance/train_tokens_per_sec": values["train/global_valid_toks"] / seconds,
        "timing/train/valid_tokens_per_sec_per_gpu": values["train/global_valid_toks"] / seconds / train_gpus,
    }
    if training > 0:
        found["performance/policy_training_tokens_per_sec"] = tokens / training
        found["performance/policy_training_tokens_per_sec_per_gpu"] = tokens / training / train_gpus
    return found


def engine_samples(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the samples of all engines as `generation_metrics/NAME...`: of each engine, and of all together.

    Of all engines together a mean is the mean over the engines, a maximum the largest, a count of tokens the sum.
    """
    found = {
        f"generation_metrics/engine_{index}/{name}": value
        for index, samples in enumerate(engines)
        for name, value in samples.items()
    }
    for name in sorted({name for samples in engines for name in samples}):
        values = [samples[name] for samples in engines if name in samples]
        total = max(values) if name.endswith("/max") else math.fsum(values)
        found[f"generation_metrics/{name}"] = total / len(values) if name.endswith("/mean") else total
    return found | _speculation(found)


def _speculation(found: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of speculative decoding, the share of drafted tokens accepted and the tokens per draft."""
    counts = {f"train/vllm/{name}": found.get(f"generation_metrics/{name}", 0.0) for name in _SPECULATED}
    drafts, drafted, accepted = counts.values()
    if not drafted:
        return {}
    return counts | {
        "train/vllm/spec_acceptance_rate": accepted / drafted,
        "train/vllm/spec_acceptance_length": 1 + accepted / drafts,  # with the token that the model itself samples
    }


def merge_groups(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Reduce per-group values by name: extrema stay extrema, `total_turns` is summed, the rest is averaged.

    A `*_rate` is averaged whatever its name starts with. Columns that are not numbers are returned as they are.
    """
    merged: dict[str, Any] = {}
    for key, values in columns.items():
        if not values:
            continue
        if not all(isinstance(value, int | float) for value in values):
            merged[key] = list(values)
        elif key in DURATION_KEYS:
            merged[key] = math.fsum(values) / len(values)
            merged[f"{key}/max"] = max(values)
            merged[f"{key}/p95"] = percentile(values, 0.95)
        else:
            merged[key] = _reduce(key, values)
    return merged


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest measured value that at least `share` of the values lie below; nothing is interpolated."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * share))])


def _reduce(key: str, values: Sequence[float]) -> float:
    is_rate = key.endswith("_rate")
    if not is_rate and (key.endswith("/min") or key.startswith("min_")):
        return min(values)
    if not is_rate and (key.endswith("/max") or key.startswith("max_")):
        return max(values)
    if key == "total_turns":
        return sum(values)
    return math.fsum(values) / len(values)


def _group_metrics(group: Group) -> dict[str, float]:
    """Return the numbers of one group; a group without valid members has only its valid rate."""
    valid = [rollout for rollout in group.rollouts if rollout.is_valid]
    agent = group.agent
    metrics: dict[str, float] = {f"{agent}/valid_rate": len(valid) / len(group.rollouts)}
    if not valid:
        return metrics
    rewards = [float(rollout.reward) for rollout in valid if rollout.reward is not None]
    tokens = [float(rollout.num_generated_tokens) for rollout in valid]
    metrics[f"{agent}/reward"] = math.fsum(rewards) / len(rewards)
    metrics.update(_spread("total_reward", rewards))
    metrics.update(_spread("gen_tokens_per_sample", tokens))
    metrics.update(_spread("total_tokens_per_sample", [float(rollout.num_tokens) for rollout in valid]))
    metrics.update(_spread("turns_per_sample", [float(rollout.num_turns) for rollout in valid]))
    metrics["mean_gen_tokens_per_sample"] = math.fsum(tokens) / len(tokens)
    metrics["max_gen_tokens_per_turn/max"] = float(max(rollout.longest_answer_tokens for rollout in valid))
    metrics["total_turns"] = float(sum(rollout.num_turns for rollout in valid))
    metrics["natural_termination_rate"] = sum(r.finish_reason == "stop" for r in valid) / len(valid)
    metrics["truncation_rate"] = sum(r.status is RolloutStatus.TRUNCATED for r in valid) / len(valid)
    for name in sorted({name for rollout in valid for name in rollout.metrics}):
        extras = [float(rollout.metrics[name]) for rollout in valid if name in rollout.metrics]
        if all(map(math.isfinite, extras)):
            metrics.update(_spread(f"{agent}/{name}", [min(max(extra, -_LARGEST), _LARGEST) for extra in extras]))
    return metrics


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, extrema, median and, where it is defined, the sample standard deviation."""
    spread = {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
        f"{name}/median": statistics.median(values),
    }
    if len(values) > 1:
        spread[f"{name}/stddev"] = statistics.stdev(values)
    return spread


def _counts(groups: Sequence[Group], rollouts: Sequence[RolloutHeader], *, compares: bool) -> dict[str, float]:
    """Count how the rollouts ended, and the groups without a training signal."""
    statuses = Counter(rollout.status for rollout in rollouts)
    counts = {f"rollout_status/{status.value}": float(statuses[status]) for status in RolloutStatus}
    prompts = [rollout.num_prompt_tokens for rollout in rollouts if rollout.num_turns]
    if prompts:
        counts["mean_prompt_length"] = sum(prompts) / len(prompts)  # tokens before the first answer
    rewards = [{rollout.reward for rollout in group.rollouts if rollout.is_valid} for group in groups]
    trainable = [group.num_valid >= (2 if compares else 1) for group in groups]
    if compares:
        alike = (ok and len(distinct) == 1 for ok, distinct in zip(trainable, rewards, strict=True))
        counts["num_groups_zero_variance"] = float(sum(alike))
    return {
        **counts,
        "num_rollouts": float(len(rollouts)),
        "num_sequences": float(sum(len(rollout.sequences) for rollout in rollouts)),
        "num_prefix_breaks": math.fsum(rollout.metrics.get(PREFIX_BREAKS, 0.0) for rollout in rollouts),
        "num_flagged_samples": float(sum(rollout.is_flagged for rollout in rollouts)),
        "total_num_tokens": float(sum(rollout.num_tokens for rollout in rollouts)),  # unpadded, prompts included
        "num_groups": float(len(groups)),
        "num_groups_too_few_valid": float(trainable.count(False)),
    }


def _ages(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return how many weight versions old the groups (when started) and the tokens (when sampled) are."""
    if not groups:
        return {}
    group_ages = [version - group.version for group in groups]
    ages = {
        "avg_trajectory_age": sum(group_ages) / len(group_ages),
        "max_trajectory_age": float(max(group_ages)),
    }
    spans = [
        (version - sampled_at, count)
        for group in groups
        for rollout in group.rollouts
        if rollout.is_valid
        for sampled_at, count in rollout.tokens_by_version
    ]
    if spans:
        ages["token_age/mean"] = sum(age * count for age, count in spans) / sum(count for _, count in spans)
        ages["token_age/max"] = float(max(age for age, _ in spans))
    return ages


@dataclass(slots=True)
class Alarms:
    """What goes wrong in several steps in a row, counted since the start of the process."""

    masked_steps: int = 0  # with too many sequences masked by the mismatch test
    skipped_steps: int = 0  # without an optimizer step whose loss and gradients were finite

    def masked(self, values: Mapping[str, float], step: int) -> dict[str, float]:
        """Count the steps in which the mismatch test masks more than a tenth of the sequences; say so.

        Training goes on with the sequences that engine and policy agree on. Without a warning nobody would see that
        it learns from easy prompts only.
        """
        share = values.get("train/num_masked_seqs_by_logprob_error", 0.0) / values["train/num_sequences"]
        self.masked_steps = self.masked_steps + 1 if share > _MAX_MASKED_SHARE else 0
        if self.masked_steps >= _MASKED_STEPS:
            logger.error(
                "step %d: %.0f%% of the sequences are masked because engine and policy disagree on their tokens "
                "(grpo.seq_logprob_error_threshold), more than a tenth in each of the last %d steps",
                step,
                100 * share,
                self.masked_steps,
            )
        return {"masked_seqs_share": share, "mismatch_alarm_steps": float(self.masked_steps)}

    def skipped(self, values: Mapping[str, float], step: int, *, num_optimizer_steps: int) -> None:
        """Count the steps in which the policy skipped all of its optimizer steps; say how many it skipped."""
        count = values.get("train/skipped_steps", 0.0)
        self.skipped_steps = self.skipped_steps + 1 if count >= num_optimizer_steps else 0
        if count:
            logger.error(
                "step %d: loss or gradients are not finite in %.0f of %d optimizer steps, which leave the weights as"
                " they are",
                step,
                count,
                num_optimizer_steps,
            )

    def end_if_stuck(self, max_skipped_steps: int) -> None:
        """Raise `RunError` after more steps in a row without finite gradients than allowed."""
        if self.skipped_steps > max_skipped_steps:
            raise RunError(
                f"loss or gradients were not finite in each of the last {self.skipped_steps} steps, more than "
                f"policy.max_skipped_steps = {max_skipped_steps}: the weights of the last checkpoint are good; "
                "pass_rates.jsonl names the rows of these steps, rollouts/train.jsonl has some of their rollouts"
            )


def metric_key(name: str | None) -> str | None:
    """Translate `val:NAME` or `train:NAME` of the configuration to the key of metrics.jsonl."""
    if name is None:
        return None
    kind, _, rest = name.partition(":")
    return f"{'validation' if kind == 'val' else kind}/{rest}"


def metrics_record(step: int, now: float, values: Mapping[str, float]) -> dict[str, Any]:
    """Return one line of metrics.jsonl; a value that is not finite is null there and named in `non_finite`."""
    record: dict[str, Any] = {"step": step, "time": now}
    record.update({key: value if math.isfinite(value) else None for key, value in values.items()})
    non_finite = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
    if non_finite:
        record["non_finite"] = non_finite
    return record


def group_pass_rate(group: Group) -> dict[str, Any]:
    """Return how often the row of a group was solved, by its rollouts with a verdict, as one line of a profile."""
    prompt = group.prompt
    return profile_entry(prompt.row_index + 1, prompt.prompt_id, group.agent, group.rollouts)


def profile_entry(
    line: int, row_id: str, agent: str, rollouts: Sequence[RolloutHeader], *, pass_reward: float = PASS_REWARD
) -> dict[str, Any]:
    """Return one line of a profile; answers without a verdict count neither as solved nor as failed.

    A reward of `pass_reward` and more counts as solved. `line` counts from 1. `kept_out` counts, by kind, the answers
    that have no verdict or are flagged, such as those of an agent that ran out of its time.
    """
    rewards = [rollout.reward for rollout in rollouts if rollout.is_valid and rollout.reward is not None]
    tokens = [rollout.num_generated_tokens for rollout in rollouts]
    entry: dict[str, Any] = {
        "line": line,
        "row_id": row_id,
        "agent": agent,
        "pass_rate": sum(reward >= pass_reward for reward in rewards) / len(rewards) if rewards else None,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "num_samples": len(rollouts),
        "num_scored": len(rewards),
        "mean_tokens": sum(tokens) / len(tokens) if tokens else 0.0,
    }
    if not rewards:
        entry["reason"] = rollouts[0].reason if rollouts else "no rollouts"
    if kept_out := Counter(_kind(rollout) for rollout in rollouts if rollout.is_flagged or not rollout.is_valid):
        entry["kept_out"] = dict(kept_out.most_common())
    return entry


def _kind(rollout: RolloutHeader) -> str:
    """Say in a few words why a rollout is kept out of the loss."""
    return f"{'flagged' if rollout.is_flagged else rollout.status}: {kind_of(rollout.reason)}"


def kind_of(reason: str) -> str:
    """Return a reason without its details, by which equal failures are counted together.

    A reason begins with names, of a status, a verifier, its server; each ends in a colon. What happened follows: a
    clause, or the name of an exception. The rest, and what stands in brackets, are details.
    """
    parts = reason.split(": ")
    happened = next((at for at, part in enumerate(parts) if " " in part or part.endswith("Error")), len(parts))
    return ": ".join(parts[: happened + 1]).partition(" (")[0][:_MAX_KIND]


def pick_rollouts(groups: Sequence[Group], limit: int) -> list[tuple[Group, int]]:
    """Choose rollouts to log as (group, member), always the same: some without a verdict, then agents in turn."""
    members = [(group, member) for group in groups for member in range(len(group.rollouts))]
    failed = [(group, member) for group, member in members if group.rollouts[member].reward is None]
    picked = failed[: limit // 4]
    for pair in _in_turn(groups):
        if len(picked) >= limit:
            break
        if not any(pair[0] is group and pair[1] == member for group, member in picked):
            picked.append(pair)
    return picked[:limit]


def rest_of_one(picked: Sequence[tuple[Group, int]], step: int) -> list[tuple[Group, int]]:
    """Return the other rollouts of a picked prompt: of another one each step, whose rewards differ if there is one."""
    differing = [group for group, _ in picked if len({one.reward for one in group.rollouts}) > 1]
    groups = differing or [group for group, _ in picked]
    of = groups[step % len(groups)] if groups else None
    known = {member for group, member in picked if group is of}
    return [(of, member) for member in range(len(of.rollouts)) if member not in known] if of else []


def _in_turn(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    """Yield one rollout of each prompt, agents alternating, then the second of each, and so on."""
    by_agent: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: (group.prompt.row_index, group.prompt.epoch)):
        by_agent.setdefault(group.agent, []).append(group)
    queues = [by_agent[agent] for agent in sorted(by_agent)]
    rows = max((len(mine) for mine in queues), default=0)
    order = [mine[row] for row in range(rows) for mine in queues if row < len(mine)]
    for member in range(max((len(group.rollouts) for group in groups), default=0)):
        yield from ((group, member) for group in order if member < len(group.rollouts))
