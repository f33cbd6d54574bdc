"""One row file on all cores: worker processes each take a block of whole lines; results come back in order.

A job is two byte offsets: a worker reads its block itself, and memory is a few blocks per worker. With one core, or a
file of few blocks, the work runs in this process.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from recipes.errors import InputError, Problem, RunError
from tools.processes import dies_with_parent

BLOCK = 4 << 20  # bytes per job: large enough that sending the job costs nothing in comparison
JOBS_PER_WORKER = 3  # jobs sent ahead, so that no worker waits for the slowest block

Work = TypeVar("Work")
Job = TypeVar("Job")
Result = TypeVar("Result")

_work: Any = None  # in a worker process: what it does with a job


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file, as byte offsets."""

    start: int
    end: int

    def read(self, path: Path) -> bytes:
        """Return the bytes; fewer than `end - start` when the file has become shorter."""
        with path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_workers(num_jobs: int, worth_a_worker: int) -> int:
    """Return how many processes to use: DATA_WORKERS, else one per core with `worth_a_worker` jobs for each."""
    wanted = os.environ.get("DATA_WORKERS")
    if not wanted:
        return min(num_cores(), num_jobs // worth_a_worker)
    if not wanted.isdecimal() or int(wanted) < 1:
        expected, fix = "a whole number, 1 or more", "correct it, or unset it to use all cores"
        raise InputError(Problem(where="DATA_WORKERS", got=repr(wanted), expected=expected, fix=fix))
    return min(num_jobs, int(wanted))


def blocks_of(path: Path, size: int | None = None) -> Iterator[Block]:
    """Yield the file in blocks of about `size` bytes; a line that is longer makes its block longer."""
    size = size or BLOCK
    start, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while start < total:
            file.seek(min(start + size, total) - 1)
            file.readline()  # to the end of the line that holds the last byte
            yield Block(start, file.tell())
            start = file.tell()


class Workers(Generic[Work]):
    """`count` processes that each receive `work`, which must be picklable; with `count` below 2, this process works."""

    def __init__(self, work: Work, count: int) -> None:
        self.work, self.count = work, count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy locks held by threads of this process
            arguments = (work, dies_with_parent(signal.SIGKILL))
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_install, initargs=arguments)

    def __enter__(self) -> Workers[Work]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, method: Callable[[Work, Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield `method(work, job)` for each job, in order; `method` must be picklable."""
        if self._pool is None:
            yield from (method(self.work, job) for job in jobs)
            return
        running: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                running.append(_submit(self._pool, method, job))
                if len(running) == self.count * JOBS_PER_WORKER:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise RunError("a worker process died; if memory ran out, set DATA_WORKERS=1 and run it again") from error


def map_in_order(
    jobs: Iterable[Job], work: Callable[[Job], Result], *, worth_a_worker: int = 2
) -> Generator[Result, None, None]:
    """Yield `work(job)` for each job, in order, from workers that end after the last job.

    `worth_a_worker` is the number of jobs that take longer than the half second in which a process starts.
    """
    waiting = list(jobs)
    with Workers(work, num_workers(len(waiting), worth_a_worker)) as workers:
        yield from workers.map(operator.call, waiting)


def _submit(pool: ProcessPoolExecutor, method: Callable[[Any, Job], Result], job: Job) -> Future[Result]:
    """Submit a job. The first one starts the workers, which must not see a Ctrl-C while they still import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_run, method, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _install(work: Any, die_with_parent: Callable[[], None]) -> None:
    global _work
    die_with_parent()  # so that a killed parent leaves no worker behind
    _work = work


def _run(method: Callable[[Any, Job], Result], job: Job) -> Result:
    return method(_work, job)
