"""Scoring in worker processes, with a hard deadline for each response.

Verifiers that run libraries on model text may hang, use SIGALRM (main thread only) or eat memory. They run in a few
persistent processes; one that does not answer in time is killed and replaced, and the response earns nothing. Equal
responses to equal tasks are scored once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.contract.verdict import NoVerdict, Response, Verdict
from recipes.types import RolloutStatus

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS = 60.0  # to start a process and import a verifier's libraries
_MAX_WORKERS = 32


class WorkerDied(Exception):  # noqa: N818 (names what happened to the process)
    """A worker process ended before it answered."""


class _Worker:
    """One process, started on first use; used by one thread at a time."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._loaded: set[str] = set()

    def score(self, name: str, task: Any, response: Response) -> tuple[str, Any]:
        """Return the worker's answer; raises `TimeoutError` after the limit, `WorkerDied` when it crashes."""
        if self._process is None:
            self._start()
        if name not in self._loaded:
            kind, answer = self._ask(("load", name, None, None), _START_SECONDS)
            if kind == "error":
                return kind, answer
            self._loaded.add(name)
        return self._ask(("score", name, task, response), self._limit_seconds)

    def kill(self) -> None:
        """End the process; a thread that waits for it sees it die."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process and forget it; the next score starts another."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process, self._connection, self._loaded = None, None, set()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ["-m", "recipes.environments.scoring.worker", str(theirs.fileno()), str(self._limit_seconds)]
            path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())

    def _ask(self, request: tuple[str, str, Any, Any], seconds: float) -> tuple[str, Any]:
        assert self._process is not None and self._connection is not None
        try:
            self._connection.send(request)
            if self._connection.poll(seconds):
                kind, answer = self._connection.recv()
                return kind, answer
        except (EOFError, OSError) as error:
            self.kill()
            status = self._process.wait()
            self.stop()
            raise WorkerDied(f"exit status {status}") from error
        self.stop()
        raise TimeoutError


class ScoringPool:
    """Scores responses in up to `num_workers` processes, `limit_seconds` each."""

    def __init__(
        self, *, num_workers: int | None = None, limit_seconds: float = 10.0, cached_verdicts: int = 16384
    ) -> None:
        count = num_workers or min(_MAX_WORKERS, max(1, (os.cpu_count() or 1) // 2))
        self.limit_seconds = limit_seconds
        self._workers = [_Worker(limit_seconds) for _ in range(count)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="scoring")
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cached_verdicts = cached_verdicts
        self._lock = threading.Lock()
        self._is_closed = False

    async def score(self, name: str, task: Any, response: Response) -> Verdict | NoVerdict:
        """Return the verdict of verifier `name`; 0 with a reason when it takes too long."""
        needed = {"output": response.get("output"), "error": response.get("error")}
        key = hashlib.blake2b(f"{name} {task!r} ".encode() + orjson.dumps(needed), digest_size=16).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        verdict, is_final = await asyncio.wrap_future(self._threads.submit(self._score, name, task, needed))
        if is_final and isinstance(verdict, Verdict):
            self._remember(key, verdict)
        return verdict

    def close(self) -> None:
        """Kill the workers; scores in flight end without a verdict."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _score(self, name: str, task: Any, response: Response) -> tuple[Verdict | NoVerdict, bool]:
        """Return the verdict and whether it would be the same again."""
        worker = self._idle.get()
        try:
            return self._with_retry(worker, name, task, response)
        finally:
            self._idle.put(worker)

    def _with_retry(
        self, worker: _Worker, name: str, task: Any, response: Response
    ) -> tuple[Verdict | NoVerdict, bool]:
        for is_last in (False, True):
            try:
                kind, answer = worker.score(name, task, response)
            except TimeoutError:
                logger.warning("%s: no score within %g s, worker replaced", name, self.limit_seconds)
                return Verdict(reward=0.0, reason=f"no score within {self.limit_seconds:g} s"), False
            except WorkerDied as death:
                if is_last or self._is_closed:
                    reason = f"{name}: the scoring worker died ({death})"
                    return NoVerdict(status=RolloutStatus.ENV_FAILED, reason=reason), False
                continue
            if kind == "error":
                return NoVerdict(status=RolloutStatus.ENV_FAILED, reason=f"{name}: {answer}"), False
            return answer, True
        raise AssertionError("unreachable")

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        with self._lock:
            self._cache[key] = verdict
            while len(self._cache) > self._cached_verdicts:
                self._cache.popitem(last=False)
