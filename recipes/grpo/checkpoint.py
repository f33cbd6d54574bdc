"""Checkpoints: one directory per saved step, which is complete or absent, and from which a run continues exactly.

    step_000010/
      policy/               Megatron distributed checkpoint: weights, optimizer, scheduler, RNG
      hf/                   export that transformers, vLLM and the next stage load
      state.json            step, identity of the data, position in the prompt stream, prompts in flight, metrics
      replay_buffer.safetensors   finished groups that no step has trained on yet: headers as JSON, tokens as arrays
      ledger.jsonl          every prompt that was trained on or failed, with its step
      COMPLETE              sha256 of every file above; a directory without it is no checkpoint

It is written under a temporary name, flushed to the disk and renamed; then `latest` is swapped. So a kill or a power
cut at any moment leaves the previous one. Older ones are removed only once the newest is read back and found whole.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import shutil
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.errors import CheckpointError, Problem
from recipes.files import sha256_of, sync_directory, sync_tree, write_atomically
from recipes.grpo.buffer import read_groups, write_groups
from recipes.grpo.data import DataIdentity
from recipes.grpo.draw import CollectorState, DrawnPrompt
from recipes.types import PromptRef

logger = logging.getLogger(__name__)
_COMPLETE = "COMPLETE"
EXPORT = "hf"
_BUFFER = "replay_buffer.safetensors"
_LATEST = "latest"
_STEP = re.compile(r"step_(\d{6,})")
_HASH_THREADS = 16  # hashing releases the interpreter lock, and a parallel file system serves many readers


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


def step_dir(root: Path, step: int) -> Path:
    """Return the directory of a saved step."""
    return root / f"step_{step:06d}"


def make_directory(root: Path, step: int) -> Path:
    """Return a new temporary directory for a checkpoint; what killed runs have left half-done is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("tmp_*"):
        discard(left)
    temporary = _unused(root / f"tmp_{step_dir(root, step).name}")
    temporary.mkdir()
    return temporary


def complete(root: Path, step: int, temporary: Path) -> None:
    """Give a written checkpoint its checksums and its name, and point `latest` at it."""
    target = step_dir(root, step)
    sync_tree(temporary)
    _write_complete(temporary)
    if target.exists():  # of a run that was killed after the rename: its content is the same step
        target.rename(_unused(root / f"tmp_replaced_{target.name}"))
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


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root` whose files equal their checksums; None when there is none.

    Damaged ones that are newer are logged as errors and moved aside, to `damaged_step_...`: the steps after the one
    returned are trained again. Raises `CheckpointError` when all are damaged: starting over is the user's decision.
    """
    problems: list[Problem] = []
    damaged: list[Path] = []
    for path in reversed(complete_checkpoints(root).values()):
        found = _damage(path, fix="restore it, or remove the directory to do without it")
        if not found:
            _move_aside(root, damaged, path)
            return path
        problems += found
        damaged.append(path)
        for problem in found:
            logger.error("damaged checkpoint: %s", problem)
    if problems:
        raise CheckpointError(problems)
    return None


def _move_aside(root: Path, damaged: Sequence[Path], good: Path) -> None:
    if damaged:
        _swap_latest(root, good.name)
    for path in damaged:
        logger.error("%s is damaged: the run goes on from %s, the steps after it are trained again", path, good)
        aside = _unused(root / f"damaged_{path.name}")
        try:
            path.rename(aside)
            logger.error("the damaged checkpoint is kept as %s; remove it when nobody needs it", aside)
        except OSError as error:
            logger.warning("%s not renamed: %s", path, error)


def is_export(path: Path) -> bool:
    """Whether a path names the export of a checkpoint: .../latest/hf or .../step_000010/hf."""
    return path.name == EXPORT and (path.parent.name == _LATEST or path.parent.name.startswith("step_"))


def complete_export(path: Path) -> Path:
    """Return the directory that an export's path names now, `latest` followed and every file checked.

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
    if problems := _damage(checkpoint, below=f"{EXPORT}/", fix=fix):
        raise CheckpointError(problems)
    return checkpoint / EXPORT


def require_whole(checkpoint: Path, part: str) -> None:
    """Raise `CheckpointError` unless every file below `part` of a saved step equals its checksum."""
    if problems := _damage(checkpoint, below=f"{part}/", fix="restore it, or take another step"):
        raise CheckpointError(problems)


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return step -> directory of every complete checkpoint, in order of step; other names are ignored."""
    found = {
        int(match[1]): path
        for path in root.glob("step_*")
        if (match := _STEP.fullmatch(path.name)) and (path / _COMPLETE).is_file()
    }
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
    raw = orjson.loads((path / "state.json").read_bytes())
    finished, finished_tokens = read_groups(path / _BUFFER)
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
    """Delete the checkpoints that retention does not keep, once the newest is read back whole. Never ends the run.

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
    if doomed and metric is not None and not unread and set(values.values()) == {None}:
        wrong = "no checkpoint has this metric, so the newest are kept as if it were null"
        logger.error("checkpointing.metric_name: %s: %s", metric, wrong)
    if doomed and (
        problems := _damage(
            found[max(found)], fix="copy it from elsewhere, or remove it; until then no older one is removed"
        )
    ):
        for problem in problems:
            logger.error("damaged checkpoint: %s", problem)
        return
    for step in doomed:
        aside = _unused(root / f"tmp_pruned_{found[step].name}")  # renamed first: a kill leaves no half checkpoint
        try:
            found[step].rename(aside)
        except OSError as error:
            logger.warning("checkpoint of step %d not pruned: %s", step, error)
            continue
        discard(aside)
        logger.info("pruned checkpoint of step %d", step)


def _records(found: Mapping[int, Path]) -> tuple[dict[int, Any], set[int]]:
    """Return what `state.json` of each checkpoint says, and the steps whose file cannot be read."""
    records, unread = {}, set()
    for step, path in found.items():
        try:
            records[step] = orjson.loads((path / "state.json").read_bytes())
        except (OSError, ValueError) as error:
            unread.add(step)
            logger.warning("%s: metrics not read, so it is kept: %s", path, error)
    return records, unread


def discard(path: Path) -> None:
    """Delete a directory as far as that is possible; what stays (`.nfs*`, stale handles) is logged."""

    def report(_function: object, left: str, failure: tuple[object, BaseException, object]) -> None:
        logger.warning("not removed: %s: %s", left, failure[1])

    shutil.rmtree(path, onerror=report)


def _unused(path: Path) -> Path:
    """Return `path`, or where something that could not be removed has this name, `path.2`, `path.3`, ..."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _write_lines(path: Path, items: Sequence[Any]) -> None:
    path.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items))


def _read_lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != _COMPLETE)


def _write_complete(path: Path) -> None:
    files = _files(path)
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        digests = pool.map(sha256_of, files)
    content = {str(file.relative_to(path)): digest for file, digest in zip(files, digests, strict=True)}
    write_atomically(path / _COMPLETE, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _damage(path: Path, *, below: str = "", fix: str) -> list[Problem]:
    """Return the files of a checkpoint, of those whose names begin with `below`, that differ from their checksums."""
    try:
        recorded: dict[str, str] = orjson.loads((path / _COMPLETE).read_bytes())
    except (OSError, ValueError) as error:
        return [Problem(where=str(path / _COMPLETE), wrong=f"it cannot be read ({error})", fix=fix)]
    digests = {name: digest for name, digest in recorded.items() if name.startswith(below)}

    def is_intact(name: str) -> bool:
        try:
            return sha256_of(path / name) == digests[name]
        except OSError:
            return False

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        intact = list(pool.map(is_intact, digests))
    problems = [
        Problem(
            where=str(path / name),
            wrong=f"the file is missing or differs from its checksum, sha256 {digests[name][:12]}...",
            fix=fix,
        )
        for name, is_whole in zip(digests, intact, strict=True)
        if not is_whole
    ]
    if not digests:
        problems = [Problem(where=str(path / _COMPLETE), wrong=f"it lists no file {below}*", fix=fix)]
    return problems


def _swap_latest(root: Path, name: str) -> None:
    temporary = root / f"{_LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(root / _LATEST)
    sync_directory(root)
