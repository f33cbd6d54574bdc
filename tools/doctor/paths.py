"""Directories that the run writes: writable, and with room for its checkpoints; paths that its containers must see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from recipes.files import nearest_existing
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found
from tools.planning.mounts import mount_problems

MIN_FREE_BYTES = 2**30
MANY = 20  # a run that keeps all of its checkpoints should have room for so many
CHECKPOINT_FACTOR = 8  # bytes of one checkpoint per byte of bfloat16 weights: float32 master, two moments, export


def check(draft: Draft) -> Iterator[Finding]:
    """Check the run directory, the directory of caches, and the mounts."""
    yield from as_findings("PTH002", mount_problems(draft))
    if draft.run_dir is not None:
        yield from writable(draft.run_dir, "RESULTS_DIR")
        model = draft.path("MODEL_PATH")
        saving = draft.config.checkpointing if draft.config else None
        kept = saving.keep_top_k if saving else None
        yield from disk_findings(draft.run_dir, weight_bytes(model) if model else 0, kept)
    cache = draft.path("PERSISTENT_CACHE")
    if cache is not None and not draft.contract.is_local:
        yield from writable(cache, "PERSISTENT_CACHE")


def writable(path: Path, variable: str) -> Iterator[Finding]:
    """Check that a directory can be written, or made."""
    place = nearest_existing(path)
    if not place.is_dir():
        fix = f"remove it, or set {variable} to another place"
        yield found("PTH001", where=str(path), wrong=f"{place} is a file, not a directory", fix=fix)
        return
    if not os.access(place, os.W_OK | os.X_OK):
        fix = f"ask for the right to write there, or set {variable} to another place"
        yield found("PTH001", where=str(path), wrong=f"{place} cannot be written", fix=fix)


def disk_findings(run_dir: Path, num_bytes: int, kept: int | None) -> Iterator[Finding]:
    """Check that the disk of the run has room for one more checkpoint of these weights, and for all that are kept."""
    free = shutil.disk_usage(nearest_existing(run_dir)).free
    one = CHECKPOINT_FACTOR * num_bytes
    got, where = f"{free / 2**30:.1f} GiB free", str(run_dir)
    if free < max(MIN_FREE_BYTES, one):
        expected = f"{max(MIN_FREE_BYTES, one) / 2**30:.1f} GiB, the size of a checkpoint"
        fix = "free some disk, or set RESULTS_DIR to another one"
        yield found("PTH004", where=where, got=got, expected=expected, fix=fix)
    elif free < (MANY if kept is None else kept + 1) * one:  # the one that is written comes before one is removed
        room = f"room for {free // one} checkpoints of {one / 2**30:.1f} GiB"
        keeps = "all of them" if kept is None else str(kept)
        fix = "lower checkpointing.keep_top_k, or watch the disk"
        yield found("PTH005", where=where, got=f"{got}, {room}", expected=f"room for {keeps} (keep_top_k)", fix=fix)


def weight_bytes(path: Path) -> int:
    """Return the size of the weights of a Hugging Face directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
