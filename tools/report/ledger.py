"""Prompts that never earned a verdict, from the ledger of a run's newest checkpoint.

A prompt is one of these when it failed and was trained on in no other epoch. Those whose answers all earned the same
are none of them: they were judged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recipes.grpo.checkpoint import complete_checkpoints
from recipes.grpo.draw import NO_VARIANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """One prompt without a verdict."""

    line: int  # of the file with the training rows, from 1
    prompt_id: str
    reason: str  # of its last epoch


def unjudged(run_dir: Path) -> tuple[Unjudged, ...]:
    """Return the prompts without a verdict up to the newest checkpoint, in row order; none without a checkpoint."""
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    if not checkpoints:
        return ()
    failed: dict[tuple[int, str], str] = {}
    judged: set[tuple[int, str]] = set()
    with (checkpoints[max(checkpoints)] / "ledger.jsonl").open(encoding="utf-8") as ledger:
        for entry in map(json.loads, ledger):
            _, row, prompt_id = entry["key"].split(":", 2)
            if not entry["reason"] or entry["reason"] == NO_VARIANCE:
                judged.add((int(row), prompt_id))
            else:
                failed[int(row), prompt_id] = entry["reason"]
    return tuple(
        Unjudged(line=row + 1, prompt_id=prompt_id, reason=failed[row, prompt_id])
        for row, prompt_id in sorted(failed.keys() - judged)
    )
