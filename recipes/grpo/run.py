"""One run: what the loop reads and changes. Built by `setup`, driven by `train`.

The `Recorder` measures each step and writes it down (`log.py`); the `Saver` writes checkpoints (`saving.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from recipes.cluster.starts import Starts
from recipes.config.tree import Config
from recipes.errors import PolicyError, RunError, TokensLostError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.checkpoint import TrainState
from recipes.grpo.data import NO_LIMIT
from recipes.grpo.log import MeasuredEngines, MeasuredWorkers, Recorder
from recipes.grpo.metrics import kind_of
from recipes.grpo.refit import WeightSink, WeightSource
from recipes.grpo.rollout import RolloutCollector
from recipes.grpo.saving import Saveable, Saver
from recipes.grpo.validate import ValidationSet
from recipes.rollouts.group import Sampler
from recipes.stop import StopRequest
from recipes.types import Group, TrainBatch

logger = logging.getLogger(__name__)


class PolicyHandle(WeightSource, Saveable, Protocol):
    """What the run asks of the policy; `policy.Policy` has it."""

    def logprobs(self, batch: TrainBatch) -> list[torch.Tensor]: ...

    def fetch(self, batch: TrainBatch) -> None: ...

    def train(self, batch: TrainBatch) -> dict[str, float]: ...

    def save(self, path: Path, *, with_optimizer: bool = True) -> None: ...

    def load(self, path: Path) -> None: ...

    def shutdown(self) -> None: ...


class GenerationHandle(WeightSink, Sampler, MeasuredEngines, Protocol):
    """What the run asks of the engines; `generation.Generation` has it."""

    def shutdown(self) -> None: ...


class WorkersHandle(MeasuredWorkers, Protocol):
    """What the run asks of the rollout workers, beside the groups; `rollouts.RolloutWorkers` has it."""

    def silent(self) -> dict[str, str]: ...
    def close(self) -> None: ...


class JudgesHandle(Protocol):
    """What the run asks of the judges that it has started; `judges.Judges` has it."""

    starts: Starts

    def shutdown(self) -> None: ...


class EnvironmentsHandle(Protocol):
    """What the run asks of the environments once they run."""

    @property
    def codec(self) -> Any: ...

    def close(self) -> Any: ...


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
    recorder: Recorder
    saver: Saver
    stop: StopRequest
    state: TrainState
    num_steps: int  # the step at which the run ends
    judges: JudgesHandle | None = None  # those that the run has started
    _groups: list[Group] = field(default_factory=list)  # of the step in progress
    _end_reason: str = "the rows suffice for no more"  # when that is before grpo.max_num_steps

    def validates_now(self) -> bool:
        """Whether to validate the present weights: before the first step, periodically, after the last.

        Never once the run is asked to stop: the time that is left is for saving.
        """
        if self.stop.reason:
            return False
        cfg, step = self.config.grpo, self.state.step
        if step == 0:
            return cfg.val_at_start
        is_due = cfg.val_period > 0 and step % cfg.val_period == 0 and step >= cfg.val_start_at
        return is_due or (cfg.val_at_end and step == self.num_steps)

    def take(self) -> list[Group]:
        """Wait for the groups of the next step and remove them from the buffer; an empty list when there are none.

        The wait has a time limit. A save in progress makes headway before and after it; its failure is raised here.
        """
        self._groups = []
        self.saver.advance()
        self._groups = self.buffer.take(
            self.state.step,
            deadline_seconds=self.config.deadlines.progress,
            waiting_for=self._waiting_for,
            is_stopped=lambda: self.stop.requested(step_seconds=0.0),
        )
        self.saver.advance()
        return self._groups

    def take_back(self, lost: TokensLostError) -> None:
        """Give the groups of a step that did not begin back to the collector, which samples the lost ones again.

        Raises `lost` when all can be read.
        """
        groups, self._groups = self._groups, []  # they are in the buffer from now on
        self.collector.take_back(groups, lost)

    def validate(self) -> None:
        """Measure the held-out reward of the weights that the engines hold; skipped once the run is asked to stop."""
        if self.validation is None:
            return
        logger.info("validating %d held-out prompts at step %d", len(self.validation.dataset), self.state.step)
        measured = self.validation.run(
            self.collector, step=self.state.step, is_stopped=lambda: self.stop.requested(step_seconds=0.0)
        )
        if measured is None:
            return
        values, groups = measured
        metrics = self.recorder.metrics
        metrics.add(values, prefix="validation/")
        self.end_if_good_enough(metrics.as_dict())
        self.recorder.log_rollouts("val", groups)

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
            self._end_reason = f"{name} has reached {threshold:g}"

    def finish(self) -> None:
        """End training: validate the last weights, if that is due and no step did, and save what is not saved yet."""
        if not self.stop.reason and self.state.step < self.num_steps:
            self._end_of_data()
        if self.lacks_final_validation() and not self.stop.reason:
            with self.recorder.begin(self.state.step).timed("validation"):
                self.validate()
            self.recorder.amend()
        self.saver.save_rest()

    def _end_of_data(self) -> None:
        """Make the present step the last one. Raises `RunError` before the first: nothing would be handed over."""
        reasons = Counter(kind_of(reason) for _, reason in self.collector.state().failed)
        why = ", ".join(f"{count} prompts {reason}" for reason, count in reasons.most_common(5)) or "no prompt is left"
        if self.state.step == 0:
            raise RunError(f"the data ended before the first step was trained: {why}")
        logger.warning("the data ended after step %d of %d: %s", self.state.step, self.num_steps, why)
        self._end_reason = f"the data ended, {why}"
        self.num_steps = self.state.step

    def lacks_final_validation(self) -> bool:
        """Whether all steps are done, and the validation after the last one was asked for and has not been."""
        is_due = self.config.grpo.val_at_end and self.validation is not None and self.state.step >= self.num_steps
        return is_due and not any(name.startswith("validation/") for name in self.state.metrics)

    @property
    def shortfall(self) -> str:
        """Why a run that is done has done fewer steps than it was asked for; empty when it has done all."""
        done, asked = self.state.step, self.config.grpo.max_num_steps
        return f"{done} of the {asked} steps asked for: {self._end_reason}" if done < asked < NO_LIMIT else ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do for another start."""
        return self.state.step >= self.num_steps and not self.saver.lacks_step and not self.lacks_final_validation()

    def save_after(self, failure: BaseException) -> None:
        """Save what a failed run has trained since its last checkpoint, unless the policy failed. Never raises.

        The groups of a step that was not trained go back to the buffer, so that they are in the checkpoint.
        """
        metrics = self.recorder.metrics
        has_begun = "timing/train/policy_training" in metrics.as_dict()
        is_untrained = self.state.step < metrics.step
        if isinstance(failure, PolicyError) or not isinstance(failure, Exception) or (has_begun and is_untrained):
            return
        try:
            if is_untrained:
                for group in self._groups:
                    self.buffer.add(group)
            elif self._groups and self.recorder.lacks_step:
                self.recorder.record(self._groups)
            self.saver.wait()
            if self.saver.lacks_step:
                logger.warning("saving step %d before leaving: %s", self.state.step, failure)
            self.saver.save_rest()
        except Exception:  # the first failure is the one to report
            logger.exception("step %d not saved", self.state.step)

    def missing(self) -> dict[str, str]:
        """Return why each engine, judge's copy or rollout worker that is not up, or is silent, is missing."""
        kinds = [self.generation.starts, *([self.judges.starts] if self.judges else []), self.workers.starts]
        not_up = {name: reason for starts in kinds for name, reason in starts.missing().items()}
        return not_up | self.workers.silent()

    def _waiting_for(self) -> str:
        """Name what a step waits for, and who is silent or missing: without them its groups may not come."""
        return "; ".join([self.collector.waiting_for(), *(f"{name}: {why}" for name, why in self.missing().items())])

    def close(self) -> None:
        """Stop everything that was started, in the reverse order."""
        self.collector.close()
        self.workers.close()
        self.environments.close()
        self.generation.shutdown()
        if self.judges is not None:
            self.judges.shutdown()
        self.policy.shutdown()
        self.recorder.logger.close(self.config.deadlines.shutdown)
