"""Containers by bubblewrap: on a SIF file, a squashfs or a directory with a root file system. See `held.py`."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.environments.swe.containers import held
from recipes.environments.swe.containers.held import HeldRuntime, Opened

PROGRAMS = {"bwrap": "bubblewrap", **held.PROGRAMS}


class BwrapRuntime(HeldRuntime):
    """See `contract.Runtime`."""

    def __init__(self) -> None:
        super().__init__(_Bwrap())


class _Bwrap:
    name = "bwrap"

    def open(self, directory: Path) -> Opened:
        content: bytes = held.filter_module()["filter_program"]()
        descriptor = os.memfd_create("filter")
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return Opened(namespaces=("unshare", "--mount"), filter=str(descriptor), descriptors=(descriptor,))
