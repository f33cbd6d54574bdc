"""Run one program of an image conversion, with a deadline; nothing that it starts outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tools.processes import dies_with_parent
from tools.task_images.registry.references import ImageError

MAX_SHOWN = 600  # characters of a program's output in a message
GONE_SECONDS = 10.0  # that what was killed may take to let go of its files
NO_SPACE = "no space left on device"


def run_program(
    words: Sequence[str | Path],
    *,
    seconds: float,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cause: str = "convert",
) -> str:
    """Return what the program printed; raises `ImageError` with `cause` when it fails, or "timeout" when it is late."""
    command = [str(word) for word in words]
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
    except FileNotFoundError as error:
        raise ImageError("tool", f"{command[0]} is not installed") from error
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise ImageError("timeout", f"{command[0]} did not end in {seconds:.0f} s") from error
    finally:
        _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    if process.returncode != 0:
        said = (errors.strip() or output.strip())[-MAX_SHOWN:]
        is_full = NO_SPACE in (errors + output).lower()
        detail = f"{command[0]} ended with {process.returncode}: {' '.join(said.split())}"
        raise ImageError("space" if is_full else cause, detail)
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """End a program with what it started, and wait until they are gone: until nobody holds its output open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(subprocess.TimeoutExpired, ValueError):  # ValueError: it was read to its end before
        process.communicate(timeout=GONE_SECONDS)
