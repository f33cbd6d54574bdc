"""Scoring in jailed processes, for verifiers that run libraries on model text.

Such a library may hang, use SIGALRM (main thread only), eat memory, or run what it reads. What happens to a response:

    more than `cpu_seconds` of processor time     no verdict: a busy node takes longer, but does not use more
    no answer by the caller's time-out            no verdict: the machine may be the cause
    the process died, twice                       no verdict
    its libraries cannot be loaded, three times   no verdict
    no process is free for QUEUE_SECONDS          no verdict; waiting does not count against the caller's time-out

Equal responses to equal tasks are scored once; what ended without a verdict is scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recipes.environments.contract.verifier import NoVerdict, Replies, Requests, Response, Verdict, Verifier, env_failed
from recipes.environments.scoring.frames import EncodedTask, as_json, encode_task
from recipes.environments.scoring.jail import jail
from recipes.environments.scoring.process import Body, OutOfTime, ProcessDied, ScoringProcess

logger = logging.getLogger(__name__)

LOAD_SECONDS = 60.0  # to start a process and import a verifier's libraries; a cold file system takes long
LOAD_ATTEMPTS = 3
SCORE_ATTEMPTS = 2
QUEUE_SECONDS = 1800.0
MAX_PROCESSES = 32


Scored = Verdict | NoVerdict | Requests
"""What scoring a response came to: requests are for a judge or a sandbox, whose replies go into another score."""


def num_processes(*, num_pools: int) -> int:
    """Return how many processes each of `num_pools` pools on this machine has: together, half of its cores."""
    return min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2 // num_pools))


class ScoringPool:
    """Scores responses in up to `num_workers` processes, each with `cpu_seconds` of processor time for one score."""

    def __init__(
        self, *, num_workers: int | None = None, cpu_seconds: float = 18.0, cached_verdicts: int = 16384
    ) -> None:
        count = num_workers or num_processes(num_pools=1)
        self.cpu_seconds = cpu_seconds
        self._processes = [ScoringProcess() for _ in range(count)]
        self._idle: queue.LifoQueue[ScoringProcess] = queue.LifoQueue()  # the last used first: it has most loaded
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="scoring")
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cached_verdicts = cached_verdicts
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_warned = False

    async def score(
        self, verifier: Verifier, task: Any, response: Response, *, replies: Replies = (), seconds: float = 120.0
    ) -> Scored:
        """Return the verdict on a response, or what must be asked for it; `seconds` bounds the scoring on the clock.

        Who scores a response in several parts, with replies, encodes its task once and gives the `EncodedTask`.
        """
        needed = {"output": response.get("output"), "error": response.get("error")}
        encoded = task if isinstance(task, EncodedTask) else encode_task(verifier, task)
        body = encoded.json, as_json(needed), as_json(replies)
        key = hashlib.blake2b(b" ".join((verifier.module.encode(), encoded.digest, *body[1:])), digest_size=16).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        asked = time.monotonic()
        scoring = self._threads.submit(self._score, verifier, encoded.kind, body, asked, seconds)
        verdict = await asyncio.wrap_future(scoring)
        if isinstance(verdict, Verdict):
            self._remember(key, verdict)
        return verdict

    def close(self) -> None:
        """Kill the processes; scores in flight end without a verdict."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.stop()

    def _score(self, verifier: Verifier, kind: str, body: Body, asked: float, seconds: float) -> Scored:
        self._warn()
        if time.monotonic() - asked > QUEUE_SECONDS:
            return env_failed(f"{_name(verifier)}: no scoring process was free within {QUEUE_SECONDS:g} s")
        process = self._idle.get()
        try:
            return self._with_retries(process, verifier, kind, body, seconds)
        finally:
            self._idle.put(process)

    def _with_retries(
        self, process: ScoringProcess, verifier: Verifier, kind: str, body: Body, seconds: float
    ) -> Scored:
        name, death = _name(verifier), "it was never started"
        for _ in range(SCORE_ATTEMPTS):
            if self._is_closed:
                break
            if problem := self._load(process, verifier):
                return env_failed(f"{name}: its libraries could not be loaded: {problem}")
            try:
                return process.score(verifier, kind, body, cpu_seconds=self.cpu_seconds, seconds=seconds)
            except OutOfTime:
                return env_failed(f"{name}: scoring used more than {self.cpu_seconds:g} s of processor time")
            except TimeoutError:
                return env_failed(f"{name}: no score within {seconds:g} s")
            except (ValueError, RuntimeError, ImportError) as error:
                return env_failed(f"{name}: {error}")
            except ProcessDied as error:
                death = str(error)
        return env_failed(f"{name}: the scoring process died ({death})")

    def _load(self, process: ScoringProcess, verifier: Verifier) -> str:
        """Load a verifier's libraries; returns why that failed, "" when they are loaded."""
        problem = ""
        for _ in range(LOAD_ATTEMPTS):
            if self._is_closed:
                return "the pool is closed"
            try:
                process.load(verifier, LOAD_SECONDS)
                return ""
            except TimeoutError:
                problem = f"not within {LOAD_SECONDS:g} s"
            except ProcessDied as error:
                problem = f"the scoring process died ({error})"
            except (ImportError, ValueError, RuntimeError) as error:  # another attempt would end the same way
                return str(error)
            if not self._is_closed:  # `close` kills what still loads
                logger.warning("%s: loading failed: %s", _name(verifier), problem)
        return f"{problem} ({LOAD_ATTEMPTS} attempts)"

    def _warn(self) -> None:
        """Say once when this machine confines scoring less than it should."""
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            with contextlib.suppress(RuntimeError):  # starting a process reports it, for every score that it costs
                if jail().warning:
                    logger.warning("%s", jail().warning)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        with self._lock:
            self._cache[key] = verdict
            while len(self._cache) > self._cached_verdicts:
                self._cache.popitem(last=False)


def _name(verifier: Verifier) -> str:
    return verifier.module.rpartition(".")[2]
