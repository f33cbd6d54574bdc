"""Python sessions that keep their variables between calls, each a worker in a jail of its own.

The limits also hold between calls: a watcher looks at every session, and ends one that breaks a limit, whose leftover
processes go on computing, or that nobody uses.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
import time
from pathlib import Path

from jail import CHECK_SECONDS, Limits, Outcome, broken_limit, kill, start

from recipes.confinement.usage import usage_of

log = logging.getLogger("sandbox")

WORKER = Path(__file__).with_name("worker.py")
KEPT_SECONDS = 300.0  # a session that was used in this time is not ended for the sake of another
GRACE_SECONDS = 0.5  # of processor time, in which a cell heeds its interrupt; else its session ends
MOST_GRACE_SECONDS = 2.0  # the same on the clock: a busy machine may give it no processor for a while
IDLE_CHECK_SECONDS = 1.0  # between two looks at a session that runs no cell
IDLE_CPU_SECONDS = 5.0  # CPU time that what cells left running may use until the next cell
STATUS = {"completed": 0, "error": 1}


class Session:
    """One worker in its jail; of several calls at once each waits for the one before it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lock = threading.Lock()  # held while a cell runs
        self.used = time.monotonic()
        self.end_reason = ""  # the limit for which the watcher ended it
        self._idle_cpu_seconds: float | None = None  # what it had used when the watcher first saw it idle
        self._next_check = 0.0
        files = {"/worker.py": WORKER.read_bytes()}
        self.process = start(["python3", "-I", "/worker.py"], limits, files=files, stdin=subprocess.PIPE)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def run(self, code: str, seconds: float) -> Outcome:
        """Execute a cell; the session ends where the cell cannot be interrupted, or ends its process."""
        with self.lock:
            self.used = time.monotonic()
            request = {"code": code, "seconds": seconds, "output_bytes": self.limits.output_bytes}
            try:
                line, reason = self._exchange(json.dumps(request).encode() + b"\n", seconds)
            except (OSError, ValueError):  # the process has ended, or another thread closed the session
                line, reason = b"", "end"
            self.used = time.monotonic()
            self._idle_cpu_seconds = None
        answer = _parse(line)
        if answer is None:
            self.close()
            return Outcome(status=None, stdout="", stderr="", reason=self.end_reason or reason or "end")
        reason = "time" if answer["status"] == "timeout" else ""
        status = None if reason else STATUS.get(answer["status"], 1)
        return Outcome(status=status, stdout=answer["stdout"], stderr=answer["stderr"], reason=reason)

    def _exchange(self, request: bytes, seconds: float) -> tuple[bytes, str]:
        """Write a cell and read one line; return it, or an empty one and why there is none.

        What an earlier cell left running may write the line, or read nothing: neither may keep this thread.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        stdin, stdout, line, unsent = self.process.stdin.fileno(), self.process.stdout.fileno(), bytearray(), request
        os.set_blocking(stdin, False)
        poll = select.poll()  # select() fails for descriptors above 1023
        poll.register(stdin, select.POLLOUT)
        poll.register(stdout, select.POLLIN)
        limit = 16 * self.limits.output_bytes  # JSON may write six bytes for one, for each of two streams
        interrupt, used_before = time.monotonic() + seconds, -1.0
        while not line.endswith(b"\n"):
            late = time.monotonic() - interrupt
            if late >= 0:
                used = usage_of(self.process.pid).cpu_seconds
                used_before = used if used_before < 0 else used_before
                if used - used_before > GRACE_SECONDS or late > MOST_GRACE_SECONDS:
                    return b"", "time"
            for descriptor, _ in poll.poll(1000 * max(-late, CHECK_SECONDS)):
                if descriptor == stdin:
                    unsent = unsent[os.write(stdin, unsent) :]
                    if not unsent:
                        poll.unregister(stdin)
                    continue
                data = os.read(stdout, 65536)
                line += data
                if not data or len(line) > limit:
                    return b"", "end"
        return (b"", "end") if unsent else (bytes(line), "")

    def watch(self, idle_seconds: float) -> None:
        """End the session when it breaks a limit, or has not been used for `idle_seconds`; look only when it is due."""
        now, is_busy = time.monotonic(), self.lock.locked()
        if now < self._next_check and not is_busy:
            return
        self._next_check = now + IDLE_CHECK_SECONDS
        if reason := broken_limit(self.process, self.limits):
            self.end(reason)
        elif not is_busy:
            used = usage_of(self.process.pid).cpu_seconds
            if self._idle_cpu_seconds is None:
                self._idle_cpu_seconds = used
            if now - self.used > idle_seconds or used - self._idle_cpu_seconds > IDLE_CPU_SECONDS:
                self.end("idle")

    def end(self, reason: str) -> None:
        """End the worker for a limit; whoever waits for its answer sees that it has ended."""
        self.end_reason = reason
        kill(self.process)

    def close(self) -> None:
        """End the worker with everything it has started, and close its streams once nobody reads them."""
        kill(self.process)
        with self.lock:
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()


def _parse(line: bytes) -> dict[str, str] | None:
    """Read an answer, which the user's code may have written."""
    try:
        answer = json.loads(line)
        return {name: str(answer[name]) for name in ("status", "stdout", "stderr")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class NoRoomError(Exception):
    """All sessions are in use."""


class Sessions:
    """The sessions by name, at most `most`.

    For another one, the session that was unused for longest is ended, unless it was used in the last `kept_seconds`.
    """

    def __init__(self, limits: Limits, *, most: int, idle_seconds: float, kept_seconds: float = KEPT_SECONDS) -> None:
        self.limits, self.most, self.idle_seconds, self.kept_seconds = limits, most, idle_seconds, kept_seconds
        self._lock = threading.Lock()
        self._by_name: dict[str, Session] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_name)

    def run(self, name: str, code: str, seconds: float) -> tuple[Outcome, bool]:
        """Execute a cell in a session; return how it ended and whether the session was new. Raises `NoRoomError`."""
        with self._lock:
            session = self._by_name.get(name)
            is_new = session is None or not session.is_alive
            if session is None or is_new:
                if session is not None:
                    self._by_name.pop(name).close()
                self._make_room()
                session = self._by_name[name] = Session(self.limits)
        outcome = session.run(code, seconds)
        if not session.is_alive:
            self.delete(name, session)
        return outcome, is_new

    def _make_room(self) -> None:
        """End sessions where there are too many; raises `NoRoomError` when those that may be ended do not suffice."""
        surplus, since = len(self._by_name) - self.most + 1, time.monotonic() - self.kept_seconds
        idle = sorted(
            (session.used, name)
            for name, session in self._by_name.items()
            if session.used < since and not session.lock.locked()
        )
        if surplus > len(idle):
            raise NoRoomError(f"{len(self._by_name)} sessions are open, and at most {self.most} may be")
        for _, name in idle[: max(0, surplus)]:
            self._by_name.pop(name).close()

    def delete(self, name: str, session: Session | None = None) -> bool:
        """End a session; False where no session has that name, or by now another one than `session`."""
        with self._lock:
            found = self._by_name.get(name)
            if found is None or (session is not None and found is not session):
                return False
            del self._by_name[name]
        found.close()
        return True

    def _watch(self) -> None:
        while not self._is_closed.wait(CHECK_SECONDS):
            with self._lock:
                sessions = dict(self._by_name)
            for name, session in sessions.items():
                try:
                    session.watch(self.idle_seconds)
                except Exception:  # of one session; the others must not go without their limits
                    log.exception("a session could not be watched, and was ended")
                    session.end("end")
                if not session.is_alive and not session.lock.locked():
                    self.delete(name, session)

    def close(self) -> None:
        """End all sessions."""
        self._is_closed.set()
        with self._lock:
            names = list(self._by_name)
        for name in names:
            self.delete(name)
