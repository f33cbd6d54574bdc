"""A running container: one process tree on this machine, whose first process starts shells on request (`init.sh`)."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from recipes.environments.swe.containers.processes import number_inside, tree
from recipes.environments.swe.containers.program import ContainerState, Program
from recipes.environments.swe.containers.shell import BashShell
from recipes.environments.swe.containers.waiting import has_ended
from recipes.environments.swe.containers.watchdog import WATCHDOG, Watched
from recipes.environments.swe.contract import (
    ContainerEnd,
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
)

logger = logging.getLogger(__name__)

INIT = Path(__file__).with_name("init.sh")
START_SECONDS = 120.0
FILE_SECONDS = 120.0  # to read or write one
END_SECONDS = 30.0  # from the kill of the first process to the end of all
MAX_SAID_BYTES = 65536
MAX_SHOWN = 600  # characters of what a program said in a message

# Forks every container, because the signal at a parent's death means the thread that forked, and this one never ends.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="container-spawner")


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStart:
    """How a runtime starts one container; `release` is called once, when nothing of it runs any more."""

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: Path  # of its pipes; removed at the end
    owner: int  # the user outside whom it runs as
    token: str  # what its first process prints when it is ready
    release: Callable[[], Awaitable[None]] = _nothing
    descriptors: Sequence[int] = field(default=())  # that it inherits; closed here once it has
    layers: Sequence[str] = ("/dev/shm",)  # directories in the file systems in memory that it writes to
    memory_files: bool = False  # whether its processes may make memory files
    ends_by_itself: bool = False  # whether the program that was started ends, and clears up, after the first process


def init_words(token: str, limits: ContainerLimits, *, own_tasks: int = 0) -> list[str]:
    """Return the words after `bash -c` of a container's first process.

    `own_tasks` of the program that starts it count among its processes.
    """
    return [
        INIT.read_text(encoding="utf-8"),
        "init",
        token,
        str(limits.processes + own_tasks),
        str(limits.file_mib * 1024),
    ]


class RunningContainer:
    """A container of any runtime; see `contract.Container`."""

    def __init__(self, launch: ContainerStart, process: subprocess.Popen[bytes], limits: ContainerLimits) -> None:
        self._launch, self._process, self._limits = launch, process, limits
        self._loop = asyncio.get_running_loop()
        self._state = ContainerState()
        self._ready: asyncio.Future[bool] = self._loop.create_future()
        self._said, self._errors = bytearray(), bytearray()
        self._programs: set[Program] = set()
        self._num_programs = 0
        self._handle = -1  # pidfd of its first process
        self._closing: asyncio.Task[None] | None = None
        for stream, read in ((process.stdout, self._read_said), (process.stderr, self._read_errors)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._loop.add_reader(stream.fileno(), read, stream.fileno())
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    @classmethod
    async def start(cls, launch: ContainerStart, limits: ContainerLimits) -> RunningContainer:
        """Start it and wait until it takes requests; raises `ContainerFailedError`, and then nothing is left of it."""

        def fork() -> subprocess.Popen[bytes]:
            pipe, fds, env = subprocess.PIPE, launch.descriptors, dict(launch.environment)
            try:
                return subprocess.Popen(
                    launch.words, env=env, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds, process_group=0
                )
            finally:
                for descriptor in fds:
                    os.close(descriptor)

        try:
            process = await asyncio.wrap_future(_SPAWNER.submit(fork))
        except BaseException as error:
            shutil.rmtree(launch.directory, ignore_errors=True)
            await launch.release()
            if isinstance(error, OSError):
                raise ContainerFailedError(f"{launch.words[0]} cannot be started: {error}") from error
            raise
        container = cls(launch, process, limits)
        try:
            await container._wait_until_ready()
        except BaseException:
            await container.close()
            raise
        return container

    async def _wait_until_ready(self) -> None:
        await asyncio.wait([self._ready], timeout=START_SECONDS)
        if not self._ready.done():
            raise ContainerFailedError(f"the container was not ready within {START_SECONDS:g} s")
        await asyncio.sleep(0)  # what it said last on its standard error
        first = [one.pid for one in tree(self._process.pid) if self._is_first(one.pid)]
        init = first[-1] if first else None  # a runtime may have a process namespace of its own, around the container's
        if not self._ready.result() or init is None:
            said = " ".join((self._errors or self._said).decode(errors="replace").split())[-MAX_SHOWN:]
            raise ContainerFailedError(f"the container ended before it was ready: {said or 'it said nothing'}")
        try:
            self._handle = os.pidfd_open(init)
        except ProcessLookupError as error:
            raise ContainerFailedError("the container ended as soon as it was ready") from error
        except OSError as error:
            raise ContainerFailedError(f"the container cannot be watched: {error}") from error
        layers, memory_files = self._launch.layers, self._launch.memory_files
        self._state.watched = Watched(init, self._handle, self._limits, layers=layers, memory_files=memory_files)
        self._loop.add_reader(self._handle, self._on_end)
        WATCHDOG.add(self._state.watched)

    def _is_first(self, pid: int) -> bool:
        return pid != self._process.pid and number_inside(pid) == 1

    def _read_said(self, descriptor: int) -> None:
        data = self._read(descriptor)
        if self._ready.done():
            return
        self._said += data
        if f"{self._launch.token}\n".encode() in self._said:
            self._ready.set_result(True)
        elif not data or len(self._said) > MAX_SAID_BYTES:
            self._ready.set_result(False)

    def _read_errors(self, descriptor: int) -> None:
        self._errors += self._read(descriptor)
        del self._errors[:-MAX_SAID_BYTES]

    def _read(self, descriptor: int) -> bytes:
        try:
            data = os.read(descriptor, MAX_SAID_BYTES)
        except BlockingIOError:
            return b"\n"
        if not data:
            self._loop.remove_reader(descriptor)
        return data

    def _on_end(self) -> None:
        self._loop.remove_reader(self._handle)
        self._state.end()

    @property
    def peak_memory_mib(self) -> float:
        return self._state.watched.peak_memory_mib if self._state.watched else 0.0

    @property
    def init(self) -> int:
        """Its first process."""
        return self._state.init

    async def start_program(self, kind: str) -> Program:
        """Start a bash, "shell" or "script", and wait until it reads. Raises `ContainerEndedError`."""
        self._state.check()
        self._num_programs += 1
        name = str(self._num_programs)
        try:
            program = Program(self._state, self._launch.directory, name, self._launch.owner)
        except OSError as error:  # of this machine: no space, or no descriptor is left
            self._state.kill()
            raise ContainerEndedError(ContainerEnd.DIED, f"its pipes cannot be made: {error}") from error
        self._programs.add(program)
        program.on_close = self._programs.discard
        try:
            assert self._process.stdin is not None
            os.write(self._process.stdin.fileno(), f"{kind} {name}\n".encode())
            await program.wait_until_open()
        except OSError as error:  # nobody reads requests any more
            program.close()
            self._state.kill()
            raise self._state.why_ended("its first process takes no requests") from error
        except BaseException:
            program.close()
            raise
        return program

    async def open_shell(self) -> BashShell:
        shell = BashShell(self._state, self.start_program)
        await shell.open()
        return shell

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        script = f'f={shlex.quote(path)}; [ -f "$f" ] && exec head -c {max_bytes} <"$f" 2>/dev/null; exit 3\n'
        status, content = await self._run_script(path, script, b"", max_bytes)
        if status != 0:
            raise FileNotFoundError(path)
        return content

    async def write_file(self, path: str, content: bytes) -> None:
        folder, file = shlex.quote(str(PurePosixPath(path).parent)), shlex.quote(path)
        script = f"mkdir -p -- {folder} || exit 1; exec head -c {len(content)} >{file}; exit 1\n"
        status, said = await self._run_script(path, script, content, MAX_SAID_BYTES)
        if status != 0:
            text = " ".join(said.decode(errors="replace").split())[-MAX_SHOWN:]
            raise OSError(f"{path} was not written: {text or f'status {status}'}")

    async def _run_script(self, path: str, script: str, stdin: bytes, max_bytes: int) -> tuple[int, bytes]:
        """Run one line of bash; return its status and the first bytes of its output."""
        if "\0" in path:
            raise FileNotFoundError(f"{path!r} is no path")
        program = await self.start_program("script")
        said = bytearray()

        def keep(data: bytes) -> None:
            said.extend(data[: max(0, max_bytes - len(said))])

        program.channel.on_output = keep
        sending = asyncio.ensure_future(program.channel.send(script.encode(errors="surrogateescape") + stdin))
        try:
            if not await self._state.wait([program.ended], FILE_SECONDS):
                raise TimeoutError(f"{path} was not read or written within {FILE_SECONDS:g} s")
            program.channel.drain()
            return program.ended.result(), bytes(said)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            program.end()

    async def close(self) -> None:
        """End it; see `contract.Container`."""
        self._state.is_closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            self._state.kill()
            if self._state.watched is None or not self._launch.ends_by_itself:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            for program in list(self._programs):
                program.close()
            if self._state.watched is not None:
                await asyncio.wait([self._state.over], timeout=END_SECONDS)
                WATCHDOG.remove(self._state.watched)
                self._loop.remove_reader(self._handle)
                os.close(self._handle)
            self._state.end()
            await self._wait_for_process()
        except Exception:
            logger.exception("a container did not end as it should")
        finally:
            shutil.rmtree(self._launch.directory, ignore_errors=True)
            await self._launch.release()

    async def _wait_for_process(self) -> None:
        """Wait for the program that was started; kill it where it does not end."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if not await has_ended(self._process, END_SECONDS):
            self._process.kill()
            await has_ended(self._process, END_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            self._loop.remove_reader(stream.fileno())
            stream.close()
