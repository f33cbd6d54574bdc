"""Ends containers that use more memory or disk than they may: one thread for all containers of this process.

A thread, so that the limits hold also while the event loop is busy.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recipes.environments.swe.containers.processes import proportional_bytes, tree, unnamed_memory_bytes
from recipes.environments.swe.contract import ContainerEnd, ContainerLimits

PERIOD_SECONDS = 0.5
IN_MEMORY = ("tmpfs", "overlay", "fuse.fuse-overlayfs")  # an overlay here has its upper layer in a tmpfs
MIB = 2**20


class Watched:
    """What one container uses. Set by the watchdog: `broken`, `detail` and `peak_memory_mib`."""

    def __init__(
        self, init: int, handle: int, limits: ContainerLimits, *, layers: Sequence[str], memory_files: bool
    ) -> None:
        """`init` is its first process and `handle` a pidfd of it; `memory_files`: its processes may make memfds.

        `layers` are the mount points inside of what it writes to, in memory.
        """
        self.init, self.limits, self.peak_memory_mib = init, limits, 0.0
        self.broken: ContainerEnd | None = None
        self.detail = ""
        self._handle, self._memory_files = handle, memory_files
        self._layers = [path for path in layers if _type_of(init, path) in IN_MEMORY]
        self._lock = threading.Lock()
        self._is_over = False

    def look(self) -> None:
        """Measure what it uses, and kill it where that is too much."""
        disk = self._layer_bytes()
        memory = self._memory_bytes(disk)
        self.peak_memory_mib = max(self.peak_memory_mib, memory / MIB)
        if disk >= self.limits.disk_mib * MIB:
            self._end(ContainerEnd.DISK, f"its writable layer holds {disk // MIB} of {self.limits.disk_mib} MiB")
        elif memory > self.limits.memory_mib * MIB:
            self._end(ContainerEnd.MEMORY, f"its processes use {memory // MIB} of {self.limits.memory_mib} MiB")

    def kill(self) -> None:
        """Kill its first process, and so all of them; `forget` must not have been called."""
        with self._lock:
            if not self._is_over:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def forget(self) -> None:
        """Never touch its processes again: their numbers may soon be those of others."""
        with self._lock:
            self._is_over = True

    def _end(self, broken: ContainerEnd, detail: str) -> None:
        if self.broken is None:
            self.broken, self.detail = broken, detail
        self.kill()

    def _memory_bytes(self, layer: int) -> int:
        """Return the memory of all processes with that of the writable layer, which lies in memory, too."""
        processes = list(tree(self.init))
        resident = sum(process.resident_bytes for process in processes)
        if self._memory_files:
            files: dict[int, int] = {}
            for process in processes:
                files |= unnamed_memory_bytes(process.pid)
            layer += sum(files.values())
        if resident + layer > self.limits.memory_mib * MIB:  # shared pages count once, where it matters
            shares = ((proportional_bytes(process.pid), process.resident_bytes) for process in processes)
            resident = sum(own if share is None else share for share, own in shares)
        return resident + layer

    def _layer_bytes(self) -> int:
        """Return what the file systems that it writes to hold."""
        found: dict[tuple[int, int, int], int] = {}  # two mount points may show one of them
        for path in self._layers:
            with suppress(OSError):
                place = os.statvfs(f"/proc/{self.init}/root{path}")
                used = (place.f_blocks - place.f_bfree) * place.f_frsize
                found[place.f_blocks, place.f_bfree, place.f_ffree] = used
        return sum(found.values())


def _type_of(pid: int, mount_point: str) -> str:
    """Return the type of the file system that a process sees at a mount point; an empty text for none."""
    found = ""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            fields, _, system = line.partition(" - ")
            if fields.split()[4] == mount_point:
                found = system.split()[0]
    return found


class Watchdog:
    """The thread; it starts with the first container."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        self._is_needed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="container-watchdog", daemon=True)
                self._thread.start()
            self._is_needed.set()

    def remove(self, watched: Watched) -> None:
        watched.forget()
        with self._lock:
            self._watched.discard(watched)
            if not self._watched:
                self._is_needed.clear()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._is_needed.wait()
            with self._lock:
                watched = list(self._watched)
            for one in watched:
                one.look()
            pause.wait(PERIOD_SECONDS)


WATCHDOG = Watchdog()
