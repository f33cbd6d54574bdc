"""What the nodes of a job read from shared file systems before the first step, in bytes.

The engines are not in the table: they start without weights and get them from the policy, over the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from recipes.config.keys.derive import Derived
from tools.job.compile_cache import seed_path
from tools.sizing.architecture import Architecture

_CODE = ("recipes", "tools", "configs")  # of the snapshot, what nodes read
_BYTES_PER_WEIGHT = 2  # start weights are stored in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartVolume:
    """One thing that several nodes read."""

    what: str
    node_bytes: float
    num_nodes: int
    note: str

    @property
    def total_bytes(self) -> float:
        """Bytes that the file system serves for all nodes together."""
        return self.node_bytes * self.num_nodes


def start_volumes(model: Architecture, sizes: Derived, *, root: Path, image_bytes: float) -> tuple[StartVolume, ...]:
    """Return what is read, largest first. `image_bytes` is assumed where CONTAINER is no file."""
    image, cache = Path(os.environ.get("CONTAINER") or "-"), os.environ.get("PERSISTENT_CACHE")
    seed = seed_path(Path(cache)) if cache else None
    files = (file for top in _CODE for file in (root / top).rglob("*") if file.suffix != ".pyc" and file.is_file())
    code = sum(file.stat().st_size for file in files)
    found = (
        StartVolume(
            what="start weights",
            node_bytes=float(model.parameters * _BYTES_PER_WEIGHT),
            num_nodes=sizes.num_train_nodes,
            note="at most; the engines get theirs from the policy",
        ),
        StartVolume(
            what="container image",
            node_bytes=float(image.stat().st_size) if image.is_file() else image_bytes,
            num_nodes=sizes.num_nodes,
            note="the file CONTAINER" if image.is_file() else "assumed",
        ),
        StartVolume(
            what="compiled kernels",
            node_bytes=float(seed.stat().st_size) if seed is not None and seed.is_file() else 0.0,
            num_nodes=sizes.num_nodes,
            note="one file in PERSISTENT_CACHE, unpacked on each node's own disk",
        ),
        StartVolume(what="code", node_bytes=float(code), num_nodes=sizes.num_nodes, note="the snapshot of the run"),
    )
    return tuple(sorted(found, key=lambda one: -one.total_bytes))
