"""One file of rows, all cores: blocks of whole lines go to worker processes, their results come back in order.

A job is two byte offsets, so no row crosses a process boundary on its way in, and memory is a few blocks per worker.
Where there is one core, or a file of one block, the work runs in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recipes.grpo.errors import RunError
from tools.launch.processes import dies_with_parent

BLOCK = 4 << 20  # bytes of a job: enough that handing it out costs nothing
JOBS_PER_WORKER = 3  # handed out ahead, so that no worker waits for the slowest block

Result = TypeVar("Result")

_work: Callable[[Any], Any] | None = None  # of this worker process


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file, as byte offsets."""

    start: int
    end: int

    def read(self, path: Path) -> bytes:
        """Return the lines; fewer bytes than `end - start` when the file was cut meanwhile."""
        with path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


def num_cores() -> int:
    """Return how many processes can run at once."""
    return len(os.sched_getaffinity(0))


def num_workers(num_jobs: int, worth_a_worker: int) -> int:
    """Return how many processes to use: DATA_WORKERS where it is set, else as many as have enough to do."""
    wanted = os.environ.get("DATA_WORKERS")
    return min(num_jobs, int(wanted)) if wanted else min(num_cores(), num_jobs // worth_a_worker)


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


def map_in_order(
    jobs: Iterable[Any], work: Callable[[Any], Result], *, worth_a_worker: int = 2
) -> Generator[Result, None, None]:
    """Yield `work(job)` for each job, in their order; `work` is sent to each worker once and must be picklable.

    `worth_a_worker` is how many jobs take longer than the half second in which a process starts.
    """
    waiting = deque(jobs)
    workers = num_workers(len(waiting), worth_a_worker)
    if workers < 2:
        yield from map(work, waiting)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of this process hold
    arguments = (work, dies_with_parent(signal.SIGKILL))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=arguments) as pool:
        running: deque[Future[Result]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < workers * JOBS_PER_WORKER:
                    running.append(pool.submit(_run, waiting.popleft()))
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise RunError("a worker process died; if memory ran out, set DATA_WORKERS=1 and run it again") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _install(work: Callable[[Any], Any], die_with_parent: Callable[[], None]) -> None:
    global _work
    die_with_parent()  # a killed parent leaves no worker behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    _work = work


def _run(job: Any) -> Any:
    assert _work is not None
    return _work(job)
