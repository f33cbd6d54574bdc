"""Runs one program on the inputs of its tests, inside a sandbox, and reports what it answered.

Standard input holds {"code", "inputs", "fn_name", "seconds"}; standard output gets one JSON line each: {"ready": true}
before any of the program runs, then for every test {"output": text} or {"value": anything} or {"number": float}. The
first test that fails ends the run, with {"error": text} or {"time": seconds}. No expected output is ever in this
process: whatever the program does to it, it changes its own answers only.

What a program finds around it is that of LiveCodeBench's harness, because published rewards depend on it:

* With `fn_name` null it reads a made standard input. Its imports come first and the rest is the body of a function; a
  last `if __name__ == '__main__'` is opened up. `readline` gives lines without their ends, and raises StopIteration
  after the last one; `read` and `readlines` give the whole input each time. An exit is a normal end.
* Else the function, or the method of `Solution`, is called with the JSON values of the input's lines.
* Many names of the standard library are there unasked; some functions of `os` are None. So a function that the program
  does not define may be found there (`add` of `operator`), and `open` is that of `io`, which finds no file.

This file is sent to the sandbox as text, so it imports the standard library only.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
NAMED = STARS[:16]  # also imported as modules
PRELUDE = (
    "".join(f"from {name} import *\n" for name in STARS)
    + "".join(f"import {name}\n" for name in NAMED)
    + "sys.setrecursionlimit(50000)\n"
)
WRAPPED = "wrapped_function"
MAIN_GUARD = "__name__ == '__main__'"
MAX_OUTPUT_CHARACTERS = 4_000_000  # of one test
SHOWN_CHARACTERS = 300
CLOCK_FACTOR = 4  # a busy machine gives a program this part of a core, or more
MAX_DIGITS = 50_000  # of a whole number that is read or printed
NO_FUNCTIONS = {
    os: (
        *("kill", "system", "putenv", "remove", "removedirs", "rmdir", "fchdir", "setuid", "fork", "forkpty", "killpg"),
        *("rename", "renames", "truncate", "replace", "unlink", "fchmod", "fchown", "chmod", "chown", "chroot"),
        *("lchown", "getcwd", "chdir"),
    ),
    shutil: ("rmtree", "move", "chown"),
    builtins: ("quit", "help"),
}
NO_MODULES = ("ipdb", "joblib", "resource", "psutil", "tkinter")


class MadeInput:
    """Standard input for a program; its ways of reading keep a place each, as in the reference."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = iter(text.split("\n"))
        self._stream = io.StringIO(text)
        self.buffer = io.BytesIO(text.encode(errors="surrogateescape"))

    def read(self, *_: Any) -> str:
        """Return the whole input."""
        return self._text

    def readline(self, *_: Any) -> str:
        """Return the next line without its end; raises `StopIteration` after the last."""
        return next(self._lines)

    def readlines(self, *_: Any) -> list[str]:
        """Return all lines without their ends."""
        return self._text.split("\n")

    def __iter__(self) -> MadeInput:
        return self

    def __next__(self) -> str:
        return next(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class KeptOutput(io.StringIO):
    """Standard output of a program, which it cannot close."""

    def close(self) -> None:
        """Keep what was printed."""


def as_function(code: str) -> str:
    """Return a program as imports and one function; the program itself when it is no Python."""
    try:
        body = ast.parse(code).body
        if body and isinstance(body[-1], ast.If) and ast.unparse(body[-1].test).strip() == MAIN_GUARD:
            body = [*body[:-1], *body[-1].body]
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        rest = [each for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]
        lines = "\n".join(ast.unparse(each) for each in imports)
        function = ast.parse(f"def {WRAPPED}(): pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = rest
        return f"{PRELUDE}\n{lines}\n{ast.unparse(function)}"
    except Exception:  # its compilation says what is wrong
        return code


def load(code: str, fn_name: str | None) -> Callable[..., Any]:
    """Execute a program's definitions; returns what to call for a test."""
    module = ModuleType("tmp_sol", "")
    if fn_name is None:
        exec(as_function(code), module.__dict__)
        run: Callable[..., Any] = module.__dict__[WRAPPED]
        return run
    exec(f"{PRELUDE}\n\n{code}", module.__dict__)
    owner = module.__dict__["Solution"]() if "class Solution" in code else module
    function: Callable[..., Any] = getattr(owner, fn_name)
    return function


def answer_of(function: Callable[..., Any], text: str, fn_name: str | None) -> dict[str, Any]:
    """Return what a program answers to the input of one test."""
    if fn_name is not None:
        return value_of(function(*[json.loads(line) for line in text.split("\n")]))
    kept, before = KeptOutput(), (sys.stdin, sys.stdout)
    sys.stdin, sys.stdout = MadeInput(text), kept  # type: ignore[assignment]
    try:
        function()
    except SystemExit:
        pass
    finally:
        sys.stdin, sys.stdout = before
    printed = kept.getvalue()
    if len(printed) > MAX_OUTPUT_CHARACTERS:
        return {"error": f"more than {MAX_OUTPUT_CHARACTERS} characters of output"}
    return {"output": printed}


def value_of(value: Any) -> dict[str, Any]:
    """Return a value as JSON has it; a number of another type as a float, and what is neither as an error."""
    value = list(value) if isinstance(value, tuple) else value
    try:
        json.dumps(value)
        return {"value": value}
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return {"number": float(value)}
    except Exception:  # a type of the program's own may raise anything
        return {"error": f"returned {type(value).__name__}, which JSON does not have"}


def described(error: BaseException) -> str:
    """Return an exception as a line of text."""
    try:
        return f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
    except Exception:  # its text is the program's own
        return type(error).__name__


class Reporter:
    """Writes the lines, past whatever the program does to the standard streams."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def say(self, line: Mapping[str, Any]) -> None:
        """Write one line."""
        rest = memoryview(json.dumps(line).encode() + b"\n")
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def end(self, line: Mapping[str, Any]) -> None:
        """Write the last line and end the process, before any handler of the program."""
        self.say(line)
        os._exit(0)


def limit_time(reporter: Reporter, seconds: float) -> None:
    """End the run when the program uses more processor time than this, or sleeps through much more on the clock."""

    def expired(_number: int, _frame: FrameType | None) -> None:
        reporter.end({"time": seconds})

    signal.signal(signal.SIGPROF, expired)
    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_FACTOR * seconds + 1)


def stop_clocks() -> None:
    """Stop both clocks between tests."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Run the program on every input, until one fails."""
    request = json.loads(sys.stdin.buffer.read())
    reporter = Reporter(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))  # deep recursion is common in solutions
    sys.set_int_max_str_digits(MAX_DIGITS)
    for owner, names in NO_FUNCTIONS.items():
        for name in names:
            setattr(owner, name, None)
    sys.modules.update(dict.fromkeys(NO_MODULES))  # type: ignore[arg-type]
    reporter.say({"ready": True})
    try:
        limit_time(reporter, request["seconds"])
        function = load(request["code"], request["fn_name"])
        stop_clocks()
        for text in request["inputs"]:
            limit_time(reporter, request["seconds"])
            answer = answer_of(function, text, request["fn_name"])
            stop_clocks()
            if "error" in answer:
                reporter.end(answer)
            reporter.say(answer)
    except BaseException as error:  # also what the program raises to end its process
        stop_clocks()
        reporter.end({"error": described(error)})
    os._exit(0)


if __name__ == "__main__":
    main()
