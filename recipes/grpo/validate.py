"""Held-out reward: every validation row, sampled k times and, when asked, once greedily, on the current weights."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.grpo.data import PromptDataset, last_user_text, row_id
from recipes.grpo.rollout import RolloutCollector, gather_results
from recipes.grpo.types import Group, PromptRef, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The validation set and how it is sampled."""

    dataset: PromptDataset
    sampling: Sampling
    num_generations: int
    greedy: bool
    deadline_seconds: float

    def run(self, collector: RolloutCollector, *, step: int) -> tuple[dict[str, float], list[Group]]:
        """Return metrics without prefix, and the sampled groups for the log."""
        start = time.monotonic()
        sampled = self._sample(collector, self.sampling, self.num_generations, step=step)
        metrics = reward_metrics(sampled, "")
        if self.greedy:
            best = Sampling(temperature=0.0, top_p=1.0, max_tokens=self.sampling.max_tokens)
            metrics |= reward_metrics(self._sample(collector, best, 1, step=step), "greedy_")
        metrics["seconds"] = time.monotonic() - start
        return metrics, sampled

    def _sample(self, collector: RolloutCollector, sampling: Sampling, num: int, *, step: int) -> list[Group]:
        rows = [self.dataset[index] for index in range(len(self.dataset))]
        futures = [
            collector.submit(collector.run_rollouts(row, sampling, affinity=index, num=num))
            for index, row in enumerate(rows)
        ]
        answers = gather_results(futures, deadline_seconds=self.deadline_seconds, what="validation")
        return [
            Group(
                prompt=PromptRef(epoch=0, row_index=index, prompt_id=row_id(row)),
                agent=row["agent_ref"]["name"],
                prompt_text=last_user_text(row),
                target_step=step,
                version=step,
                rollouts=rollouts,
            )
            for index, (row, rollouts) in enumerate(zip(rows, answers, strict=True))
        ]


def reward_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    """Return mean rewards over rollouts with a verdict: overall, per agent, pass@k, length, and the failures."""
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    rollouts: list[Rollout] = []
    for group in groups:
        rollouts += group.rollouts
        by_agent[group.agent] += [r.reward for r in group.rollouts if r.is_valid and r.reward is not None]
    rewards = [reward for values in by_agent.values() for reward in values]
    solved = [any(r.reward is not None and r.reward > 0 for r in group.rollouts) for group in groups]
    metrics = {
        f"{prefix}accuracy": _mean(rewards),
        f"{prefix}pass_k": _mean([float(value) for value in solved]),
        f"{prefix}avg_length": _mean([float(r.num_generated_tokens) for r in rollouts]),
        f"{prefix}num_failed": float(sum(not r.is_valid for r in rollouts)),
    }
    return metrics | {f"{agent}/{prefix}accuracy": _mean(values) for agent, values in by_agent.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
