"""The pipes between this process and one program in a container: its input, its output, and what it says of itself.

They are named pipes in a directory that the container sees read-only. Their names are removed once the container has
opened them, so that no other program in it finds them.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recipes.environments.swe.containers.waiting import settle

MAX_CONTROL_BYTES = 65536  # of one line; a program that writes more there is not ours
READ_BYTES = 65536


class Channel:
    """Three pipes. A line on the control pipe is given to `on_line`, bytes on the output pipe to `on_output`."""

    def __init__(self, directory: Path, name: str, owner: int) -> None:
        self.name = name
        self.on_line: Callable[[str], None] = lambda line: None
        self.on_output: Callable[[bytes], None] = lambda data: None
        self._paths = {kind: directory / f"{name}.{kind}" for kind in ("input", "output", "control")}
        self._descriptors: dict[str, int] = {}
        self._line = bytearray()
        self._loop = asyncio.get_running_loop()
        try:
            for kind, path in self._paths.items():
                os.mkfifo(path, 0o600)
                if owner != os.geteuid():
                    os.chown(path, owner, -1)
                # Opened for both, a pipe has no end as long as this process has it.
                self._descriptors[kind] = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            self._loop.add_reader(self._descriptors["control"], self.read_control)
            self._loop.add_reader(self._descriptors["output"], self._read_output, READ_BYTES)
        except OSError:
            self.close()
            raise

    def unlink(self) -> None:
        """Remove the names."""
        for path in self._paths.values():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the pipes; what is in them is lost."""
        for kind, descriptor in self._descriptors.items():
            self._loop.remove_reader(descriptor)
            if kind == "input":
                self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._descriptors = {}
        self.unlink()

    def drain(self) -> None:
        """Read the output that has been written up to now."""
        descriptor = self._descriptors.get("output")
        if descriptor is None:
            return
        waiting = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
        left = waiting[0]
        while left > 0 and (num := self._read_output(left)):
            left -= num

    async def send(self, data: bytes) -> None:
        """Write to the program; waits where it does not read. Raises `OSError` when the channel is closed."""
        view = memoryview(data)
        while view:
            descriptor = self._descriptors.get("input")
            if descriptor is None:
                raise BrokenPipeError("the channel is closed")
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                await self._writable(descriptor)

    async def _writable(self, descriptor: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(descriptor, settle, ready)
        try:
            await ready
        finally:
            if self._descriptors.get("input") == descriptor:
                self._loop.remove_writer(descriptor)

    def _read_output(self, num_bytes: int) -> int:
        try:
            data = os.read(self._descriptors["output"], num_bytes)
        except BlockingIOError:
            return 0
        self.on_output(data)
        return len(data)

    def read_control(self) -> None:
        """Read what has been said on the control pipe."""
        with suppress(BlockingIOError):
            self._line += os.read(self._descriptors["control"], READ_BYTES)
        *lines, rest = bytes(self._line).split(b"\n")
        self._line = bytearray(rest[:MAX_CONTROL_BYTES])
        for line in lines:
            self.on_line(line.decode(errors="replace"))
