"""One run: its parts, and the state that a checkpoint keeps. Built by `setup`, driven by `train`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from recipes.config.keys.derive import derive
from recipes.config.tree import Config
from recipes.errors import PolicyError, RecipeError, RunError, StalledError, TokensLostError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.checkpoint import LedgerEntry, SavedState, prune
from recipes.grpo.data import DataIdentity
from recipes.grpo.log import RunLogger
from recipes.grpo.metrics import Alarms, StepMetrics, aggregate_rollouts, engine_samples, metric_key, rates
from recipes.grpo.refit import WeightSink, WeightSource
from recipes.grpo.rollout import RolloutCollector
from recipes.grpo.saving import CheckpointSaver, Saved
from recipes.grpo.validate import ValidationSet
from recipes.rollouts.group import Sampler
from recipes.stop import StopRequest
from recipes.types import Group, TrainBatch

logger = logging.getLogger(__name__)

_ROLLOUTS_LOGGED = 8  # per step: enough to see what the policy writes, while the log stays smaller than the checkpoints


class PolicyHandle(WeightSource, Protocol):
    """What the run asks of the policy; `policy.Policy` has it."""

    def logprobs(self, batch: TrainBatch) -> list[torch.Tensor]: ...

    def fetch(self, batch: TrainBatch) -> None: ...

    def train(self, batch: TrainBatch) -> dict[str, float]: ...

    def save(self, path: Path, *, with_optimizer: bool = True) -> None: ...

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None: ...

    def is_save_written(self) -> bool: ...

    def finish_save(self) -> float: ...

    def load(self, path: Path) -> None: ...

    def shutdown(self) -> None: ...


class GenerationHandle(WeightSink, Sampler, Protocol):
    """What the run asks of the engines; `generation.Generation` has it."""

    @property
    def num_engines(self) -> int: ...

    @property
    def num_engines_alive(self) -> int: ...

    def stats(self) -> list[dict[str, float]]: ...

    def take_samples(self) -> list[dict[str, float]]: ...

    def shutdown(self) -> None: ...


class WorkersHandle(Protocol):
    """What the run asks of the rollout workers, beside the groups; `rollouts.RolloutWorkers` has it."""

    num_lost: int

    def close(self) -> None: ...


class EnvironmentsHandle(Protocol):
    """What the run asks of the environments once they run."""

    @property
    def codec(self) -> Any: ...

    def close(self) -> Any: ...


@dataclass(slots=True)
class TrainState:
    """What training changes besides the weights."""

    step: int = 0  # batches trained on; also the version of the weights
    saved_step: int = 0
    ledger: list[LedgerEntry] = field(default_factory=list)  # prompts trained on
    step_seconds: float = 0.0  # moving average of the wall time of a step
    save_seconds: float = 0.0  # of the longest save
    metrics: dict[str, float] = field(default_factory=dict)  # of the step logged last

    def advance(self, groups: Sequence[Group]) -> None:
        """Count a step done and enter its prompts in the ledger."""
        self.step += 1
        self.ledger += [LedgerEntry(key=group.prompt.key, step=self.step) for group in groups]


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run, and the actions of the train loop that involve several of them."""

    config: Config
    policy: PolicyHandle
    generation: GenerationHandle
    environments: EnvironmentsHandle  # of the driver, which checks rows
    workers: WorkersHandle
    collector: RolloutCollector
    buffer: ReplayBuffer
    validation: ValidationSet | None
    logger: RunLogger
    stop: StopRequest
    state: TrainState
    data: DataIdentity  # of the training rows
    checkpoints: Path
    num_steps: int  # the step at which the run ends
    stop_judges: Callable[[], None] | None = None  # those that the run has started
    metrics: StepMetrics = field(default_factory=lambda: StepMetrics(0))  # of the step in progress
    _groups: list[Group] = field(default_factory=list)  # of the step in progress
    _logged_step: int = -1
    _alarms: Alarms = field(default_factory=Alarms)
    _logged_at: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0  # for which the loop has stood still for a checkpoint since the last record
    _last_stats: dict[str, float] = field(default_factory=dict)
    _saver: CheckpointSaver = field(init=False)

    def __post_init__(self) -> None:
        self._saver = CheckpointSaver(self.checkpoints, self.policy, prune=self._prune)
        self.stop.save_seconds = self.state.save_seconds

    def is_due(self, period: int) -> bool:
        """Whether the step just done is a multiple of `period`; never for 0 or less."""
        return period > 0 and self.state.step % period == 0

    def validates_now(self) -> bool:
        """Whether to validate the present weights: before the first step, periodically, after the last.

        Never once the run is asked to stop: the time that is left is for saving.
        """
        if self.stop.reason:
            return False
        cfg, step = self.config.grpo, self.state.step
        if step == 0:
            return cfg.val_at_start
        return (self.is_due(cfg.val_period) and step >= cfg.val_start_at) or (cfg.val_at_end and step == self.num_steps)

    def take(self) -> list[Group]:
        """Wait for the groups of the next step and remove them from the buffer; an empty list when there are none.

        None are waited for beyond a time limit. A save in progress goes on before and after; raises what made it fail.
        """
        self._groups = []
        self._saved(self._saver.advance())
        self._groups = self.buffer.take(
            self.state.step,
            deadline_seconds=self.config.deadlines.progress,
            waiting_for=self.collector.waiting_for,
            is_stopped=lambda: self.stop.requested(step_seconds=0.0),
        )
        self._saved(self._saver.advance())
        return self._groups

    def take_back(self, lost: TokensLostError) -> None:
        """Give the groups of a step that did not begin back to the collector, which samples those that are lost again.

        Raises `lost` when all can be read.
        """
        groups, self._groups = self._groups, []  # they are in the buffer from now on
        self.collector.take_back(groups, lost)

    def validate(self, metrics: StepMetrics) -> None:
        """Measure the held-out reward of the weights the engines hold; nothing once the run is asked to stop."""
        if self.validation is None:
            return
        measured = self.validation.run(
            self.collector, step=self.state.step, is_stopped=lambda: self.stop.requested(step_seconds=0.0)
        )
        if measured is None:
            return
        values, groups = measured
        metrics.add(values, prefix="validation/")
        self.end_if_good_enough(metrics.as_dict())
        store = self.collector.token_store
        self.logger.log_rollouts("val", self.state.step, groups, store, limit=_ROLLOUTS_LOGGED)

    def end_if_good_enough(self, metrics: Mapping[str, float]) -> None:
        """Make the present step the last one when its validation has reached the metric that ends the run.

        `metrics` are those of the step. Before the first step nothing ends: there would be nothing to hand over.
        """
        name, threshold = self.config.grpo.stop_at_validation_metric, self.config.grpo.stop_at_validation_threshold
        if name is None or threshold is None or self.state.step == 0:
            return
        value = metrics.get(f"validation/{name}")
        if value is None:
            measured = sorted(key.removeprefix("validation/") for key in metrics if key.startswith("validation/"))
            if measured:
                logger.error(
                    "step %d: grpo.stop_at_validation_metric %s was not measured; there is %s",
                    self.state.step,
                    name,
                    ", ".join(measured),
                )
        elif value >= threshold:
            logger.info("step %d: %s is %g, the run ends at %g", self.state.step, name, value, threshold)
            self.num_steps = self.state.step

    def log(self, metrics: StepMetrics, groups: Sequence[Group] = ()) -> None:
        """Record a step: its metrics, its rollouts', and how busy policy and engines were since the last record."""
        self._logged_step = metrics.step
        try:
            self._measure(metrics, groups)
        finally:  # a step that was trained has a record, also when measuring it fails
            self.state.metrics = metrics.as_dict()
            self.logger.log(metrics)
        self.logger.show(metrics)
        self._alarms.end_if_stuck(self.config.policy.max_skipped_steps)

    def _measure(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        now = time.monotonic()
        seconds, self._logged_at = now - self._logged_at, now
        if groups:
            self.state.step_seconds = 0.8 * (self.state.step_seconds or seconds) + 0.2 * seconds
            metrics.add(aggregate_rollouts(groups, self.state.step - 1))
            metrics.add({"buffer_size": float(len(self.buffer))})
            metrics.add(self._alarms.masked(metrics.as_dict(), self.state.step))
            parts = derive(self.config).samples_per_step // self.config.policy.train_global_batch_size
            self._alarms.skipped(metrics.as_dict(), self.state.step, num_optimizer_steps=parts)
            metrics.add(self.collector.environment_metrics())
            metrics.add(self._shares(metrics, seconds), prefix="")
            store = self.collector.token_store
            self.logger.log_rollouts("train", self.state.step, groups, store, limit=_ROLLOUTS_LOGGED)
        # A checkpoint holds the metrics of its step, so it is written after them: its seconds are in the next record.
        times = {"total_step_time": seconds, "checkpointing": self._save_seconds}
        metrics.add(times, prefix="timing/train/")
        self._save_seconds = 0.0

    def save(self) -> None:
        """Begin a checkpoint of everything up to the step just logged, once the one before is complete."""
        if not self.config.checkpointing.enabled:
            return
        start, seconds = time.monotonic(), self.config.deadlines.checkpoint
        with self.metrics.timed("checkpointing"):  # for the heartbeat: this step's record is already written
            self.logger.flush(seconds)  # so that metrics.jsonl has every step of a complete checkpoint
            self._finish_save()
            try:
                collector = self.collector.state()
            except StalledError as error:
                logger.error("step %d not saved, the next save tries again: %s", self.state.step, error)
                return
            failed = [LedgerEntry(key=ref.key, step=0, reason=reason) for ref, reason in collector.failed]
            state = SavedState(
                step=self.state.step,
                data=self.data,
                collector=collector,
                ledger=(*self.state.ledger, *failed),
                metrics=self.state.metrics,
                step_seconds=self.state.step_seconds,
                save_seconds=self.state.save_seconds,
                save_period=self.config.checkpointing.save_period,
            )
            self._saver.begin(state, with_optimizer=self.config.checkpointing.save_optimizer)
        self._save_seconds = time.monotonic() - start

    def _finish_save(self) -> None:
        """Wait until the save in progress is complete, if there is one."""
        self._saved(self._saver.wait(self.config.deadlines.checkpoint))

    def _saved(self, saved: Saved | None) -> None:
        """Note a checkpoint that is complete now."""
        if saved is not None:
            self.state.saved_step = saved.step
            self.stop.save_seconds = self.state.save_seconds = max(self.state.save_seconds, saved.seconds)
            logger.info("saved %s", saved.path)

    def _prune(self) -> None:
        cfg = self.config.checkpointing
        prune(
            self.checkpoints,
            keep_top_k=cfg.keep_top_k,
            metric=metric_key(cfg.metric_name),
            higher_is_better=cfg.higher_is_better,
            save_period=cfg.save_period,
            keep_latest=cfg.ft_keep_latest_k,
        )

    def finish(self) -> None:
        """End training: validate the last weights, if that is due and no step did, and save what is not saved yet."""
        if not self.stop.reason and self.state.step < self.num_steps:
            self._end_of_data()
        if self.lacks_final_validation() and not self.stop.reason:
            # Its values join the record of the last step, which is written already.
            metrics = self.metrics = StepMetrics(self.state.step)
            with metrics.timed("validation"):
                self.validate(metrics)
            self.state.metrics = {**self.state.metrics, **metrics.as_dict()}
            self.logger.amend(metrics, self.state.metrics)
        self._finish_save()
        if self.state.step > self.state.saved_step:
            self.save()
            self._finish_save()

    def _end_of_data(self) -> None:
        """Make the present step the last one. Raises `RunError` before the first: nothing would be handed over."""
        reasons = Counter(reason.partition(":")[0] for _, reason in self.collector.state().failed)
        why = ", ".join(f"{count} prompts {reason}" for reason, count in reasons.most_common()) or "no prompt is left"
        if self.state.step == 0:
            raise RunError(f"the data ended before the first step was trained: {why}")
        logger.warning("the data ended after step %d of %d: %s", self.state.step, self.num_steps, why)
        self.num_steps = self.state.step

    def lacks_final_validation(self) -> bool:
        """Whether all steps are done, and the validation after the last one was asked for and has not been."""
        is_due = self.config.grpo.val_at_end and self.validation is not None and self.state.step >= self.num_steps
        return is_due and not any(name.startswith("validation/") for name in self.state.metrics)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do for another start."""
        is_saved = not self.config.checkpointing.enabled or self.state.saved_step >= self.state.step
        return self.state.step >= self.num_steps and is_saved and not self.lacks_final_validation()

    def save_after(self, failure: BaseException) -> None:
        """Save what a failed run has trained since its last checkpoint, unless the policy failed. Never raises.

        The groups of a step that was not trained go back to the buffer, so that they are in the checkpoint.
        """
        has_begun = "timing/train/policy_training" in self.metrics.as_dict()
        is_untrained = self.state.step < self.metrics.step
        if isinstance(failure, PolicyError) or not isinstance(failure, Exception) or (has_begun and is_untrained):
            return
        try:
            if is_untrained:
                for group in self._groups:
                    self.buffer.add(group)
            elif self._groups and self._logged_step < self.metrics.step:
                self.log(self.metrics, self._groups)
            self._finish_save()
            if self.state.step > self.state.saved_step:
                logger.warning("saving step %d before leaving: %s", self.state.step, failure)
                self.save()
                self._finish_save()
        except Exception:  # the first failure is the one to report
            logger.exception("step %d not saved", self.state.step)

    def close(self) -> None:
        """Stop everything that was started, in the reverse order."""
        self.collector.close()
        self.workers.close()
        self.environments.close()
        self.generation.shutdown()
        if self.stop_judges is not None:
            self.stop_judges()
        self.policy.shutdown()
        self.logger.close(self.config.deadlines.shutdown)

    def _shares(self, metrics: StepMetrics, seconds: float) -> dict[str, float]:
        """Tokens per second and the share of the step in which each side had nothing to do."""
        totals: dict[str, float] = {}
        timing = metrics.as_dict()
        trained = timing["timing/train/policy_training"]
        sizes = derive(self.config)
        shares = rates(timing, seconds, train_gpus=sizes.train_gpus, generation_gpus=sizes.generation_gpus)
        shares["idle/policy"] = max(0.0, 1.0 - trained / seconds)
        shares["idle/buffer_starvation"] = timing["timing/train/exposed_generation"] / seconds
        shares["performance/num_engines"] = float(self.generation.num_engines)
        shares["performance/num_engines_alive"] = float(self.generation.num_engines_alive)
        shares["performance/num_rollout_workers_lost"] = float(self.workers.num_lost)
        try:
            if self.config.policy.generation.vllm_cfg.enable_vllm_metrics_logger:
                shares |= engine_samples(self.generation.take_samples())
            stats = self.generation.stats()
        except RecipeError as error:  # only what is measured of the engines is missing then
            logger.warning("no engine statistics of step %d: %s", metrics.step, error)
            return shares
        for engine in stats:
            for name, value in engine.items():
                totals[name] = totals.get(name, 0.0) + value
        gained = {name: value - self._last_stats.get(name, 0.0) for name, value in totals.items()}
        self._last_stats = totals
        return shares | {
            "performance/generation_tokens_per_sec": gained["generated_tokens"] / seconds,
            "performance/generation_tokens_per_sec_per_gpu": gained["generated_tokens"]
            / seconds
            / sizes.generation_gpus,
            "idle/generation": max(0.0, 1.0 - gained["busy_seconds"] / (seconds * len(stats))),
        }
