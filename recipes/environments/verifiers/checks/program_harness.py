"""Runs one program on the inputs of its tests, inside a sandbox, and reports what it answered.

Standard input holds {"code", "inputs", "fn_name", "seconds"}; standard output gets one JSON line each: {"ready": true}
before any of the program runs, then for every test {"output": text} or {"value": anything} or {"number": float}. The
first test that fails ends the run, with {"error": text} or {"time": seconds}. No expected output is ever in this
process or one that it forks: whatever the program does to them, it changes its own answers only.

* With `fn_name` null the program is run as `python3 main.py < input` runs it, once per test: a process of its own with
  the input as its standard input. What it has written to its standard output when it ends is its answer.
* Else the function, or the method of `Solution`, is called with the JSON values of the input's lines. All calls of a
  run are made in one process.

Kept from LiveCodeBench's harness, because published rewards depend on it: many names of the standard library are there
unasked, so a function that the program does not define may be found there (`add` of `operator`); recursion may be deep;
`sys.exit` with any status is a normal end; there is no `os.system`.

A test may use `seconds` of processor time, and as many again in which it waits and nothing of it wants the processor.
The clock alone ends nothing here: a busy machine takes longer. The sandbox has the limit on the clock.

This file is sent to the sandbox as text, so it imports the standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, BinaryIO, NoReturn

STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
NAMED = STARS[:16]  # also imported as modules
PRELUDE = "".join(f"from {name} import *\n" for name in STARS) + "".join(f"import {name}\n" for name in NAMED)
STREAMS = ("stdin", "stdout", "stderr")
PROGRAM = "main.py"
RECURSION_LIMIT = 50_000
MAX_OUTPUT_CHARACTERS = 4_000_000  # of one test
UTF8_BYTES = 4  # of one character, at most
SHOWN_CHARACTERS = 300
OWN_FACTOR = 2  # a test may use its seconds of processor time, and wait as long
CLOCK_FACTOR = 4  # how many times its seconds a test may last on the clock, on a busy machine
MAX_DIGITS = 50_000  # of a whole number that is read or printed
LOOK_SECONDS = 0.1  # between two looks at a process that runs
WAITING = frozenset("STtIZX")  # states of threads that do not want the processor
HELD_UP = "D"  # by a disk; with a child, by `vfork`, until that one goes on
USED = slice(11, 15)  # of the fields of /proc/PID/stat after the name: its processor time and that of its children
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def names_for(module: ModuleType) -> dict[str, Any]:
    """Return a module's dictionary with the names that are there unasked, none of which hides a builtin one."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    kept = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    module.__dict__.update(kept)
    return module.__dict__


def load(code: str, fn_name: str) -> Callable[..., Any]:
    """Execute a program's definitions; returns what to call for a test."""
    module = ModuleType("tmp_sol", "")
    exec(_compiled(code), names_for(module))
    owner = module.__dict__["Solution"]() if "class Solution" in code else module
    function: Callable[..., Any] = getattr(owner, fn_name)
    return function


def _compiled(code: str) -> CodeType:
    return compile(_encoded(code), PROGRAM, "exec", dont_inherit=True)


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


def fork() -> int:
    """Fork a process that leads a session of its own; `watch` waits for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return pid


def watch(pid: int, seconds: float) -> int | None:
    """Wait until a process ends; returns its status, None when it used more than these seconds and was killed.

    Processor time counts, and so does time in which no thread of it wants the processor, each for itself.
    """
    waited, before = 0.0, time.monotonic()
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_SECONDS)
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            kill_session(pid)
            return None if usage.ru_utime + usage.ru_stime > seconds else os.waitstatus_to_exitcode(status)
        used, is_waiting = look_at(pid)
        now = time.monotonic()
        waited += min(now - before, 2 * LOOK_SECONDS) if is_waiting else 0.0  # later looks: this process was not run
        before = now
        if used > seconds or waited > seconds:
            kill_session(pid)
            os.waitpid(pid, 0)
            return None


def kill_session(pid: int) -> None:
    """End a process that `fork` made, and what it has left in its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def look_at(pid: int) -> tuple[float, bool]:
    """Return the processor time of a process and all below it, and whether all of their threads wait."""
    ticks, is_waiting, pending = 0, True, [pid]
    while pending:
        process = Path(f"/proc/{pending.pop()}")
        try:
            ticks += sum(map(int, _fields_of(process / "stat")[USED]))
            for thread in (process / "task").iterdir():
                children = (thread / "children").read_text(encoding="utf-8").split()
                state = _fields_of(thread / "stat")[0]
                is_waiting = is_waiting and (state in WAITING or (state == HELD_UP and bool(children)))
                pending += map(int, children)
        except (OSError, IndexError):  # it has ended meanwhile
            is_waiting = False
    return ticks / TICKS_PER_SECOND, is_waiting


def _fields_of(path: Path) -> list[str]:
    """Return the fields of a file `stat` after the name, which may be any text."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def answer_to(text: str, code: CodeType, seconds: float) -> dict[str, Any] | None:
    """Return what a program answers to the input of one test; None in the process that is to run it on its streams."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        given.write(_encoded(text))
        given.seek(0)
        pid = fork()
        if pid == 0:
            for standard, file in enumerate((given, printed, said)):
                os.dup2(file.fileno(), standard)
            return None
        status = watch(pid, seconds)
        if status is None:
            return {"time": seconds}
        if status != 0:
            return {"error": _last_line(said) or f"the program ended its process with status {status}"}
        printed.seek(0)
        output = printed.read(UTF8_BYTES * MAX_OUTPUT_CHARACTERS + 1).decode(errors="replace")
    if len(output) > MAX_OUTPUT_CHARACTERS:
        return {"error": f"more than {MAX_OUTPUT_CHARACTERS} characters of output"}
    return {"output": output}


def _encoded(text: str) -> bytes:
    """Return a text in UTF-8; bytes that are none came into it as half surrogate pairs."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def _last_line(file: BinaryIO) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - UTF8_BYTES * SHOWN_CHARACTERS))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:SHOWN_CHARACTERS] if lines else ""


def become_program(code: CodeType, names: Mapping[str, Any]) -> NoReturn:
    """Run a program as this process's `__main__`, on streams that are as Python makes them, and end the process."""
    os.closerange(len(STREAMS), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    most = UTF8_BYTES * MAX_OUTPUT_CHARACTERS + UTF8_BYTES  # one character more than is allowed
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for descriptor, name in enumerate(STREAMS):
        stream = _stream(descriptor, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [PROGRAM]
    program = ModuleType("__main__")
    program.__dict__.update(names)
    program.__dict__.update({name: getattr(sys, name) for name in STREAMS})
    program.__dict__.update(__file__=PROGRAM, __builtins__=builtins)
    sys.modules["__main__"] = program
    status = 0
    try:
        with suppress(SystemExit):
            exec(code, program.__dict__)
        end_program(program)
    except BaseException as error:  # as Python ends a program that raises
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


def end_program(program: ModuleType) -> None:
    """Do what Python does after a program's last line; the rest of its end takes longer than most programs do."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    program.__dict__.clear()  # files that were not closed are written when they are collected
    gc.collect()
    if sys.__stdout__ is not None and not sys.__stdout__.closed:  # what was printed meanwhile
        sys.__stdout__.flush()


def _stream(descriptor: int, name: str) -> io.TextIOWrapper:
    """Return a standard stream; ends of lines are as they are."""
    errors = "backslashreplace" if name == "stderr" else "surrogateescape"
    mode = "r" if name == "stdin" else "w"
    raw = io.FileIO(descriptor, mode, closefd=False)
    raw.name = f"<{name}>"  # type: ignore[misc]  # as Python names it
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    is_lined = name == "stderr"
    stream = io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, newline="\n", line_buffering=is_lined)
    stream.mode = mode  # type: ignore[misc]
    return stream


def run_program(code: str, inputs: Sequence[str], seconds: float, reporter: Reporter) -> None:
    """Run a program once per test, until it fails one, and end the process."""
    try:
        compiled = _compiled(code)
    except BaseException as error:  # the parser may raise more than SyntaxError
        reporter.end({"error": described(error)})
    names = names_for(ModuleType("__main__"))
    gc.freeze()  # the processes share these objects' pages
    for text in inputs:
        answer = answer_to(text, compiled, seconds)
        if answer is None:
            become_program(compiled, names)
        if "output" not in answer:
            reporter.end(answer)
        reporter.say(answer)
    os._exit(0)


def call_function(code: str, fn_name: str, inputs: Sequence[str], seconds: float, reporter: Reporter) -> None:
    """Call a function of a program with the values of each test, until it fails one, and end the process."""
    try:
        limit_time(reporter, seconds)
        function = load(code, fn_name)
        for text in inputs:
            limit_time(reporter, seconds)
            answer = value_of(function(*[json.loads(line) for line in text.split("\n")]))
            signal.setitimer(signal.ITIMER_PROF, 0)
            if "error" in answer:
                reporter.end(answer)
            reporter.say(answer)
    except BaseException as error:  # also what the program raises to end its process
        signal.setitimer(signal.ITIMER_PROF, 0)
        reporter.end({"error": described(error)})
    os._exit(0)


def limit_time(reporter: Reporter, seconds: float) -> None:
    """End the process with a report when it uses more processor time than this from now on."""

    def expired(_number: int, _frame: FrameType | None) -> None:
        reporter.end({"time": seconds})

    signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Run the program on every input, until one fails."""
    request = json.loads(sys.stdin.buffer.read())
    code, fn_name, inputs, seconds = (request[name] for name in ("code", "fn_name", "inputs", "seconds"))
    reporter = Reporter(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(len(STREAMS)):
        os.dup2(nothing, standard)
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))  # deep recursion is common in solutions
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(MAX_DIGITS)
    os.system = None  # type: ignore[assignment]
    reporter.say({"ready": True})
    if fn_name is None:
        run_program(code, inputs, seconds, reporter)
    pid = fork()
    if pid == 0:
        call_function(code, fn_name, inputs, seconds, reporter)
    if watch(pid, seconds * (len(inputs) + 1)) is None:
        reporter.say({"time": seconds})
    os._exit(0)


if __name__ == "__main__":
    main()
