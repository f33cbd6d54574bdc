"""Where the numbers of a run go: metrics.jsonl always, TensorBoard and W&B when asked, and one line per step.

The train loop only queues. One thread writes, so that a slow disk or network does not slow training. The queue is
bounded and nothing is dropped: when it is full the loop waits, with a deadline. Every line is flushed whole. A resumed
run first removes the lines of steps after its checkpoint, so that each step appears once. A run that starts over keeps
what an earlier one has logged, in set_aside/.

TensorBoard and W&B take copies. One of them that fails, or does not end in time, is left out with an error in the log:
metrics.jsonl has every number, and no run is worth losing for the copy.

    loop                consumes         waits for               unblocked by
    train loop          -                room in the queue       writer thread
    writer thread       queued records   the next record         log, log_rollouts, close
"""

from __future__ import annotations

import functools
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from recipes.cluster.starts import Starts
from recipes.config.keys.derive import derive, has_group_baseline
from recipes.errors import RecipeError, RunError, StalledError
from recipes.files import sync_files, unused, write_atomically
from recipes.grpo.causes import causes
from recipes.grpo.metrics import (
    PHASES,
    TIMING_PREFIX,
    Alarms,
    StepMetrics,
    aggregate_rollouts,
    engine_samples,
    group_pass_rate,
    metrics_record,
    pick_rollouts,
    rates,
    rest_of_one,
)
from recipes.sinks import WANDB_ID_FILE, PrometheusSink, ScalarSink, TensorBoardSink, WandbSink, import_wandb
from recipes.tokens import TextOf, TokenStore, last_answers, output_texts, token_record, trajectories
from recipes.types import Group

if TYPE_CHECKING:
    from recipes.config.tree import Config, LoggerConfig
    from recipes.grpo.checkpoint import TrainState
    from recipes.grpo.rollout import RolloutCollector

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PASS_RATES_FILE = "pass_rates.jsonl"  # one line per trained group, in the form that `make curriculum` reads
TENSORBOARD = "tensorboard"  # directory of its event files
ROLLOUT_KINDS = ("train", "val")
Advantages = Mapping[str, Sequence[float | None]]  # of the members of each group, by the key of its prompt
QUEUE_SIZE = 256  # records; a record is one step or one set of sampled rollouts
_POLL_SECONDS = 0.1
_ROLLOUTS_LOGGED = 8  # per step: enough to see what the policy writes, while the log stays smaller than the checkpoints
ENQUEUE_SECONDS = 60.0  # the run ends when the disk takes no line for this long


class RunLogger:
    """Writes metrics and sampled rollouts of one run directory in the background."""

    def __init__(self, run_dir: Path, cfg: LoggerConfig, *, num_steps: int, text_of: TextOf | None = None) -> None:
        """Check what the configuration asks for; nothing is written until `resume` or the first record.

        With `text_of`, the text of token ids, a logged rollout has the tokens of its last answer.
        """
        self._text_of = functools.lru_cache(maxsize=1 << 16)(text_of) if text_of else None
        self.run_dir = run_dir
        self._cfg = cfg
        self._num_steps = num_steps
        self._console = Console(stderr=True)
        self._in_a_row: dict[str, int] = {}  # steps that each cause of little learning has lasted
        if cfg.wandb_enabled:
            import_wandb()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._files: dict[Path, TextIO] = {}
        self._is_written = threading.Event()  # everything, and the files are closed
        self._sinks: list[ScalarSink] = []

    def resume(self, step: int) -> None:
        """Remove what was logged beyond `step`, and start writing. At step 0 the old log is moved away."""
        if self._thread is not None:
            raise RuntimeError("resume comes before the first record")
        metrics, rates = self.run_dir / METRICS_FILE, self.run_dir / PASS_RATES_FILE
        if step == 0 and (last := max(_last_step(metrics), _last_step(rates))) > 0:
            self._set_aside(last)
        rollouts = [self._rollout_path(kind) for kind in ROLLOUT_KINDS]
        num_lost = {path: _drop_lines_after(path, step or -1) for path in (metrics, rates, *rollouts) if path.exists()}
        self._start(first_step=step + 1 if step else 0, continues=not num_lost.get(metrics))

    def _set_aside(self, last: int) -> None:
        """Move what was logged out of the way of a run that starts over."""
        place = unused(self.run_dir / "set_aside")
        place.mkdir()
        for name in (METRICS_FILE, PASS_RATES_FILE, "rollouts", TENSORBOARD, WANDB_ID_FILE):
            if (self.run_dir / name).exists():
                (self.run_dir / name).rename(place / name)
        what = f"steps up to {last} are logged, and there is no checkpoint of any: the run starts over from step 1"
        logger.warning("%s: %s; what was logged is kept in %s", self.run_dir, what, place)

    def log(self, metrics: StepMetrics) -> None:
        """Queue one line of metrics.jsonl, and the same scalars for TensorBoard and W&B."""
        values, now = metrics.as_dict(), time.time()
        self._put(lambda: self._write_metrics(metrics.step, now, values))

    def amend(self, metrics: StepMetrics, merged: Mapping[str, float]) -> None:
        """Queue the replacement of the last line of metrics.jsonl, of the same step, by `merged`; show `metrics`."""
        values, now = metrics.as_dict(), time.time()

        def replace_last() -> None:
            path = self.run_dir / METRICS_FILE
            if path in self._files:
                self._files.pop(path).close()
            if path.exists():
                _drop_lines_after(path, metrics.step - 1)
            self._write_metrics(metrics.step, now, merged, new=values)

        self._put(replace_last)
        self.show(metrics)

    def log_rollouts(
        self,
        kind: str,
        step: int,
        groups: Sequence[Group],
        store: TokenStore,
        *,
        limit: int,
        advantages: Advantages | None = None,
    ) -> None:
        """Queue at most `limit` rollouts of `groups` for rollouts/<kind>.jsonl, kind "train" or "val".

        With the advantages of every group, by prompt, all rollouts of one of these prompts are logged as well.

        Training also adds to pass_rates.jsonl how often each row was solved. Texts that do not come from the store are
        left out with an error in the log: they are there to be read, and no run is worth losing for them.
        """
        path = self._rollout_path(kind)
        if kind != "val":
            rates = [{"step": step, "version": group.version, **group_pass_rate(group)} for group in groups]
            self._put(lambda: self._write_lines(self.run_dir / PASS_RATES_FILE, rates))
        try:
            picked = pick_rollouts(groups, limit)
            samples = _with_texts(picked + (rest_of_one(picked, step) if advantages else []), store)
            if kind == "val":
                self._print_validation(step, groups, store)
        except StalledError as late:
            logger.error("step %d: rollouts are not logged: %s", step, late)
            return
        records = (_rollout_record(step, self._text_of, advantages or {}, *one) for one in samples)
        self._put(lambda: self._write_lines(path, records))

    def _print_validation(self, step: int, groups: Sequence[Group], store: TokenStore) -> None:
        picked = pick_rollouts(groups, self._cfg.num_val_samples_to_print)
        for group, member, output, *_ in _with_texts(picked, store):
            rollout = group.rollouts[member]
            head = f"validation at step {step}, {group.agent}, reward {rollout.reward}: {rollout.reason}"
            text = f"{head}\n{group.prompt_text}\n{output}"
            # Sampled text may hold half a surrogate pair, which UTF-8 cannot encode.
            logger.info("%s", text.encode("utf-8", "backslashreplace").decode("utf-8"))

    def show(self, metrics: StepMetrics) -> None:
        """Show the progress line, and per agent what a validation gave: in colour on a terminal, else by logging."""
        for segments in filter(None, [_segments(metrics, self._num_steps), _validation_segments(metrics)]):
            if self._console.is_terminal:
                self._console.print(Text.assemble(*segments), soft_wrap=True)
            else:
                logger.info("%s", "".join(text for text, _ in segments))
        found = causes(metrics.as_dict())
        self._in_a_row = {cause.name: self._in_a_row.get(cause.name, 0) + 1 for cause in found}
        for cause in found:
            if (count := self._in_a_row[cause.name]).bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ... in a row
                logger.warning("step %d: %s (%d in a row)", metrics.step, cause.text, count)

    def flush(self, deadline_seconds: float = 30.0) -> None:
        """Wait until the disk holds what is queued so far; raises `RunError` or, after the deadline, `StalledError`."""
        is_on_disk, end = threading.Event(), time.monotonic() + deadline_seconds
        self._put(lambda: sync_files(self._files))
        self._put(is_on_disk.set)
        while not is_on_disk.wait(_POLL_SECONDS):  # never set when one of the records before was not written
            self._raise_error()
            if time.monotonic() >= end:
                raise StalledError(f"{self.run_dir}: log records not written within {deadline_seconds:g} s")

    def close(self, deadline_seconds: float = 30.0) -> None:
        """Write what is queued and close the files; raises `RunError` or, after the deadline, `StalledError`."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        end = time.monotonic() + deadline_seconds
        with suppress(queue.Full):  # then nothing is written in time
            self._queue.put(None, timeout=deadline_seconds)
        if not self._is_written.wait(max(0.0, end - time.monotonic())):
            raise StalledError(f"{self.run_dir}: {self._queue.qsize()} log records not written in {deadline_seconds} s")
        self._raise_error()
        thread.join(timeout=max(0.0, end - time.monotonic()))
        if thread.is_alive():
            names = " and ".join(sink.name for sink in self._sinks)
            logger.warning("%s did not end within %g s; metrics.jsonl is complete", names, deadline_seconds)

    def _start(self, first_step: int, *, continues: bool = True) -> None:
        """Open the sinks and start to write; `continues` is False where W&B has steps that are logged no more."""
        (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        if self._cfg.tensorboard_enabled:
            self._sinks.append(TensorBoardSink(self.run_dir / TENSORBOARD, first_step))
        if self._cfg.prometheus_address:
            self._sinks.append(PrometheusSink(self._cfg.prometheus_address))
        if self._cfg.wandb_enabled:
            try:
                sink = WandbSink(self.run_dir, self._cfg.wandb, continues=continues)
                if sink.is_new:
                    for step, values in _logged(self.run_dir / METRICS_FILE):
                        sink.write(step, values)
                self._sinks.append(sink)
            except Exception as error:
                logger.error(
                    "%s has not begun and is left out; metrics.jsonl has every number: %r", WandbSink.name, error
                )
        self._thread = threading.Thread(target=self._write_until_closed, name="run-logger", daemon=True)
        self._thread.start()

    def _put(self, job: Callable[[], None]) -> None:
        self._raise_error()
        if self._thread is None:
            self._start(first_step=0)
        try:
            self._queue.put(job, timeout=ENQUEUE_SECONDS)
        except queue.Full:
            message = f"{self.run_dir}: {QUEUE_SIZE} log records wait and none was written in {ENQUEUE_SECONDS:.0f} s"
            raise StalledError(message) from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RunError(f"{self.run_dir}: writing the log failed: {self._error}") from self._error

    def _write_until_closed(self) -> None:
        """Run queued jobs. After a failure go on emptying the queue, so that the loop meets the error itself."""
        while (job := self._queue.get()) is not None:
            if self._error is None:
                self._guard(job)
        for file in self._files.values():
            self._guard(file.close)
        self._is_written.set()
        self._tell_sinks(lambda sink: sink.close())

    def _guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # the train loop raises it at its next record
            self._error = self._error or error

    def _write_metrics(
        self, step: int, now: float, values: Mapping[str, float], *, new: Mapping[str, float] | None = None
    ) -> None:
        """Write a line with all `values`; TensorBoard and W&B get only those that are `new` to them."""
        self._write_lines(self.run_dir / METRICS_FILE, [metrics_record(step, now, values)])
        finite = {key: value for key, value in (new or values).items() if math.isfinite(value)}
        self._tell_sinks(lambda sink: sink.write(step, finite))

    def _tell_sinks(self, tell: Callable[[ScalarSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                tell(sink)
            except Exception as error:  # each fails in its own way
                self._sinks.remove(sink)
                logger.error("%s is left out from now on; metrics.jsonl has every number: %r", sink.name, error)

    def _write_lines(self, path: Path, records: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        if path not in self._files:
            self._files[path] = path.open("a", encoding="utf-8")
        self._files[path].write(text)
        self._files[path].flush()

    def _rollout_path(self, kind: str) -> Path:
        if kind not in ROLLOUT_KINDS:
            raise ValueError(f"rollout kind {kind!r}, expected one of {ROLLOUT_KINDS}")
        return self.run_dir / "rollouts" / f"{kind}.jsonl"


class MeasuredEngines(Protocol):
    """What the recorder asks of the engines; `generation.Generation` has it."""

    starts: Starts

    @property
    def num_engines(self) -> int: ...

    @property
    def num_engines_alive(self) -> int: ...

    def stats(self) -> list[dict[str, float]]: ...

    def take_samples(self) -> list[dict[str, float]]: ...


class MeasuredWorkers(Protocol):
    """What the recorder asks of the rollout workers; `rollouts.RolloutWorkers` has it."""

    num_lost: int
    starts: Starts


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Measures each step, writes its record and samples of its rollouts, and raises the alarms."""

    config: Config
    logger: RunLogger
    state: TrainState
    generation: MeasuredEngines
    workers: MeasuredWorkers
    collector: RolloutCollector
    metrics: StepMetrics = field(default_factory=lambda: StepMetrics(0))  # of the step in progress
    advantages: Advantages = field(default_factory=dict)  # of the step in progress
    save_seconds: float = 0.0  # for which the loop has stood still for a checkpoint since the last record
    _recorded_step: int = -1
    _recorded_at: float = field(default_factory=time.monotonic)
    _alarms: Alarms = field(default_factory=Alarms)
    _last_stats: dict[str, float] = field(default_factory=dict)

    def begin(self, step: int) -> StepMetrics:
        """Return the metrics of a new step in progress."""
        self.metrics = StepMetrics(step)
        return self.metrics

    @property
    def lacks_step(self) -> bool:
        """Whether the step in progress has no record yet."""
        return self._recorded_step < self.metrics.step

    def record(self, groups: Sequence[Group] = ()) -> None:
        """Record the step in progress: its metrics, its rollouts', and how busy policy and engines were.

        Raises `RunError` when the policy has skipped too many steps.
        """
        metrics = self.metrics
        self._recorded_step = metrics.step
        try:
            self._measure(metrics, groups)
        finally:  # a step that was trained has a record, also when measuring it fails
            self.state.metrics = metrics.as_dict()
            self.logger.log(metrics)
        self.logger.show(metrics)
        self._alarms.end_if_stuck(self.config.policy.max_skipped_steps)

    def amend(self) -> None:
        """Add the metrics in progress to the record of the last step, which is written already."""
        self.state.metrics = {**self.state.metrics, **self.metrics.as_dict()}
        self.logger.amend(self.metrics, self.state.metrics)

    def log_rollouts(self, kind: str, groups: Sequence[Group]) -> None:
        """Write samples of the rollouts of the present step, kind "train" or "val"."""
        store = self.collector.token_store
        limit, known = _ROLLOUTS_LOGGED, self.advantages if kind == "train" else None
        self.logger.log_rollouts(kind, self.state.step, groups, store, limit=limit, advantages=known)

    def note_advantages(self, groups: Sequence[Group], advantages_B: Sequence[float]) -> None:
        """Keep the advantages of the step in progress, one per rollout, for the log."""
        rest = iter(round(value, 4) if math.isfinite(value) else None for value in advantages_B)
        self.advantages = {group.prompt.key: list(islice(rest, len(group.rollouts))) for group in groups}

    def _measure(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        now = time.monotonic()
        seconds, self._recorded_at = now - self._recorded_at, now
        if groups:
            self.state.step_seconds = 0.8 * (self.state.step_seconds or seconds) + 0.2 * seconds
            compares = has_group_baseline(self.config)
            metrics.add(aggregate_rollouts(groups, self.state.step - 1, compares=compares))
            metrics.add({"buffer_size": float(len(self.collector.buffer))})
            metrics.add(self._alarms.masked(metrics.as_dict(), self.state.step))
            parts = derive(self.config).samples_per_step // self.config.policy.train_global_batch_size
            self._alarms.skipped(metrics.as_dict(), self.state.step, num_optimizer_steps=parts)
            metrics.add(self.collector.environment_metrics())
            metrics.add(self._shares(metrics, seconds), prefix="")
            self.log_rollouts("train", groups)
        # A checkpoint holds the metrics of its step, so it is written after them: its seconds are in the next record.
        times = {"total_step_time": seconds, "checkpointing": self.save_seconds}
        metrics.add(times, prefix="timing/train/")
        self.save_seconds = 0.0

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
        failed = self.generation.starts.num_failed + self.workers.starts.num_failed
        shares["performance/num_failed_starts"] = float(failed)
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


def _with_texts(picked: Sequence[tuple[Group, int]], store: TokenStore) -> list[tuple[Group, int, str, Any, Any]]:
    texts, noted, answers = (read(picked, store) for read in (output_texts, trajectories, last_answers))
    return [(*place, *parts) for place, *parts in zip(picked, texts, noted, answers, strict=True)]


def _rollout_record(
    step: int, text_of: TextOf | None, advantages: Advantages, group: Group, member: int, output_text: str, *parts: Any
) -> dict[str, Any]:
    rollout, (noted, answer) = group.rollouts[member], parts
    tokens = token_record(text_of, output_text, answer) if text_of and answer else None
    return {
        "step": step,
        "prompt": group.prompt.key,
        "prompt_id": group.prompt.prompt_id,
        "agent": group.agent,
        "prompt_text": group.prompt_text,
        "output_text": output_text,
        "reward": rollout.reward,
        "reason": rollout.reason,
        "status": rollout.status.value,
        "group_version": group.version,
        "versions": [version for version, _ in rollout.tokens_by_version],
        "num_turns": rollout.num_turns,
        "num_generated_tokens": rollout.num_generated_tokens,
        "finish_reason": rollout.finish_reason,
        "seconds": rollout.seconds,
        "member": member,
        "group_rewards": [one.reward for one in group.rollouts],
        "group_advantages": advantages.get(group.prompt.key),
        **({} if noted is None else {"trajectory": noted}),
        **({"tokens": tokens} if tokens else {}),
    }


def _drop_lines_after(path: Path, step: int) -> int:
    """Rewrite a file without the records after `step` and without lines that a killed run left incomplete.

    Returns how many records it had after `step`.
    """
    lines = list(_records(path))
    kept = [line for line, record in lines if record is not None and record["step"] <= step and line.endswith("\n")]
    for line, record in lines:
        if record is None:
            logger.warning("%s: removed an unreadable line of %d characters", path, len(line))
    write_atomically(path, "".join(kept).encode())
    return sum(record is not None and record["step"] > step for _, record in lines)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield every line of a log with its record, or None where the line is not a record."""
    # Not splitlines: JSON may hold U+2028 as it is.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield line, record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _last_step(path: Path) -> int:
    """Return the last step that a log names; -1 when there is none."""
    return max((record["step"] for _, record in _records(path) if record), default=-1) if path.exists() else -1


def _logged(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the steps of metrics.jsonl with their finite scalars."""
    for _, record in _records(path) if path.exists() else ():
        numbers = {name: value for name, value in (record or {}).items() if type(value) in (int, float)}
        if record:
            yield record["step"], {name: value for name, value in numbers.items() if name not in ("step", "time")}


def progress_line(metrics: StepMetrics, num_steps: int) -> str:
    """Return one aligned line: step, reward, validation, speed, age, mismatch, seconds per phase."""
    return "".join(text for text, _ in _segments(metrics, num_steps))


def validation_line(metrics: StepMetrics) -> str:
    """Return what the validation of this step gave per agent, sampled and greedy; empty when there was none."""
    return "".join(text for text, _ in _validation_segments(metrics))


def _validation_segments(metrics: StepMetrics) -> list[tuple[str, str]]:
    values = metrics.as_dict()
    suffix = "/accuracy"
    agents = [
        key[len("validation/") : -len(suffix)]
        for key in values
        if key.startswith("validation/") and key.endswith(suffix) and key != "validation/accuracy"
    ]
    segments: list[tuple[str, str]] = []
    for agent in sorted(agents):
        segments.append((f" | {agent} " if segments else f"validation at step {metrics.step}: {agent} ", "dim"))
        segments.append((f"{values[f'validation/{agent}/accuracy']:.3f}", "bold green"))
        greedy = values.get(f"validation/{agent}/greedy_accuracy")
        segments.append(("" if greedy is None else f" greedy {greedy:.3f}", "green"))
    return segments


def _segments(metrics: StepMetrics, num_steps: int) -> list[tuple[str, str]]:
    """Return the progress line as (text, rich style) pieces; what a step did not measure is left out."""
    values = metrics.as_dict()
    width = len(str(num_steps))
    segments = [(f"step {metrics.step:>{width}}/{num_steps}", "bold")]

    def column(label: str, text: str | None, style: str = "") -> None:
        if text is not None:
            segments.extend([(f" | {label} ", "dim"), (text, style)])

    def number(key: str, spec: str) -> str | None:
        return format(values[key], spec) if key in values else None

    column("reward", number("train/reward", "6.3f"), "cyan")
    column("val", number("validation/accuracy", "5.3f"), "bold green")
    column("greedy", number("validation/greedy_accuracy", "5.3f"), "green")
    column("tok/s", number("performance/generation_tokens_per_sec", "6.0f"))
    age, oldest = number("train/avg_trajectory_age", ".1f"), number("train/max_trajectory_age", ".0f")
    column("age", None if age is None else f"{age} max {oldest or '?'}")
    worst, mean = number("train/logprob_error_max", "7.1e"), None
    if "train/token_mult_prob_error" in values:
        mean = format(values["train/token_mult_prob_error"] - 1.0, "7.1e")
    column("mismatch", None if worst is None and mean is None else f"max {worst or '?'} mean {mean or '?'}", "magenta")
    alarm, share = values.get("train/mismatch_alarm_steps", 0.0), values.get("train/masked_seqs_share", 0.0)
    column("MASKED", f"{share:.0%} for {alarm:.0f} steps" if alarm >= 2 else None, "bold red")
    alive, total = values.get("performance/num_engines_alive"), values.get("performance/num_engines")
    column("engines", None if alive is None or alive == total else f"{alive:.0f} of {total:.0f}", "bold red")
    column("paused", _paused(values), "bold red")
    segments.extend(_phase_segments(values))
    return segments


def _paused(values: Mapping[str, float]) -> str | None:
    """Return the environments that are paused; None when there are none."""
    prefix, suffix = "train/", "/paused_seconds"
    names = [key[len(prefix) : -len(suffix)] for key in values if key.startswith(prefix) and key.endswith(suffix)]
    return ", ".join(sorted(names)) or None


def _phase_segments(values: Mapping[str, float]) -> list[tuple[str, str]]:
    seconds = {short: values[TIMING_PREFIX + name] for name, short in PHASES.items() if TIMING_PREFIX + name in values}
    total = values.get(TIMING_PREFIX + "total_step_time", math.fsum(seconds.values()))
    if not seconds and not total:
        return []
    shown = {short: spent for short, spent in seconds.items() if spent >= 0.005}
    phases = " ".join(f"{short} {spent:.2f}" for short, spent in shown.items())
    return [(" | ", "dim"), (f"{total:6.2f} s", "yellow"), (f" = {phases}" if phases else "", "dim")]
