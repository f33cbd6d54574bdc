"""A process that scores responses: `python -m recipes.environments.scoring.worker FD LIMIT_SECONDS`.

Reads (kind, verifier, task, response) from the socket FD and answers each. It ends when the other end closes; a
score that outlives its parent is ended by a timer that the kernel enforces, even inside one long C call.
"""

from __future__ import annotations

import importlib
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from recipes.environments.registry import VERIFIERS

MEMORY_BYTES = 4 << 30  # address space: a runaway expression ends as MemoryError, not with the node out of memory


def main() -> int:
    """Serve until the parent closes the socket or is gone."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    limit_seconds = float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGUSR1):  # a request to stop is the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()
    while True:
        try:
            kind, name, task, response = connection.recv()
        except EOFError:
            return 0
        connection.send(_answer(kind, name, task, response, limit_seconds))


def _answer(kind: str, name: str, task: Any, response: Any, limit_seconds: float) -> tuple[str, Any]:
    """Return ("ready", None), ("verdict", Verdict) or ("error", text)."""
    try:
        if kind == "load":
            for module in VERIFIERS[name].imports:
                importlib.import_module(module)
            return "ready", None
        signal.setitimer(signal.ITIMER_PROF, limit_seconds + 1.0)  # its signal ends the process
        verdict = VERIFIERS[name].score(response, task)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return "verdict", verdict
    except Exception as error:  # whatever a verifier raises is reported, and gives no verdict
        return "error", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
