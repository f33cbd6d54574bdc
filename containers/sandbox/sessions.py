"""Python sessions that keep their variables between calls, each a worker in a jail of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from jail import Limits, Outcome, jail_words, kill, resident_bytes, start

WORKER = Path(__file__).with_name("worker.py")
GRACE_SECONDS = 0.5  # from the interrupt of a cell to the end of its session
CHECK_SECONDS = 0.25
STATUS = {"completed": 0, "error": 1}


class Session:
    """One worker. Calls wait for each other."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lock = threading.Lock()
        self.used = time.monotonic()
        files = ["--ro-bind", str(WORKER), "/worker.py"]
        words = jail_words(["python3", "-I", "/worker.py"], limits, cpu_seconds=None, files=files)
        self.process: subprocess.Popen[bytes] = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def run(self, code: str, seconds: float) -> Outcome:
        """Execute a cell; the session is over when the cell could not be interrupted, or ended its process."""
        with self.lock:
            self.used = time.monotonic()
            request = {"code": code, "seconds": seconds, "output_bytes": self.limits.output_bytes}
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()
                line, reason = self._answer(time.monotonic() + seconds + GRACE_SECONDS)
            except (OSError, ValueError):  # ended, or closed by another call
                line, reason = b"", "end"
            self.used = time.monotonic()
        answer = _parse(line)
        if answer is None:
            self.close()
            return Outcome(status=None, stdout="", stderr="", reason=reason or "end")
        reason = "time" if answer["status"] == "timeout" else ""
        status = None if reason else STATUS.get(answer["status"], 1)
        return Outcome(status=status, stdout=answer["stdout"], stderr=answer["stderr"], reason=reason)

    def _answer(self, deadline: float) -> tuple[bytes, str]:
        """Read one line; return it, or why there is none."""
        assert self.process.stdout is not None
        descriptor, line = self.process.stdout.fileno(), bytearray()
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        limit = 16 * self.limits.output_bytes  # JSON may write six bytes for one, twice
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                return b"", "time"
            ready = poll.poll(1000 * min(left, CHECK_SECONDS))
            if not ready and resident_bytes(self.process.pid) > self.limits.memory_mib * 2**20:
                return b"", "memory"
            data = os.read(descriptor, 65536) if ready else b""
            line += data
            if (ready and not data) or len(line) > limit:
                return b"", "end"
        return bytes(line), ""

    def close(self) -> None:
        """End the worker with everything it has started."""
        kill(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what could not be written any more
                    continue


def _parse(line: bytes) -> dict[str, str] | None:
    """Read an answer, which the user's code could have written."""
    try:
        answer = json.loads(line)
        return {name: str(answer[name]) for name in ("status", "stdout", "stderr")}
    except (ValueError, KeyError, TypeError):
        return None


class Sessions:
    """The sessions by name; above `most`, and after `idle_seconds`, the one unused for longest goes."""

    def __init__(self, limits: Limits, *, most: int, idle_seconds: float) -> None:
        self.limits, self.most, self.idle_seconds = limits, most, idle_seconds
        self.lock = threading.Lock()
        self.by_name: dict[str, Session] = {}

    def run(self, name: str, code: str, seconds: float) -> tuple[Outcome, bool]:
        """Execute a cell in a session; return how it ended and whether the session was new."""
        with self.lock:
            session = self.by_name.get(name)
            is_new = session is None or not session.is_alive
            if session is None or is_new:
                self._make_room()
                session = self.by_name[name] = Session(self.limits)
        outcome = session.run(code, seconds)
        if not session.is_alive:
            self.delete(name, session)
        return outcome, is_new

    def _make_room(self) -> None:
        now = time.monotonic()
        idle = sorted((session.used, name) for name, session in self.by_name.items() if not session.lock.locked())
        for number, (used, name) in enumerate(idle):
            if now - used > self.idle_seconds or len(idle) - number >= self.most:
                self.by_name.pop(name).close()

    def delete(self, name: str, session: Session | None = None) -> bool:
        """End a session; False when there is none of that name, or another one by now."""
        with self.lock:
            found = self.by_name.get(name)
            if found is None or (session is not None and found is not session):
                return False
            del self.by_name[name]
        found.close()
        return True

    def ages(self) -> Mapping[str, float]:
        """Return for how many seconds each session has not been used."""
        with self.lock:
            return {name: round(time.monotonic() - session.used, 1) for name, session in self.by_name.items()}

    def close(self) -> None:
        """End all sessions."""
        for name in list(self.ages()):
            self.delete(name)
