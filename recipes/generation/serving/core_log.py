"""Why an EngineCore process has ended: vLLM says that only in the output of the process. Imports no vLLM and no Ray."""

from __future__ import annotations

import os
import re
from pathlib import Path

from recipes.errors import memory_cause, memory_kills

KEPT_IN = "in logs/latest/ray of the run"
_TAIL_BYTES = 64 << 10
_MAX_CAUSE = 300  # characters
_PREFIX = re.compile(r"^(?:\(\w+(?: pid=\d+)?\)\s*)?(?:(?:ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?")  # vLLM's
_RAISED = re.compile(r"(?:[\w.]*(?:Error|Exception|Warning|Interrupt|Exit)\b|[\w.]+\.\w+Error\b)(?::.*)?")
_KILLS_BEFORE = memory_kills()  # when this process began
_SAYS_NOTHING = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")


def core_cause() -> str:
    """Return the cause of an EngineCore process that has ended, and where more stands; it writes where this one does.

    Ray's logs are copied into the run's directory when it ends, under the name that they have now.
    """
    logs = [log for log in (_output(1), _output(2)) if log is not None]
    for log in logs:
        if cause := last_cause(_tail(log)):
            return f"the last error of its log is {cause!r}; see {log.name} {KEPT_IN}"
    where = f"{logs[0].name} {KEPT_IN}" if logs else "the output above"
    if said := memory_cause(_KILLS_BEFORE):
        return f"{said}; see {where}"
    return f"its log names no error, as when the kernel kills a process for lack of memory; see {where}"


def last_cause(text: str) -> str:
    """Return the last line of a log that names an exception; empty where there is none."""
    lines = (_PREFIX.sub("", line).strip() for line in text.splitlines())
    raised = [line for line in lines if _RAISED.fullmatch(line) and not any(words in line for words in _SAYS_NOTHING)]
    return raised[-1][:_MAX_CAUSE] if raised else ""


def _output(descriptor: int) -> Path | None:
    """Return the file that a descriptor of this process writes to; None for a pipe or a terminal."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path.readlink() if path.is_file() else None


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
