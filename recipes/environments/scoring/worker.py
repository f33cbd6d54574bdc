"""The processes that score responses: a loader, which imports the libraries, and a scorer, which sees model text.

The pool starts the loader in a jail (`scoring/jail.py`) and commands it on a pair of pipes of its own. The loader forks
a scorer, which reads requests from standard input and answers on standard output; the loader itself touches neither.
A scorer puts itself under limits and a filter of system calls before its first score. The pool has it replaced after
some hundred scores, so that whatever an answer may change in it is gone soon and never reaches the loader. Commands,
requests and answers are JSON.

Commands: {"do": "load", "module"} imports a verifier; {"do": "prepare", "module", "kind"} builds what scores of a kind
of task share; {"do": "renew"} replaces the scorer. Each is answered. The loader also reports a scorer that died.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
from typing import Any

from recipes.confinement import filters
from recipes.confinement.jails import NOBODY
from recipes.environments.contract.verifier import Execution, Verdict, Verifier, advance
from recipes.environments.scoring.frames import is_readable, message, parts_of, read_message, write_all

MEMORY_BYTES = 4 << 30  # address space: a runaway expression ends as MemoryError, not with the node out of memory
OPEN_FILES = 64
CPU_SECONDS = 900  # of one scorer's whole life; each score has a timer of its own
UNCONFINED = 3  # exit status
_SHOWN_CHARS = 500  # of a reason
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(commands: int, reports: int, becomes_nobody: bool) -> int:
    """Obey the commands on one pipe, and report on another, until the pool closes them or is gone."""
    _end_with_parent()
    for number in (signal.SIGINT, signal.SIGUSR1):  # a request to stop is for the parent to handle
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()
    scorer = _Scorer(hidden=(commands, reports), becomes_nobody=becomes_nobody)
    while True:
        waiting = select.poll()
        for descriptor in (commands, *scorer.alive):
            waiting.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if commands not in ready:
            write_all(reports, _as_message(scorer.end()))
            continue
        try:
            command = json.loads(parts_of(read_message(commands))[0])
        except EOFError:
            return 0
        write_all(reports, _as_message(_obey(command, scorer)))


def _obey(command: dict[str, Any], scorer: _Scorer) -> dict[str, Any]:
    try:
        if command["do"] == "load":
            for name in _verifier(command["module"]).imports:
                importlib.import_module(name)
            gc.collect()
        elif command["do"] == "prepare":
            _verifier(command["module"]).prepare(command["kind"])
        else:
            scorer.end()
            _drain(0)
            scorer.start()
        return {"done": command["do"]}
    except Exception as error:  # reported to the pool, which gives no verdict without it
        return {"error": _described(error)}


def _drain(requests: int) -> None:
    """Read what the scorer before has left of a request."""
    while is_readable(requests) and os.read(requests, 1 << 16):
        pass


def _as_message(value: dict[str, Any]) -> bytes:
    return message(json.dumps(value).encode())


def _task(verifier: Verifier, fields: bytes) -> Any:
    return verifier.task(**{name: _hashable(value) for name, value in json.loads(fields).items()})


def _verifier(module: str) -> Verifier:
    verifier: Verifier = importlib.import_module(module).VERIFIER
    return verifier


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]


class _Scorer:
    """The loader's side of one scoring process."""

    def __init__(self, *, hidden: tuple[int, ...], becomes_nobody: bool) -> None:
        self._hidden, self._becomes_nobody = hidden, becomes_nobody
        self._pid = 0
        self.alive: tuple[int, ...] = ()  # a pipe that only the scorer holds open: it is readable when the scorer ends

    def start(self) -> None:
        """Fork the process."""
        ours, theirs = os.pipe()
        gc.freeze()  # the scorer shares these objects' pages for as long as nothing writes to them
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            self.alive = (ours,)
            return
        for descriptor in (ours, *self._hidden):
            os.close(descriptor)
        _score_all(self._becomes_nobody)

    def end(self) -> dict[str, Any]:
        """End the process, if there is one; returns how it had ended before, if it had."""
        if not self._pid:
            return {}
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self.alive[0])
        self._pid, self.alive = 0, ()
        if os.WIFSIGNALED(status):
            return {"signal": os.WTERMSIG(status), "how": f"signal {os.WTERMSIG(status)}"}
        why = " (it could not confine itself)" if os.WEXITSTATUS(status) == UNCONFINED else ""
        return {"signal": 0, "how": f"exit status {os.WEXITSTATUS(status)}{why}"}


def _score_all(becomes_nobody: bool) -> None:
    """Score until killed, or until the pool is gone."""
    try:
        requests, answers = _take_pipes()
        try:
            _confine(becomes_nobody)
        except OSError:
            os._exit(UNCONFINED)
        while True:
            header, task, response, replies = parts_of(read_message(requests))
            request = json.loads(header)
            signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])  # its signal ends the process
            answer = _answer(request["module"], task, response, replies)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            write_all(answers, _as_message({"id": request["id"], **answer}))
    finally:
        os._exit(1)


def _take_pipes() -> tuple[int, int]:
    """Return the pipes to the pool, out of the way of code that prints or reads."""
    pipes = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return pipes


def _confine(becomes_nobody: bool) -> None:
    """Give up what scoring does not need; raises `OSError` where the kernel refuses, and then nothing is scored."""
    _end_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if becomes_nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        _end_with_parent()  # the kernel forgot it with the change of user
    _put_under(filters.scorer())


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _put_under(code: bytes) -> None:
    """Put this process under a filter of system calls, for good; raises `OSError` when the kernel refuses."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_FilterProgram(len(code) // 8, code)))


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0)


def _prctl(option: int, first: object, second: object) -> None:
    if _LIBC.prctl(option, first, second, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed")


def _answer(module: str, task: bytes, response: bytes, replies: bytes) -> dict[str, Any]:
    try:
        verifier = _verifier(module)
        scored = advance(verifier.score(json.loads(response), _task(verifier, task)), json.loads(replies))
        if isinstance(scored, Verdict):
            return {"verdict": _as_json(scored)}
        executions = [dataclasses.asdict(request) for request in scored if isinstance(request, Execution)]
        if executions:
            return {"executions": executions}
        return {"questions": [[request.messages, dict(request.params)] for request in scored]}  # type: ignore[union-attr]
    except Exception as error:  # whatever a verifier raises is reported, and gives no verdict
        return {"error": _described(error)}


def _hashable(value: Any) -> Any:
    return tuple(_hashable(element) for element in value) if isinstance(value, list) else value


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "reward": verdict.reward,
        "reason": verdict.reason,
        "metrics": dict(verdict.metrics),
        "details": dict(verdict.details),
        "is_flagged": verdict.is_flagged,
    }
