"""What one engine reports of its queue and its cache, sampled over time (`vllm_cfg.enable_vllm_metrics_logger`).

vLLM calls `record` after every iteration of the engine. It would fail all requests if a logger raised, so `record`
never does: samples that cannot be taken are missing, and nothing else is.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

# NeMo RL's names of the timelines. In-flight and pending are requests, the cache is a share between 0 and 1.
IN_FLIGHT, PENDING, CACHE = "inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc"
TOKENS = "generation_tokens"
DRAFTS, DRAFT_TOKENS, ACCEPTED = "spec_num_drafts", "spec_num_draft_tokens", "spec_num_accepted_tokens"


class EngineSamples:
    """A stat logger of vLLM: it keeps the newest figures, and a task of the actor samples them at an interval."""

    def __init__(self) -> None:
        self._newest = {IN_FLIGHT: 0.0, PENDING: 0.0, CACHE: 0.0}
        self._sums = dict.fromkeys(self._newest, 0.0)
        self._maxima = dict.fromkeys(self._newest, 0.0)
        self._num_samples = 0
        self._num_tokens = 0
        self._speculated: dict[str, float] = {}  # empty where the engine does not speculate
        self._has_warned = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Note the figures of one iteration of the engine; vLLM calls it and passes None for what it has not got."""
        try:
            if scheduler_stats is not None:
                self._newest = {
                    IN_FLIGHT: float(scheduler_stats.num_running_reqs),
                    PENDING: float(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs),
                    CACHE: float(scheduler_stats.kv_cache_usage),
                }
                if scheduler_stats.spec_decoding_stats is not None:
                    self._count(scheduler_stats.spec_decoding_stats)
            if iteration_stats is not None:
                self._num_tokens += int(iteration_stats.num_generation_tokens)
        except Exception:
            if not self._has_warned:
                logger.warning("an engine's statistics cannot be read; its samples are incomplete", exc_info=True)
            self._has_warned = True

    def _count(self, stats: Any) -> None:
        counts = {DRAFTS: stats.num_drafts, DRAFT_TOKENS: stats.num_draft_tokens, ACCEPTED: stats.num_accepted_tokens}
        self._speculated = {name: self._speculated.get(name, 0.0) + count for name, count in counts.items()}

    def log_engine_initialized(self) -> None:
        """Do nothing when vLLM says that the engine is up."""

    def sample(self) -> None:
        """Add the newest figures to the samples."""
        self._num_samples += 1
        for name, value in self._newest.items():
            self._sums[name] += value
            self._maxima[name] = max(self._maxima[name], value)

    async def sample_at(self, interval_seconds: float) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(interval_seconds)
            self.sample()

    def take(self) -> dict[str, float]:
        """Return `NAME/mean`, `NAME/max`, generated tokens and drafts since the last call; {} without a sample."""
        if not self._num_samples:
            return {}
        found = {f"{name}/mean": total / self._num_samples for name, total in self._sums.items()}
        found |= {f"{name}/max": value for name, value in self._maxima.items()}
        found |= {TOKENS: float(self._num_tokens), **self._speculated}
        self._speculated = {}
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._maxima = dict.fromkeys(self._maxima, 0.0)
        self._num_samples = self._num_tokens = 0
        return found
