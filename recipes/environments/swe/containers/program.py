"""One bash that a container's first process has started on request, and what it says on its control pipe."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recipes.environments.swe.containers.channel import Channel
from recipes.environments.swe.containers.processes import number_inside, send_signal, tree
from recipes.environments.swe.containers.state import ContainerState
from recipes.environments.swe.contract import ContainerEnd, ContainerEndedError

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
            return int(Path(f"/proc/{self.group}/task/{self.group}/children").read_text().split()[0])
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
