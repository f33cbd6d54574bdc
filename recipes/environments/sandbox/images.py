"""Runs of scripts in container images of tasks, by Apptainer: each in a container of its own, gone when it ends.

The container sees nothing of this machine but its network, which the scripts of data sets need to install packages, and
its processors. A machine without Apptainer, and an image that is not there, are said by name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recipes.environments.contract.asking import Execution
from recipes.environments.contract.verdict import Response
from recipes.environments.sandbox.server import SandboxFailedError

RUNTIMES = ("apptainer", "singularity")
OPTIONS = ("--writable-tmpfs", "--cleanenv", "--no-home", "--pid", "--no-mount=home,tmp,bind-paths")
# The script comes by standard input, for a word of a command has a limit. Its file is gone before its first line runs.
FILE = "/tmp/script.sh"
START = f"cat > {FILE} && exec 3< {FILE} && rm {FILE} && exec bash /dev/fd/3 < /dev/null"
FIRST_LINE = "exec 3<&-\n"  # its programs do not inherit the script
KEPT_VARIABLES = ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "HOME", "PATH")
READ_BYTES = 1 << 16
UTF8_BYTES = 4  # of one character, at most
END_SECONDS = 30.0


def words_of(image: str) -> Sequence[str]:
    """Return the command that runs a script in an image; raises `SandboxFailedError` where it cannot."""
    runtime = next((name for name in RUNTIMES if shutil.which(name)), None)
    if runtime is None:
        raise SandboxFailedError(f"image {image} needs Apptainer, and this machine has none: install apptainer")
    if not Path(image).is_file():
        raise SandboxFailedError(f"there is no image {image} here: fetch it, or correct metadata.image of the row")
    return [runtime, "exec", *OPTIONS, image, "bash", "-c", START]


async def run_in_image(execution: Execution) -> Response:
    """Return how a script ended in its image, what it wrote in one stream; raises `SandboxFailedError`."""
    words = words_of(execution.image)
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        start_new_session=True,
    )
    kept, status = bytearray(), "timeout"
    try:
        async with asyncio.timeout(execution.seconds):
            reading = _read(process, kept, UTF8_BYTES * execution.max_characters)
            await asyncio.gather(_write(process, FIRST_LINE + execution.code), reading)
            status = "completed" if await process.wait() == 0 else "error"
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    text = bytes(kept).decode(errors="replace")[: execution.max_characters]
    return {"process_status": status, "stdout": text, "stderr": ""}


async def _write(process: asyncio.subprocess.Process, script: str) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(script.encode(errors="replace"))
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, kept: bytearray, most: int) -> None:
    """Read all that a process writes, and keep the first `most` bytes."""
    assert process.stdout is not None
    while data := await process.stdout.read(READ_BYTES):
        kept += data[: max(0, most - len(kept))]
