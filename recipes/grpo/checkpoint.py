"""Checkpoints: one directory per saved step, which is complete or absent, and from which a run continues exactly.

    step_000010/
      policy/               Megatron distributed checkpoint: weights, optimizer, scheduler, RNG
      hf/                   export that transformers, vLLM and the next stage load
      state.json            step, identity of the data, position in the prompt stream, prompts in flight, metrics
      replay_buffer.jsonl   finished groups that no step has trained on yet
      ledger.jsonl          every prompt that was trained on or failed, with its step
      COMPLETE              sha256 of every file above; a directory without it is no checkpoint

Written under a temporary name, renamed, then `latest` is swapped: a kill at any moment leaves the previous one.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from recipes.errors import CheckpointError, Problem
from recipes.grpo.data import DataIdentity
from recipes.grpo.rollout import CollectorState, DrawnPrompt
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan

logger = logging.getLogger(__name__)
_COMPLETE = "COMPLETE"
_EXPORT = "hf"
_LATEST = "latest"
_HASH_THREADS = 16  # hashing releases the interpreter lock, and a parallel file system serves many readers


class Saveable(Protocol):
    """The part of `Policy` that a checkpoint uses."""

    def save(self, path: Path) -> None: ...

    def export_hf(self, path: Path) -> None: ...


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


def step_dir(root: Path, step: int) -> Path:
    """Return the directory of a saved step."""
    return root / f"step_{step:06d}"


def save_checkpoint(root: Path, state: SavedState, policy: Saveable) -> Path:
    """Write a checkpoint and point `latest` at it; returns its directory."""
    target = step_dir(root, state.step)
    temporary = root / f"tmp_{target.name}"
    for left in root.glob("tmp_*"):  # by a run that was killed while it saved or pruned, at whatever step
        shutil.rmtree(left)
    temporary.mkdir(parents=True)
    policy.save(temporary / "policy")
    policy.export_hf(temporary / _EXPORT)
    collector = state.collector
    (temporary / "state.json").write_bytes(
        orjson.dumps(
            {
                "step": state.step,
                "data": state.data,
                "position": collector.position,
                "in_flight": collector.in_flight,
                "failed": collector.failed,
                "skipped": collector.skipped,
                "metrics": dict(state.metrics),
            },
            option=orjson.OPT_INDENT_2,
        )
    )
    _write_lines(temporary / "replay_buffer.jsonl", collector.finished)
    _write_lines(temporary / "ledger.jsonl", state.ledger)
    _write_complete(temporary)
    if target.exists():  # left by a run that was killed after the rename; its content is the same step
        shutil.rmtree(target)
    temporary.rename(target)
    _swap_latest(root, target.name)
    return target


def latest_checkpoint(root: Path) -> Path | None:
    """Return the highest complete step under `root`, verified against its checksums, or None.

    Raises `CheckpointError` when it is damaged: silently going back to an older one would repeat steps unnoticed.
    """
    complete = [path for path in complete_checkpoints(root).values()]
    if not complete:
        return None
    newest = complete[-1]
    _verify(newest, fix=f"restore it, or remove {newest} to resume from the checkpoint before it")
    return newest


def is_export(path: Path) -> bool:
    """Whether a path names the export of a checkpoint: .../latest/hf or .../step_000010/hf."""
    return path.name == _EXPORT and (path.parent.name == _LATEST or path.parent.name.startswith("step_"))


def complete_export(path: Path) -> Path:
    """Return the directory that an export's path names now, `latest` followed and every file checked.

    Raises `CheckpointError` when there is none, when its checkpoint was not finished, or when it was changed since.
    """
    checkpoint = path.parent.resolve()
    if not (checkpoint / _COMPLETE).is_file():
        raise CheckpointError(
            Problem(
                where=str(path),
                got="a checkpoint that was not finished" if checkpoint.is_dir() else "no checkpoint",
                expected="the export of a complete checkpoint",
                fix="let the run that writes it save once, or set MODEL_PATH to other start weights",
            )
        )
    _verify(checkpoint, below=f"{_EXPORT}/", fix="restore it, or set MODEL_PATH to the export of another step")
    return checkpoint / _EXPORT


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return step -> directory of every complete checkpoint, in order of step."""
    found = {int(path.name.removeprefix("step_")): path for path in root.glob("step_*") if (path / _COMPLETE).is_file()}
    return dict(sorted(found.items()))


def load_state(path: Path) -> SavedState:
    """Read back what `save_checkpoint` wrote, without the policy."""
    raw = orjson.loads((path / "state.json").read_bytes())
    return SavedState(
        step=raw["step"],
        data=DataIdentity(**raw["data"]),
        collector=CollectorState(
            position=raw["position"],
            in_flight=tuple(
                DrawnPrompt(**{**drawn, "prompt": PromptRef(**drawn["prompt"])}) for drawn in raw["in_flight"]
            ),
            finished=tuple(_group(line) for line in _read_lines(path / "replay_buffer.jsonl")),
            failed=tuple((PromptRef(**ref), reason) for ref, reason in raw["failed"]),
            skipped=tuple(raw["skipped"]),
        ),
        ledger=tuple(LedgerEntry(**line) for line in _read_lines(path / "ledger.jsonl")),
        metrics=raw["metrics"],
    )


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_top_k: int | None,
    by_metric: bool,
    higher_is_better: bool,
    save_period: int,
) -> set[int]:
    """Return the steps that survive pruning: the best `keep_top_k` of those on the save period, and the newest.

    A checkpoint without the metric ranks last; ties prefer the newer; without `by_metric` newer is better;
    `keep_top_k` None keeps all.
    """
    if not metrics or keep_top_k is None:
        return set(metrics)

    def rank(step: int) -> tuple[float, int]:
        value = metrics[step] if by_metric else None
        if value is None:
            return (float("-inf"), step)
        return (value if higher_is_better else -value, step)

    on_period = sorted((step for step in metrics if step % save_period == 0), key=rank, reverse=True)
    return {*on_period[:keep_top_k], max(metrics)}


def prune(root: Path, *, keep_top_k: int | None, metric: str | None, higher_is_better: bool, save_period: int) -> None:
    """Delete the checkpoints that retention does not keep."""
    found = complete_checkpoints(root)
    values: dict[int, float | None] = {
        step: load_metrics(path).get(metric) if metric else None for step, path in found.items()
    }
    kept = steps_to_keep(
        values,
        keep_top_k=keep_top_k,
        by_metric=metric is not None,
        higher_is_better=higher_is_better,
        save_period=save_period,
    )
    for step in set(found) - kept:
        doomed = found[step].rename(root / f"tmp_pruned_{found[step].name}")  # a kill here leaves no half checkpoint
        shutil.rmtree(doomed)
        logger.info("pruned checkpoint of step %d", step)


def load_metrics(path: Path) -> dict[str, float]:
    """Return the metrics stored with a checkpoint."""
    metrics: dict[str, float] = orjson.loads((path / "state.json").read_bytes())["metrics"]
    return metrics


def _write_lines(path: Path, items: Sequence[Any]) -> None:
    path.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items))


def _read_lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _group(raw: dict[str, Any]) -> Group:
    def turn(value: dict[str, Any]) -> Turn:
        spans = tuple(VersionSpan(**span) for span in value.pop("versions"))
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            value[name] = tuple(value[name])
        return Turn(versions=spans, **value)

    def rollout(value: dict[str, Any]) -> Rollout:
        turns = tuple(turn(item) for item in value.pop("turns"))
        return Rollout(turns=turns, status=RolloutStatus(value.pop("status")), **value)

    rollouts = tuple(rollout(item) for item in raw.pop("rollouts"))
    return Group(prompt=PromptRef(**raw.pop("prompt")), rollouts=rollouts, **raw)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != _COMPLETE)


def _write_complete(path: Path) -> None:
    digests = {str(file.relative_to(path)): _digest(file) for file in _files(path)}
    (path / _COMPLETE).write_bytes(orjson.dumps(digests, option=orjson.OPT_INDENT_2))


def _verify(path: Path, *, below: str = "", fix: str) -> None:
    """Compare the files of a checkpoint whose name begins with `below` with their checksums."""
    recorded: dict[str, str] = orjson.loads((path / _COMPLETE).read_bytes())
    digests = {name: digest for name, digest in recorded.items() if name.startswith(below)}

    def is_intact(name: str) -> bool:
        return (path / name).is_file() and _digest(path / name) == digests[name]

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        intact = list(pool.map(is_intact, digests))
    problems = [
        Problem(
            where=str(path / name),
            got="a file that is missing or differs from its checksum",
            expected=f"sha256 {digests[name][:12]}...",
            fix=fix,
        )
        for name, is_whole in zip(digests, intact, strict=True)
        if not is_whole
    ]
    if not digests:
        problems = [Problem(where=str(path / _COMPLETE), got=f"no file {below}*", expected="at least one", fix=fix)]
    if problems:
        raise CheckpointError(problems)


def _swap_latest(root: Path, name: str) -> None:
    temporary = root / f"{_LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(root / _LATEST)
