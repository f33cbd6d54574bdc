"""Runs of scripts in container images of tasks, by Apptainer: each in a container of its own, gone when it ends.

The container sees none of this machine's files, devices, processes and shared memory, and of its network nothing but a
loopback of its own. Limits hold for each process (address space, size of a file) and for the account (processes); the
writable layer is as large as the site's Apptainer allows. Where a setting opens the network (`Execution.network`), the
container shares all of this machine's, its loopback too. A machine without Apptainer, and an image that is not there,
are said by name.

A run that uses up its seconds ends, as `OwnTime` of the sandbox counts them: it ran, or waited, not for a processor.
On a busy machine it may take CLOCK_FACTOR times as long on the clock, and says how much of that it had.

An execution's preparation has ended, and its text is gone, before its code begins: the shells that run the code are the
same in every container, so code cannot read from them what was prepared.

The options with which Apptainer starts an image that is not trusted, wherever this repository starts one.
"""

from __future__ import annotations

import asyncio
import base64
import os
import resource
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recipes.confinement.usage import OwnTime, usage_of
from recipes.environments.contract.verifier import Execution, Response
from recipes.environments.sandbox.server import SandboxFailedError

# Of this machine the container sees no files, devices, processes and shared memory; its writable layer ends with it.
OPTIONS = ("--containall", "--writable-tmpfs", "--no-home", "--no-mount=bind-paths,cwd,home,hostfs,tmp", "--pwd=/")
NO_NETWORK = ("--net", "--network=none")
NO_PRIVILEGES = "--no-privs"  # of root, when root starts the container


def isolation(*, network: bool) -> list[str]:
    """Return the options between `exec` and the image; with `network`, the container shares this machine's."""
    return [*OPTIONS, *(() if network else NO_NETWORK), *([NO_PRIVILEGES] if os.geteuid() == 0 else [])]


RUNTIMES = ("apptainer", "singularity")
GIB = 1 << 30
LIMITS = (
    ("as", resource.RLIMIT_AS, 64 * GIB),
    ("fsize", resource.RLIMIT_FSIZE, 8 * GIB),
    ("nproc", resource.RLIMIT_NPROC, 32_768),  # all processes of the account count where Apptainer is setuid
    ("core", resource.RLIMIT_CORE, 0),
)
# The two scripts come by standard input, one line of base64 each, for a word of a command has a limit. The files are
# gone before the first script runs. This shell never holds a text of theirs: what it runs could read its memory.
START = """cd /tmp && umask 077 && cat > both \\
  && sed -n 1p both | base64 -d > first && sed -n 2p both | base64 -d > second \\
  && exec 3< first 4< second < /dev/null && rm both first second && umask 022 && cd / \\
  && bash /dev/fd/3 4<&- && exec 3<&- && exec bash /dev/fd/4"""
FIRST_LINES = ("exec 3<&-\n", "exec 4<&-\n")  # the programs of a script do not inherit it
CUT = "\n<output cut>\n"
KEPT_VARIABLES = ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "HOME", "PATH")
READ_BYTES = 1 << 16
UTF8_BYTES = 4  # of one character, at most
END_SECONDS = 30.0
CLOCK_FACTOR = 2  # how many times its seconds a run may last on the clock
LOOK_SECONDS = 0.25  # between two looks at what a run uses


def words_of(image: str, *, network: bool = False) -> Sequence[str]:
    """Return the command that runs a script in an image; raises `SandboxFailedError` where it cannot."""
    runtime = next((name for name in RUNTIMES if shutil.which(name)), None)
    if runtime is None:
        raise SandboxFailedError(f"image {image} needs Apptainer, and this machine has none: install apptainer")
    if not Path(image).is_file():
        raise SandboxFailedError(f"there is no image {image} here: fetch it, or correct metadata.image of the row")
    return [
        *_limit_words(),
        runtime,
        "exec",
        *isolation(network=network),
        str(Path(image).resolve()),
        "bash",
        "-c",
        START,
    ]


def _limit_words() -> list[str]:
    """Return the words that set the limits, none of them above those of this process; none without the program."""
    if shutil.which("prlimit") is None:
        return []
    words = ["prlimit"]
    for name, number, most in LIMITS:
        own = resource.getrlimit(number)[1]
        words.append(f"--{name}={most if own == resource.RLIM_INFINITY else min(most, own)}")
    return [*words, "--"]


async def run_in_image(execution: Execution) -> Response:
    """Return how a script ended in its image, what it wrote in one stream; raises `SandboxFailedError`."""
    words = words_of(execution.image, network=execution.network)
    scripts = (execution.preparation, execution.code)
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        cwd="/",
        start_new_session=True,
    )
    kept, own = _Kept(execution.max_characters), OwnTime()
    run = asyncio.ensure_future(_end(process, scripts, kept))
    limit = asyncio.ensure_future(_use_up(process.pid, own, execution.seconds))
    try:
        await asyncio.wait((run, limit), timeout=CLOCK_FACTOR * execution.seconds, return_when=asyncio.FIRST_COMPLETED)
        status = ("error" if run.result() else "completed") if run.done() else "timeout"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for task in (run, limit):
            task.cancel()
        await asyncio.gather(run, limit, return_exceptions=True)
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    return {"process_status": status, "stdout": kept.text(), "stderr": "", "used_seconds": own.seconds}


async def _end(process: asyncio.subprocess.Process, scripts: Sequence[str], kept: _Kept) -> int:
    await asyncio.gather(_write(process, scripts), _read(process, kept))
    return await process.wait()


async def _use_up(pid: int, own: OwnTime, seconds: float) -> None:
    """Return when a process and all below it have used these seconds."""
    while own.seconds < seconds:
        await asyncio.sleep(LOOK_SECONDS)
        own.add(await asyncio.to_thread(usage_of, pid))


class _Kept:
    """The beginning and the end of an output, which together have at most so many characters, and a mark between."""

    def __init__(self, max_characters: int) -> None:
        self._half = max_characters // 2
        self._most = UTF8_BYTES * self._half
        self._first, self._last = bytearray(), bytearray()
        self._is_cut = False

    def add(self, data: bytes) -> None:
        room = max(0, self._most - len(self._first))
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * self._most + READ_BYTES:  # seldom, for it moves what is kept
            del self._last[: len(self._last) - self._most]
            self._is_cut = True

    def text(self) -> str:
        if not self._is_cut:
            whole = bytes(self._first + self._last).decode(errors="replace")
            if len(whole) <= 2 * self._half:
                return whole
            return whole[: self._half] + CUT + whole[len(whole) - self._half :]
        first, last = (bytes(part).decode(errors="replace") for part in (self._first, self._last))
        return first[: self._half] + CUT + last[max(0, len(last) - self._half) :]


async def _write(process: asyncio.subprocess.Process, scripts: Sequence[str]) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        for first_line, script in zip(FIRST_LINES, scripts, strict=True):
            process.stdin.write(base64.b64encode((first_line + script).encode(errors="replace")) + b"\n")
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, kept: _Kept) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(READ_BYTES):
        kept.add(data)
