"""Which process of several runs which test file."""

from __future__ import annotations

import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent
SLURM = re.compile(r"^from slurm\.cluster import .*\bCluster\b", re.MULTILINE)


def starts_slurm(file: Path) -> bool:
    """Return whether the tests of a file start Slurm clusters."""
    return SLURM.search(file.read_text(encoding="utf-8")) is not None


class ByFile(LoadFileScheduling):
    """One process runs all files that start Slurm clusters, which take turns: in other processes they would wait."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "slurm" if starts_slurm(ROOT / file) else file
