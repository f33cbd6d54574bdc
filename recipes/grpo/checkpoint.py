"""Checkpoints: one directory per saved step, which is complete or absent, and from which a run continues exactly.

    step_000010/
      policy/               Megatron distributed checkpoint: weights, optimizer, scheduler, RNG
      hf/                   export that transformers, vLLM and the next stage load
      state.json            step, identity of the data, position in the prompt stream, prompts in flight, metrics
      replay_buffer.safetensors   finished groups that no step has trained on yet: headers as JSON, tokens as arrays
      ledger.jsonl          every prompt that was trained on or failed, with its step
      COMPLETE              sha256 and size of every file above; a directory without it is no checkpoint

It is written under a temporary name, flushed to the disk and renamed; then `latest` is swapped. So a kill or a power
cut at any moment leaves the previous one.

The large files, `policy/*.distcp` and `hf/*.safetensors`, are the ranks' alone: each rank sums what it writes while it
writes it, and all of them read the files back, a part each, before a run goes on from them. The driver looks at the
names and sizes of all files and reads the small ones: before policy and engines start, and before older checkpoints
are removed. COMPLETE of earlier versions has no sizes; such a checkpoint is compared and loaded like any other.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError

from recipes.config.keys.derive import max_age
from recipes.config.tree import Config
from recipes.errors import CheckpointError, Problem
from recipes.files import FileSum, readable_sha256, sha256_of, sync_directory, sync_tree, unused, write_atomically
from recipes.grpo.buffer import read_groups, write_groups
from recipes.grpo.data import CollectorState, DataIdentity, DrawnPrompt
from recipes.types import Group, PromptRef

logger = logging.getLogger(__name__)
_COMPLETE = "COMPLETE"
EXPORT = "hf"
_BUFFER = "replay_buffer.safetensors"
_OF_RANKS = (".distcp", ".safetensors")  # in a directory of a checkpoint: what only the ranks read
_OF_ONE_SAVE = (_BUFFER, ".metadata", "state.json")
_LATEST = "latest"
_STEP = re.compile(r"step_(\d{6,})")
_SHARE_IT = "set RESULTS_DIR to a directory that all nodes share"
_START_OVER = "to start over, take another EXP_NAME"
_HASH_THREADS = 16  # hashing releases the interpreter lock, and a parallel file system serves many readers

Reader = Callable[[Sequence[Path]], list[str | None]]
"""Reads files and returns their sha256, None for one that cannot be read: `read_here`, or that of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """What became of one prompt: trained on in `step` (1-based), or failed (step 0) with the reason."""

    key: str
    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Everything but the policy that a resumed run needs."""

    step: int  # optimizer steps done
    data: DataIdentity  # of the rows that the collector's positions refer to
    collector: CollectorState
    ledger: tuple[LedgerEntry, ...]
    metrics: Mapping[str, float]  # of the last step, validation included; retention ranks by one of them
    step_seconds: float = 0.0  # how long a step takes, so that a resumed job begins none it cannot finish
    save_seconds: float = 0.0  # of the longest save before this one, so that a resumed job leaves time for one
    save_period: int | None = None  # when this was saved: a resumed run may have another; None in older checkpoints


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


def step_dir(root: Path, step: int) -> Path:
    """Return the directory of a saved step."""
    return root / f"step_{step:06d}"


def make_directory(root: Path, step: int) -> Path:
    """Return a new temporary directory for a checkpoint; what killed runs have left half-done is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("tmp_*"):
        discard(left)
    temporary = unused(root / f"tmp_{step_dir(root, step).name}")
    temporary.mkdir()
    return temporary


def complete(root: Path, step: int, temporary: Path, sums: Mapping[Path, FileSum] | None = None) -> None:
    """Give a written checkpoint its checksums and its name, and point `latest` at it.

    `sums` are those of the files that the ranks have written; the others are read here. Raises `CheckpointError` when
    one of them is not here as it was written.
    """
    target = step_dir(root, step)
    sync_tree(temporary)
    _write_complete(temporary, sums or {})
    if target.exists():  # of a run that was killed after the rename: its content is the same step
        target.rename(unused(root / f"tmp_replaced_{target.name}"))
    temporary.rename(target)
    sync_directory(root)
    _swap_latest(root, target.name)
    for replaced in root.glob("tmp_replaced_*"):
        discard(replaced)


def write_state(path: Path, state: SavedState) -> None:
    """Write everything but the policy."""
    collector = state.collector
    (path / "state.json").write_bytes(
        orjson.dumps(
            {
                "step": state.step,
                "data": state.data,
                "position": collector.position,
                "in_flight": collector.in_flight,
                "failed": collector.failed,
                "skipped": collector.skipped,
                "set_aside": collector.set_aside,
                "metrics": dict(state.metrics),
                "step_seconds": state.step_seconds,
                "save_seconds": state.save_seconds,
                "save_period": state.save_period,
            },
            option=orjson.OPT_INDENT_2,
        )
    )
    write_groups(path / _BUFFER, collector.finished, collector.finished_tokens)
    _write_lines(path / "ledger.jsonl", state.ledger)


def latest_checkpoint(root: Path, read: Reader | None = None) -> Path | None:
    """Return the newest checkpoint under `root` whose files equal their checksums; None when no step was ever saved.

    Of the large files only `read` says what they hold; without it they are of the right size. A run loads none before
    its ranks have read it.

    Damaged ones that are newer, those without COMPLETE among them, are logged as errors and moved aside, to
    `damaged_step_...`: the steps after the one returned are trained again. Raises `CheckpointError` when all are
    damaged, and when `latest` leads nowhere: starting over is the user's decision.
    """
    problems: list[Problem] = []
    damaged: list[Path] = []
    for path in reversed(_step_directories(root).values()):
        found = damage(path, fix="restore it, or remove the directory to do without it", read=read)
        if not found:
            _move_aside(root, damaged, path)
            return path
        problems += found
        damaged.append(path)
        for problem in found:
            logger.error("damaged checkpoint: %s", problem)
    if problems := problems or lost_checkpoints(root):
        raise CheckpointError([replace(problem, fix=f"{problem.fix}; {_START_OVER}") for problem in problems])
    return None


def lost_checkpoints(root: Path) -> list[Problem]:
    """Return why a run can neither go on nor start over: it had checkpoints, and no complete one is left."""
    if complete_checkpoints(root):
        return []
    if left := _step_directories(root):
        wrong, fix = (
            f"it has no {_COMPLETE}, and no other checkpoint is complete",
            "restore it, or remove the directory",
        )
        return [Problem(where=str(path), wrong=wrong, fix=fix) for path in left.values()]
    latest = root / _LATEST
    if not latest.is_symlink():
        return []
    wrong = f"it leads to {latest.readlink()}, and no checkpoint is here any more"
    return [Problem(where=str(latest), wrong=wrong, fix="bring the checkpoints back, or remove it")]


def _move_aside(root: Path, damaged: Sequence[Path], good: Path) -> None:
    if damaged:
        _swap_latest(root, good.name)
    for path in damaged:
        logger.error("%s is damaged: the run goes on from %s, the steps after it are trained again", path, good)
        aside = unused(root / f"damaged_{path.name}")
        try:
            path.rename(aside)
            logger.error("the damaged checkpoint is kept as %s; remove it when nobody needs it", aside)
        except OSError as error:
            logger.warning("%s not renamed: %s", path, error)


def is_export(path: Path) -> bool:
    """Whether a path names the export of a checkpoint: .../latest/hf or .../step_000010/hf."""
    return path.name == EXPORT and (path.parent.name == _LATEST or path.parent.name.startswith("step_"))


def complete_export(path: Path, read: Reader | None = None) -> Path:
    """Return the directory that an export's path names now, `latest` followed and its files checked as in `damage`.

    Raises `CheckpointError` when there is none, when its checkpoint was not finished, or when it was changed since.
    """
    checkpoint = path.parent.resolve()
    if not (checkpoint / _COMPLETE).is_file():
        raise CheckpointError(
            Problem(
                where=str(path),
                wrong="its checkpoint was not finished" if checkpoint.is_dir() else "there is no checkpoint",
                fix="let the run that writes it save once, or set MODEL_PATH to other start weights",
            )
        )
    fix = "restore it, or set MODEL_PATH to the export of another step"
    if problems := damage(checkpoint, below=f"{EXPORT}/", fix=fix, read=read):
        raise CheckpointError(problems)
    return checkpoint / EXPORT


def require_whole(checkpoint: Path, part: str = "") -> None:
    """Raise `CheckpointError` unless every file of a saved step, or below `part` of it, equals its checksum."""
    if problems := damage(
        checkpoint, below=part and f"{part}/", fix="restore it, or take another step", read=read_here
    ):
        raise CheckpointError(problems)


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return step -> directory of every complete checkpoint, in order of step; other names are ignored."""
    return {step: path for step, path in _step_directories(root).items() if (path / _COMPLETE).is_file()}


def _step_directories(root: Path) -> dict[int, Path]:
    """Return step -> directory of every checkpoint, complete or not, in order of step."""
    found = {int(match[1]): path for path in root.glob("step_*") if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def load_state(path: Path) -> SavedState:
    """Read back what `write_state` wrote, without the policy. A metric that is null in the file was not finite: NaN."""
    if not (path / _BUFFER).exists():
        raise CheckpointError(
            Problem(
                where=str(path),
                wrong=f"it has no {_BUFFER}: another version of this recipe wrote it, which stored tokens as text",
                fix=f"finish the run with that version, or start a new run with MODEL_PATH={path / EXPORT}",
            )
        )
    try:
        return _read_state(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        wrong = f"its state cannot be read ({type(error).__name__}: {error}): another version may have written it"
        fix = f"start a new run with MODEL_PATH={path / EXPORT}"
        raise CheckpointError(Problem(where=str(path), wrong=wrong, fix=fix)) from error


def _read_state(path: Path) -> SavedState:
    raw = orjson.loads((path / "state.json").read_bytes())
    finished, finished_tokens = read_groups(path / _BUFFER)
    numbers = {name: raw[name] for name in ("step", "position")}
    if any(type(value) is not int or value < 0 for value in numbers.values()):
        raise ValueError(f"{numbers} are no counts")
    return SavedState(
        step=raw["step"],
        data=DataIdentity(**raw["data"]),
        collector=CollectorState(
            position=raw["position"],
            in_flight=tuple(
                DrawnPrompt(**{**drawn, "prompt": PromptRef(**drawn["prompt"])}) for drawn in raw["in_flight"]
            ),
            finished=finished,
            finished_tokens=finished_tokens,
            failed=tuple((PromptRef(**ref), reason) for ref, reason in raw["failed"]),
            skipped=tuple(raw["skipped"]),
            set_aside=tuple(raw["set_aside"]),
        ),
        ledger=tuple(LedgerEntry(**line) for line in _read_lines(path / "ledger.jsonl")),
        metrics={name: math.nan if value is None else value for name, value in raw["metrics"].items()},
        step_seconds=raw["step_seconds"],
        save_seconds=raw.get("save_seconds", 0.0),  # none in older checkpoints
        save_period=raw.get("save_period"),
    )


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_top_k: int | None,
    by_metric: bool,
    higher_is_better: bool,
    on_period: Container[int],
    keep_latest: int | None = None,
) -> set[int]:
    """Return the steps that survive pruning: the best `keep_top_k` of those `on_period`, and the newest.

    `keep_latest` is how many of the newest stay, on the save period or not; None is 1. A checkpoint without the metric
    ranks last; ties prefer the newer; without `by_metric` newer is better; `keep_top_k` None keeps all.
    """
    if not metrics or keep_top_k is None:
        return set(metrics)

    def rank(step: int) -> tuple[float, int]:
        value = metrics[step] if by_metric else None
        if value is None:
            return (float("-inf"), step)
        return (value if higher_is_better else -value, step)

    ranked = sorted((step for step in metrics if step in on_period), key=rank, reverse=True)
    return {*ranked[:keep_top_k], *sorted(metrics)[-(keep_latest or 1) :]}


def prune(
    root: Path,
    *,
    keep_top_k: int | None,
    metric: str | None,
    higher_is_better: bool,
    save_period: int,
    keep_latest: int | None = None,
) -> None:
    """Delete the checkpoints that retention does not keep, once the newest is found whole. Never ends the run.

    One whose metric cannot be read now stays: it may be the best. `save_period` is that of checkpoints that do not say
    theirs.
    """
    found = complete_checkpoints(root)
    records, unread = _records(found)
    values = {step: records[step]["metrics"].get(metric) if step in records else None for step in found}
    periods = {step: record.get("save_period") or save_period for step, record in records.items()}
    kept = unread | steps_to_keep(
        values,
        keep_top_k=keep_top_k,
        by_metric=metric is not None,
        higher_is_better=higher_is_better,
        on_period={step for step, period in periods.items() if step % period == 0},
        keep_latest=keep_latest,
    )
    doomed = sorted(set(found) - kept)
    if (
        doomed
        and metric is not None
        and not unread
        and set(values.values()) == {None}
        and _is_measured(metric, records)
    ):
        wrong = "no checkpoint has this metric, so the newest are kept as if it were null"
        logger.error("checkpointing.metric_name: %s: %s", metric, wrong)
    if doomed and (
        problems := damage(
            found[max(found)], fix="copy it from elsewhere, or remove it; until then no older one is removed"
        )
    ):
        for problem in problems:
            logger.error("damaged checkpoint: %s", problem)
        return
    for step in doomed:
        aside = unused(root / f"tmp_pruned_{found[step].name}")  # renamed first: a kill leaves no half checkpoint
        try:
            found[step].rename(aside)
        except OSError as error:
            logger.warning("checkpoint of step %d not pruned: %s", step, error)
            continue
        discard(aside)
        logger.info("pruned checkpoint of step %d", step)


def window_problems(saved: SavedState, config: Config, path: Path) -> list[Problem]:
    """Return why what was drawn before a save cannot be trained on after it.

    With a smaller window some groups would be trained too late, or never. With another group size a step would have
    another number of optimizer steps, and with a shorter limit a micro-batch would not hold a saved sequence.
    """
    cfg, finished, in_flight = config.grpo, saved.collector.finished, saved.collector.in_flight
    num_finished = Counter(group.target_step for group in finished)  # what is in flight beyond P finds another step
    targets = [group.target_step for group in finished] + [drawn.target_step for drawn in in_flight]
    ages = [target - saved.step for target in targets] + [group.target_step - group.version for group in finished]
    rollouts = [rollout for group in finished for rollout in group.rollouts]
    lengths = [tokens for rollout in rollouts for tokens, _ in rollout.sequences]
    age_key = "max_trajectory_age_steps" if cfg.async_grpo.enabled else "enabled"
    needed = {
        "grpo.num_prompts_per_step": (cfg.num_prompts_per_step, max(num_finished.values(), default=0)),
        f"grpo.async_grpo.{age_key}": (max_age(cfg.async_grpo), max(ages, default=0)),
        "policy.max_total_sequence_length": (config.policy.max_total_sequence_length, max(lengths, default=0)),
    }
    wrong = {
        key: (str(given), f"at least {least}: it was larger when {path} was saved")
        for key, (given, least) in needed.items()
        if given < least
    }
    if (key := "grpo.async_grpo.enabled") in wrong:
        wrong[key] = ("false, so that the age limit is 0", wrong[key][1])
    size = cfg.num_generations_per_prompt
    for other in {len(group.rollouts) for group in finished} - {size}:  # a rollout that failed is one of them
        wrong["grpo.num_generations_per_prompt"] = (str(size), f"{other}, as when {path} was saved")
    fix = f"restore it, or start a new run with MODEL_PATH={path / EXPORT}"
    return [Problem(where=key, got=got, expected=expected, fix=fix) for key, (got, expected) in wrong.items()]


def _is_measured(metric: str, records: Mapping[int, Any]) -> bool:
    """Whether these checkpoints have metrics of the kind: the first ones may come before the first validation."""
    kind = metric.partition("/")[0] + "/"
    return kind != "validation/" or any(
        key.startswith(kind) for record in records.values() for key in record["metrics"]
    )


def _records(found: Mapping[int, Path]) -> tuple[dict[int, Any], set[int]]:
    """Return metrics and save period of each checkpoint, and the steps whose `state.json` cannot be read."""
    records, unread = {}, set()
    for step, path in found.items():
        try:
            record = orjson.loads((path / "state.json").read_bytes())
            records[step] = {"metrics": dict(record["metrics"]), "save_period": record.get("save_period")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            unread.add(step)
            logger.warning("%s: metrics not read, so it is kept: %s", path, error)
    return records, unread


def discard(path: Path) -> None:
    """Delete a directory as far as that is possible; what stays (`.nfs*`, stale handles) is logged."""

    def report(_function: object, left: str, failure: tuple[object, BaseException, object]) -> None:
        logger.warning("not removed: %s: %s", left, failure[1])

    shutil.rmtree(path, onerror=report)


def _write_lines(path: Path, items: Sequence[Any]) -> None:
    path.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items))


def _read_lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != _COMPLETE)


def _write_complete(path: Path, sums: Mapping[Path, FileSum]) -> None:
    """Write the sums of all files: those of the ranks as they say, if the files are here, and the others as read."""
    problems = [
        Problem(
            where=str(file),
            wrong=f"a rank has written {one.num_bytes} bytes of it, and {size or 'none'} are here",
            fix=_SHARE_IT,
        )
        for file, one in sums.items()
        if (size := _size(file)) != one.num_bytes
    ]
    if problems:
        raise CheckpointError(problems)
    others = [file for file in _files(path) if file not in sums]
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        digests = pool.map(sha256_of, others)
    read = {file: FileSum(digest, file.stat().st_size) for file, digest in zip(others, digests, strict=True)}
    content = {
        str(file.relative_to(path)): {"sha256": one.sha256, "bytes": one.num_bytes}
        for file, one in sorted({**read, **sums}.items())
    }
    write_atomically(path / _COMPLETE, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _size(path: Path) -> int | None:
    """Return the size of a file, None where there is none."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # a name may hold what no path can
        return None


def read_here(files: Sequence[Path]) -> list[str | None]:
    """Read files in this process and return their sha256, None for one that cannot be read."""
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        return list(pool.map(readable_sha256, files))


def recorded_sums(path: Path) -> dict[str, FileSum]:
    """Return what COMPLETE says of each file; `ValueError` when it is no such record. Older ones have no sizes."""
    raw = orjson.loads((path / _COMPLETE).read_bytes())
    try:
        return {
            name: FileSum(one, None) if isinstance(one, str) else FileSum(str(one["sha256"]), int(one["bytes"]))
            for name, one in raw.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it is no object of file names and checksums") from error


def content_digest(path: Path) -> str:
    """Return one sha256 of what a run continues with from a complete checkpoint: equal in runs equal bit for bit.

    It covers the export, weights, optimizer, random states and the ledger, from their sums in COMPLETE. It leaves out
    what names this one save (Megatron's `.metadata`) or tells how long something took (`state.json`, waiting groups).
    """
    kept = {name: one.sha256 for name, one in recorded_sums(path).items() if Path(name).name not in _OF_ONE_SAVE}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def damage(path: Path, *, below: str = "", fix: str, read: Reader | None = None) -> list[Problem]:
    """Return the files of a checkpoint, of those whose names begin with `below`, that differ from their checksums.

    Small ones are read here, the large ones of the ranks by `read`; without it only their sizes are compared.
    """
    try:
        recorded = {name: one for name, one in recorded_sums(path).items() if name.startswith(below)}
    except FileNotFoundError:
        return [Problem(where=str(path), wrong=f"it has no {_COMPLETE}: it was not finished, or it was taken", fix=fix)]
    except (OSError, ValueError) as error:
        return [Problem(where=str(path / _COMPLETE), wrong=f"it cannot be read ({error})", fix=fix)]
    if not recorded:
        return [Problem(where=str(path / _COMPLETE), wrong=f"it lists no file {below}*", fix=fix)]
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        sizes = dict(zip(recorded, pool.map(_size, [path / name for name in recorded]), strict=True))
    there = [name for name, size in sizes.items() if size is not None and recorded[name].num_bytes in (None, size)]
    found: dict[str, str | None] = {name: recorded[name].sha256 for name in there}
    of_ranks = [name for name in there if "/" in name and name.endswith(_OF_RANKS)]
    small = [name for name in there if name not in set(of_ranks)]
    found |= zip(small, read_here([path / name for name in small]), strict=True)
    if read is not None:
        of_ranks.sort(key=lambda name: (len(name), name))  # by number: the part of a rank is what it loads, mostly
        found |= zip(of_ranks, read([path / name for name in of_ranks]), strict=True)
    return [
        Problem(
            where=str(path / name),
            wrong=f"the file is missing or differs from its checksum, sha256 {one.sha256[:12]}...",
            fix=fix,
        )
        for name, one in recorded.items()
        if found.get(name) != one.sha256
    ]


def _swap_latest(root: Path, name: str) -> None:
    temporary = root / f"{_LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(root / _LATEST)
    sync_directory(root)
