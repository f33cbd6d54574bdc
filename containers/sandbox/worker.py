"""Executes cells inside a jail, all in one namespace: reads one JSON line per cell and writes one.

In: {"code", "seconds", "output_bytes"}. Out: {"status": completed | error | timeout, "stdout", "stderr"}. As in a
notebook, a cell whose last statement is an expression prints its value.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any


class Expired(KeyboardInterrupt):
    """A cell has taken too long."""


def expire(_number: int, _frame: FrameType | None) -> None:
    raise Expired


def execute(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Execute one cell; print the value of a last expression."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            namespace["_"] = value
            sys.stdout.write(f"{value!r}\n")


def attempt(request: dict[str, Any], name: str, namespace: dict[str, Any]) -> str:
    """Execute a cell and return its status; a traceback goes to stderr."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        execute(request["code"], name, namespace)
    except Expired:
        return "timeout"
    except SystemExit as error:
        return "completed" if error.code in (None, 0) else "error"
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, own.tb_next if own else None)
        return "error"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "completed"


def answer(request: dict[str, Any], name: str, namespace: dict[str, Any]) -> dict[str, str]:
    """Execute a cell and return its status and output, with that of the programs that it starts."""
    captured = {number: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR) for number in (1, 2)}
    for target, file in captured.items():
        os.dup2(file, target)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in captured)  # noqa: SIM115
    try:
        status = attempt(request, name, namespace)
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, Expired, ValueError) as error:  # too much output, or the cell closed a stream
        status = "timeout" if isinstance(error, Expired) else "error"
    texts = []
    for file in captured.values():
        texts.append(os.pread(file, request["output_bytes"], 0).decode(errors="replace"))
        os.close(file)
    return {"status": status, "stdout": texts[0], "stderr": texts[1]}


def main() -> None:
    me = os.getpid()
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGALRM, expire)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(requests, start=1):
        result = answer(json.loads(line), f"<cell {number}>", namespace)
        if os.getpid() != me:  # a child that the cell forked and that returned here
            os._exit(0)
        responses.write(json.dumps(result).encode() + b"\n")
        responses.flush()


if __name__ == "__main__":
    main()
