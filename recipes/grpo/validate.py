"""Held-out reward: every validation row, sampled k times and, when asked, once greedily, on the current weights."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.environments.contract.rows import last_user_text
from recipes.grpo.data import PromptDataset, row_id
from recipes.grpo.preference import unknown_tool_rate
from recipes.grpo.rollout import RolloutCollector, gather_results
from recipes.types import Group, PromptRef, Row, Sampling


class _StoppedError(Exception):
    """The run is to end before all is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSet:
    """The validation set and how it is sampled."""

    dataset: PromptDataset
    sampling: Sampling
    num_generations: int
    greedy: bool
    deadline_seconds: float
    compares: Callable[[Row], bool]  # whether the answers to a row are compared: one alone is not sampled

    def run(
        self, collector: RolloutCollector, *, step: int, is_stopped: Callable[[], bool]
    ) -> tuple[dict[str, float], list[Group]] | None:
        """Return the metrics, their names without `validation/`, and the sampled groups for the log.

        None once `is_stopped`: it is asked each second, and then what is not sampled yet is given up.
        """

        def look() -> None:
            if is_stopped():
                raise _StoppedError

        start = time.monotonic()
        try:
            sampled = self._sample(collector, self.sampling, self.num_generations, step=step, look=look)
            metrics = reward_metrics(sampled, "")
            if self.greedy:
                best = Sampling(temperature=0.0, top_p=1.0, max_tokens=self.sampling.max_tokens)
                metrics |= reward_metrics(self._sample(collector, best, 1, step=step, look=look), "greedy_")
        except _StoppedError:
            return None
        metrics["seconds"] = time.monotonic() - start
        return metrics, sampled

    def _sample(
        self, collector: RolloutCollector, sampling: Sampling, num: int, *, step: int, look: Callable[[], None]
    ) -> list[Group]:
        rows = {index: self.dataset[index] for index in range(len(self.dataset))}
        rows = {index: row for index, row in rows.items() if num > 1 or not self.compares(row)}
        futures = [
            collector.submit(collector.run_group(row, sampling, affinity=index, num=num)) for index, row in rows.items()
        ]
        try:
            stored = gather_results(futures, deadline_seconds=self.deadline_seconds, what="validation", look=look)
        finally:
            for future in futures:  # those that are done stay so
                future.cancel()
        return [
            Group(
                prompt=PromptRef(epoch=0, row_index=index, prompt_id=row_id(row)),
                agent=row["agent_ref"]["name"],
                prompt_text=last_user_text(row),
                target_step=step,
                version=step,
                rollouts=headers,
                tokens=tokens,
            )
            for (index, row), (headers, tokens) in zip(rows.items(), stored, strict=True)
        ]


def reward_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    """Return mean reward of rollouts with a verdict (overall, per agent), pass@k, mean length, number of failures.

    An agent whose rollouts all ended without a verdict has no mean: its metrics are left out, never 0.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    means: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = [r.reward for r in group.rollouts if r.is_valid and r.reward is not None]
        means[f"{prefix}accuracy"] += rewards
        means[f"{prefix}pass_k"] += [float(max(rewards) > 0)] if rewards else []
        means[f"{group.agent}/{prefix}accuracy"] += rewards
    means[f"{prefix}avg_length"] = [float(r.num_generated_tokens) for r in rollouts]
    metrics = {name: sum(values) / len(values) for name, values in means.items() if values}
    metrics |= unknown_tool_rate(rollouts, prefix)
    return metrics | {f"{prefix}num_failed": float(sum(not r.is_valid for r in rollouts))}
