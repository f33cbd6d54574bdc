"""Prompts that never earned a verdict, from the ledger of a run's newest checkpoint.

A prompt is one of these when it failed and was trained on in no other epoch. Those whose answers all earned the same
are none of them: they were judged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import InputError, Problem
from recipes.grpo.checkpoint import complete_checkpoints
from recipes.grpo.data import NO_VARIANCE

MAX_LOOKS = 3  # a run needs minutes from one checkpoint to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """One prompt without a verdict."""

    line: int  # of the file with the training rows, from 1
    prompt_id: str
    reason: str  # of its last epoch


def unjudged(run_dir: Path) -> tuple[Unjudged, ...]:
    """Return the prompts without a verdict up to the newest checkpoint, in row order; none without a checkpoint."""
    failed: dict[tuple[int, str], str] = {}
    judged: set[tuple[int, str]] = set()
    path, content = _newest_ledger(run_dir / "checkpoints")
    for number, line in enumerate(content.splitlines(), start=1):
        key, reason = _entry(line, f"{path}:{number}")
        if not reason or reason == NO_VARIANCE:
            judged.add(key)
        else:
            failed[key] = reason
    return tuple(
        Unjudged(line=row + 1, prompt_id=prompt_id, reason=failed[row, prompt_id])
        for row, prompt_id in sorted(failed.keys() - judged)
    )


def _entry(line: bytes, where: str) -> tuple[tuple[int, str], str]:
    """Return row and prompt of one line, and why it has no verdict; raises `InputError` for any other line."""
    try:
        entry = json.loads(line)
        _, row, prompt_id = entry["key"].split(":", 2)
        return (int(row), prompt_id), str(entry["reason"] or "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wrong, fix = "it is no entry of a ledger: the checkpoint is damaged", "restore it, or remove the checkpoint"
        raise InputError(Problem(where=where, wrong=wrong, fix=fix)) from error


def _newest_ledger(root: Path) -> tuple[Path, bytes]:
    """Return path and content of the ledger of the newest checkpoint, nothing without a checkpoint.

    A run that goes on may remove what was the newest a moment ago, once it has a newer one: then that one is read.
    """
    for _ in range(MAX_LOOKS):
        checkpoints = complete_checkpoints(root)
        if not checkpoints:
            return root, b""
        newest = checkpoints[max(checkpoints)]
        try:
            path = newest / "ledger.jsonl"
            return path, path.read_bytes()
        except FileNotFoundError as error:
            if newest.exists():
                wrong, fix = "the checkpoint has no ledger.jsonl", "copy it from elsewhere, or remove the checkpoint"
                raise InputError(Problem(where=str(newest), wrong=wrong, fix=fix)) from error
    wrong = f"the run removed its newest checkpoint before it could be read, {MAX_LOOKS} times"
    raise InputError(Problem(where=str(root), wrong=wrong, fix="make the report again"))
