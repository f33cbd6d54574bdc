"""One bash that a container's first process has started on request, and what it says on its control pipe.

The pipes between this process and one program in a container: its input, its output, and what it says of itself.

They are named pipes in a directory that the container sees read-only. Their names are removed once the container has
opened them, so that no other program in it finds them.

Whether a container runs, how it ended, and which process groups are whose in it.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import termios
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.environments.swe.containers.processes import number_inside, send_signal, tree
from recipes.environments.swe.containers.waiting import settle
from recipes.environments.swe.containers.watchdog import Watched
from recipes.environments.swe.contract import ContainerEnd, ContainerEndedError


class ContainerState:
    """What a container and the programs in it share."""

    def __init__(self) -> None:
        self.watched: Watched | None = None  # once its first process is known
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # set when it has ended
        self.is_closed = False
        self.groups: set[int] = set()  # of the programs that were started by request

    @property
    def init(self) -> int:
        """Its first process."""
        assert self.watched is not None
        return self.watched.init

    def end(self) -> None:
        """Say that its first process has ended."""
        settle(self.over)

    def check(self) -> None:
        """Raise `ContainerEndedError` once it has ended or is being closed."""
        if self.is_closed:
            raise ContainerEndedError(ContainerEnd.DIED, "it was closed")
        if self.over.done():
            raise self.why_ended("")

    def why_ended(self, otherwise: str) -> ContainerEndedError:
        """Return the limit that it was killed for, also before `end` was called; without one say that it died."""
        if self.watched is None or self.watched.broken is None:
            return ContainerEndedError(ContainerEnd.DIED, otherwise)
        return ContainerEndedError(self.watched.broken, self.watched.detail)

    async def wait(self, awaited: Iterable[asyncio.Future[int]], seconds: float) -> bool:
        """Wait for one of some futures; False when none is there in time. Raises `ContainerEndedError`."""
        self.check()
        waiting: list[asyncio.Future[Any]] = [*awaited, self.over]
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.check()
        return bool(done)

    def kill(self) -> None:
        """Kill all its processes; it is still to be closed."""
        if self.watched is not None:
            self.watched.kill()


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


OPEN_SECONDS = 60.0
STOP_STEPS = 10
KILLED_STATUS = 137  # of a bash whose supervisor was killed, so that nobody says how it ended
Known = frozenset[tuple[int, int]]  # processes: number, start


class Program:
    """A bash with its channel. `ended` is set to its status when it has ended."""

    def __init__(self, state: ContainerState, directory: Path, name: str, owner: int) -> None:
        loop = asyncio.get_running_loop()
        self._state = state
        self.on_close: Callable[[Program], None] = lambda program: None
        self._opened: asyncio.Future[int] = loop.create_future()  # its supervisor's number inside
        self.ended: asyncio.Future[int] = loop.create_future()
        self._marks: dict[str, asyncio.Future[int]] = {}
        self._handle = -1  # pidfd of its supervisor
        self.group = -1  # its process group, which is its supervisor's number on this machine
        self.channel = Channel(directory, name, owner)
        self.channel.on_line = self._on_line

    async def wait_until_open(self) -> None:
        """Wait for its supervisor; then remove the names of its pipes. Raises `ContainerEndedError`."""
        if not await self._state.wait([self._opened, self.ended], OPEN_SECONDS) or not self._opened.done():
            self._state.kill()
            raise ContainerEndedError(ContainerEnd.DIED, "it can start no more programs")
        self.channel.unlink()
        inside = self._opened.result()
        found = (one.pid for one in tree(self._state.init) if number_inside(one.pid) == inside)
        self.group = next(found, -1)
        self._state.groups.add(self.group)
        with suppress(OSError):  # it may have ended already, and has said so
            self._handle = os.pidfd_open(self.group)
            asyncio.get_running_loop().add_reader(self._handle, self._on_death)

    @property
    def bash(self) -> int | None:
        """The bash's number on this machine; None when it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.group}/task/{self.group}/children").read_text(encoding="utf-8").split()[0])
        return None

    @property
    def directory(self) -> str | None:
        """The bash's directory; None when it has ended, or this user may not see it."""
        with suppress(OSError):
            if (bash := self.bash) is not None:
                return str(Path(f"/proc/{bash}/cwd").readlink())
        return None

    def expect(self, mark: str, result: asyncio.Future[int]) -> None:
        """Set a result to the status that comes with this mark."""
        self._marks[mark] = result

    def forget_marks(self) -> None:
        self._marks.clear()

    def known(self) -> Known:
        """Return what runs in the container now."""
        return frozenset((one.pid, one.start_ticks) for one in tree(self._state.init))

    def interrupt_started(self, before: Known) -> None:
        """Interrupt the bash, and what runs in the container but neither ran before nor belongs to another program."""
        # The bash first: one that was interrupted while it waited for an interrupted program drops its command.
        for pid in (self.bash, *self._started(before)):
            if pid is not None:
                send_signal(pid, signal.SIGINT)

    def kill_started(self, before: Known) -> int:
        """Kill what runs but neither ran before nor belongs to another program; return how many processes that were.

        All are stopped first, so that none starts another meanwhile.
        """
        stopped: set[int] = set()
        for _ in range(STOP_STEPS):
            found = self._started(before) - stopped
            for pid in found:
                send_signal(pid, signal.SIGSTOP)
            stopped |= found
            if not found:
                break
        for pid in stopped:
            send_signal(pid, signal.SIGKILL)
        return len(stopped)

    def _started(self, before: Known) -> set[int]:
        own = {self.group, self.bash, self._state.init}
        return {
            one.pid
            for one in tree(self._state.init, frozenset(self._state.groups))
            if one.shell in (0, self.group) and one.pid not in own and (one.pid, one.start_ticks) not in before
        }

    def end(self) -> None:
        """Kill its process group, and close the channel."""
        if self.group > 1:
            for one in list(tree(self._state.init)):
                if one.group == self.group:  # else the number may be another's by now
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.group, signal.SIGKILL)
                    break
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._forget_supervisor()
        self.channel.close()
        self._state.groups.discard(self.group)
        self.on_close(self)

    def _on_death(self) -> None:
        """Note that its supervisor has ended, after what that said last."""
        self._forget_supervisor()
        self.channel.read_control()
        if not self.ended.done():
            self.ended.set_result(KILLED_STATUS)

    def _forget_supervisor(self) -> None:
        if self._handle >= 0:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1

    def _on_line(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            return
        future = {"opened": self._opened, "ended": self.ended}.get(word) or self._marks.get(word)
        if future is not None and not future.done():
            future.set_result(int(number))
