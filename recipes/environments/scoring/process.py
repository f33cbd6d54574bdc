"""The pool's side of one loader: start it, ask it, replace it, and check what it answers before it is believed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import signal
import subprocess
import time
from typing import Any

from recipes.environments.contract.verifier import Execution, JudgeQuestion, Requests, Verdict, Verifier
from recipes.environments.scoring.frames import (
    MAX_REPLY_BYTES,
    is_readable,
    message,
    parts_of,
    read_message,
    send,
)
from recipes.environments.scoring.jail import jail

Body = tuple[bytes, bytes, bytes]  # JSON of a task, of a response to it, and of the replies of a judge so far

MAX_QUESTIONS = 64  # that a verifier may ask a judge, or programs that it may have run, at once
SCORES_PER_PROCESS = 500  # a fork takes about 10 ms, a score often less than 1 ms
_SHOWN_CHARS = 300  # of what a process wrote before it died


class ProcessDied(Exception):  # noqa: N818 (it says what happened to the process)
    """The process ended before it answered."""


class OutOfTime(Exception):  # noqa: N818 (it says what happened to the score)
    """The score used up its processor time."""


class ScoringProcess:
    """One loader with its scorer, started on first use; used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: tuple[int, ...] = ()  # commands, reports, requests, answers, what it writes to standard error
        self._done: set[tuple[str, ...]] = set()  # commands that need not be given again
        self._num_scores = SCORES_PER_PROCESS

    def load(self, verifier: Verifier, seconds: float) -> None:
        """Import a verifier's libraries, once.

        Raises `TimeoutError`, `ProcessDied`, or `ImportError` with what the import raised.
        """
        if self._process is None:
            self._start()
        if self._once(seconds, do="load", module=verifier.module):
            self._once(seconds, do="prepare", module=verifier.module, kind="")
            self._num_scores = SCORES_PER_PROCESS  # the scorer of before lacks it

    def score(
        self, verifier: Verifier, kind: str, body: Body, *, cpu_seconds: float, seconds: float
    ) -> Verdict | Requests:
        """Score a response to a task of a kind under a verifier that is loaded, or return what it requests.

        Raises `OutOfTime` beyond `cpu_seconds` of processor time, `TimeoutError` beyond `seconds` on the clock,
        `ProcessDied`, `ValueError` for an answer that is no verdict of this verifier, and `RuntimeError` with what
        the verifier raised.
        """
        self._once(seconds, do="prepare", module=verifier.module, kind=kind)
        if self._num_scores >= SCORES_PER_PROCESS:
            self._renew(seconds)
        self._num_scores += 1
        identity = secrets.token_hex(8)
        header = {"module": verifier.module, "id": identity, "cpu_seconds": cpu_seconds}
        _, reports, requests, answers, _ = self._pipes
        reply = self._exchange(requests, message(json.dumps(header).encode(), *body), (answers, reports), seconds)
        if "signal" in reply:
            self._num_scores = SCORES_PER_PROCESS
            if reply["signal"] == signal.SIGPROF:  # SIGXCPU: the scores of the whole process took long, not this one
                raise OutOfTime
            raise ProcessDied(str(reply.get("how")))
        if reply.get("id") != identity or is_readable(answers):
            self.stop()
            raise ValueError("more or other than the answer that was asked for")
        if "error" in reply:
            raise RuntimeError(str(reply["error"])[:_SHOWN_CHARS])
        if "questions" in reply:
            return read_questions(reply["questions"])
        if "executions" in reply:
            return read_executions(reply["executions"])
        return read_verdict(reply.get("verdict"), verifier.rewards)

    def _renew(self, seconds: float) -> None:
        """Replace the scorer, and forget what the one before may have left in its pipe."""
        answers = self._pipes[3]
        self._command(seconds, do="renew")
        while is_readable(answers):
            os.read(answers, MAX_REPLY_BYTES)
        self._num_scores = 0

    def kill(self) -> None:
        """End the process; a thread that waits for it sees it die."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process and forget it; the next request starts another."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for descriptor in self._pipes:
            os.close(descriptor)
        self._process, self._pipes, self._done, self._num_scores = None, (), set(), SCORES_PER_PROCESS

    def _start(self) -> None:
        confined = jail()
        (their_commands, commands), (reports, their_reports) = os.pipe(), os.pipe()
        (their_requests, requests), (answers, their_answers) = os.pipe(), os.pipe()
        log = os.memfd_create("scoring")
        theirs = (their_requests, their_answers, their_commands, their_reports)
        # `scancel --signal=USR1` reaches every process of a job's steps. What is held back here stays so in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self._process = subprocess.Popen(
                confined.command(their_commands, their_reports),
                env=confined.environment,
                stdin=their_requests,
                stdout=their_answers,
                stderr=log,
                pass_fds=(their_commands, their_reports),
                start_new_session=True,  # Ctrl-C is for the run to handle
            )
        except BaseException:
            for descriptor in (commands, reports, requests, answers, log):
                os.close(descriptor)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for descriptor in theirs:
                os.close(descriptor)
        os.set_blocking(commands, False)
        os.set_blocking(requests, False)
        self._pipes = (commands, reports, requests, answers, log)

    def _once(self, seconds: float, **command: str) -> bool:
        """Give a command that was not given before; returns whether it was new."""
        key = tuple(command.values())
        if key in self._done:
            return False
        self._command(seconds, **command)
        self._done.add(key)
        return True

    def _command(self, seconds: float, **command: str) -> None:
        commands, reports, *_ = self._pipes
        reply = self._exchange(commands, message(json.dumps(command).encode()), (reports,), seconds)
        if "signal" in reply:  # of a scorer that ended before, between two requests
            self._num_scores = SCORES_PER_PROCESS
            reply = self._exchange(commands, b"", (reports,), seconds)
        if "error" in reply and command["do"] != "prepare":  # the scorer meets what a preparation met, and reports it
            raise ImportError(str(reply["error"])[:_SHOWN_CHARS])

    def _exchange(self, to: int, data: bytes, sources: tuple[int, ...], seconds: float) -> dict[str, Any]:
        """Send a message and return the first answer from one of the pipes."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        try:
            source = send(to, data, sources, deadline)
            reply = json.loads(parts_of(read_message(source, max_bytes=MAX_REPLY_BYTES, deadline=deadline))[0])
        except TimeoutError:
            self.stop()
            raise
        except (EOFError, OSError) as error:
            raise self._died() from error
        except (ValueError, IndexError) as error:
            self.stop()
            raise ValueError(f"no answer that can be read: {error}") from error
        if not isinstance(reply, dict):
            self.stop()
            raise ValueError(f"no answer that can be read: {str(reply)[:_SHOWN_CHARS]}")
        return reply

    def _died(self) -> ProcessDied:
        assert self._process is not None
        self._process.kill()
        status = self._process.wait()
        written = os.pread(self._pipes[-1], 1 << 16, 0).decode(errors="replace").strip()
        self.stop()
        return ProcessDied(f"exit status {status}: {written[-_SHOWN_CHARS:]}" if written else f"exit status {status}")


def read_questions(value: object) -> list[JudgeQuestion]:
    """Return the questions in an answer; raises `ValueError` for anything else."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_QUESTIONS:
        raise ValueError(f"no list of 1 to {MAX_QUESTIONS} questions to a judge")
    questions = []
    for entry in value:
        messages, params = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        is_text = isinstance(messages, list) and all(
            isinstance(message, list) and len(message) == 2 and all(isinstance(part, str) for part in message)
            for message in messages
        )
        if not is_text or not isinstance(params, dict):
            raise ValueError("a question to a judge of another form")
        questions.append(JudgeQuestion(messages=tuple((role, text) for role, text in messages or ()), params=params))
    return questions


def read_executions(value: object) -> list[Execution]:
    """Return the programs to run in an answer; raises `ValueError` for anything else."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_QUESTIONS:
        raise ValueError(f"no list of 1 to {MAX_QUESTIONS} programs to run")
    executions = []
    for entry in value:
        if not isinstance(entry, dict) or entry.keys() != {field.name for field in dataclasses.fields(Execution)}:
            raise ValueError("a program to run of another form")
        texts = ("language", "code", "stdin", "image", "preparation")
        is_plain = all(isinstance(entry[name], str) for name in texts) and isinstance(entry["network"], bool)
        if not is_plain or not _is_number(entry["seconds"]) or not _is_number(entry["max_characters"]):
            raise ValueError("a program to run of another form")
        executions.append(Execution(**{**entry, "max_characters": int(entry["max_characters"])}))
    return executions


def read_verdict(value: object, rewards: tuple[float, float]) -> Verdict:
    """Return the verdict in an answer; raises `ValueError` for anything that no verifier with these rewards says."""
    if not isinstance(value, dict) or value.keys() != {"reward", "reason", "metrics", "details", "is_flagged"}:
        raise ValueError("an answer that is no verdict")
    reward, metrics, details = value["reward"], value["metrics"], value["details"]
    if not _is_number(reward) or not rewards[0] <= reward <= rewards[1]:
        raise ValueError(f"reward {reward!r}, expected a number between {rewards[0]:g} and {rewards[1]:g}")
    if not isinstance(value["reason"], str) or not isinstance(value["is_flagged"], bool):
        raise ValueError("a verdict with a wrong reason or flag")
    if not isinstance(metrics, dict) or not all(_is_number(number) for number in metrics.values()):
        raise ValueError("a verdict with wrong metrics")
    if not isinstance(details, dict) or not all(text is None or isinstance(text, str) for text in details.values()):
        raise ValueError("a verdict with wrong details")
    return Verdict(
        reward=float(reward),
        reason=value["reason"],
        metrics={key: float(number) for key, number in metrics.items()},
        details=details,
        is_flagged=value["is_flagged"],
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
