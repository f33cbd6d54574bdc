"""Run a command-line program of this repository without a new process: the start of Python takes most of its time."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch


class Done(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str


def in_process(main: Callable[[Sequence[str]], int], argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Done:
    """Call a program's `main` with that environment and working directory."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, env, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        status = main(argv)
    return Done(status, stdout.getvalue(), stderr.getvalue())
