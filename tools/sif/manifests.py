"""What is there upstream, and how much room it takes, before anything is pulled.

Whether an image exists is asked of every image by a request that costs no pull. Sizes come from manifests, which do:
those of at most `sample` images are read, evenly spread, and the others count as their mean.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.sif.ledger import Failure
from tools.sif.registry import Manifest, PullError, Registry
from tools.sif.wanted import Reference, Task

UNPACKED_FACTOR = 6  # of an image at work: its blobs, their copy, the unpacked files (three times as much), the result
RESULT_FACTOR = 1.2  # a SIF file over the compressed layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """The images that can be pulled, and what is known of them."""

    tasks: list[Task]
    failures: list[Failure]
    manifests: dict[str, Manifest]  # by instance, of the sample
    num_bytes: int  # compressed, of all tasks; an estimate where not all manifests were read
    largest: int

    @property
    def is_exact(self) -> bool:
        return len(self.manifests) == len(self.tasks)

    def needed(self, workers: int) -> tuple[int, int]:
        """Return the bytes of the results, and of the work of so many images at once."""
        return round(self.num_bytes * RESULT_FACTOR), min(workers, len(self.tasks)) * self.largest * UNPACKED_FACTOR


def examine(
    registry: Registry, tasks: Sequence[Task], locate: Callable[[Reference], Reference], *, workers: int, sample: int
) -> Available:
    """Ask for every image whether it is there, and for some how large it is."""
    failures: dict[str, Failure] = {}
    manifests: dict[str, Manifest] = {}

    def exists(task: Task) -> None:
        try:
            if registry.digest(locate(task.reference)) is None:
                raise PullError("missing", f"{locate(task.reference)}: not in the registry")
        except PullError as error:
            failures[task.instance] = failure_of(task, error)

    def measure(task: Task) -> None:
        try:
            manifests[task.instance] = registry.manifest(locate(task.reference))
        except PullError as error:
            failures[task.instance] = failure_of(task, error)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(exists, tasks))
        there = [task for task in tasks if task.instance not in failures]
        list(threads.map(measure, spread(there, sample)))
    left = [task for task in tasks if task.instance not in failures]
    sizes = [manifest.size for manifest in manifests.values()]
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    return Available(
        tasks=left,
        failures=[failures[task.instance] for task in tasks if task.instance in failures],
        manifests=manifests,
        num_bytes=round(mean * len(left)),
        largest=max(sizes, default=0),
    )


def failure_of(task: Task, error: PullError) -> Failure:
    """Return the line of the list of failures."""
    return Failure(instance=task.instance, reference=str(task.reference), cause=error.cause, detail=error.detail)


def spread(tasks: Sequence[Task], number: int) -> list[Task]:
    """Return at most `number` tasks, evenly spread."""
    if len(tasks) <= number:
        return list(tasks)
    return [tasks[index * len(tasks) // number] for index in range(number)]


def require_space(available: Available, directory: Path, work: Path, workers: int) -> None:
    """Raise `LaunchError` when the results, or the work on them, do not fit."""
    result, temporary = available.needed(workers)
    is_one = directory.stat().st_dev == work.stat().st_dev
    wanted = {directory: result + temporary} if is_one else {directory: result, work: temporary}
    problems = []
    for place, needed in wanted.items():
        free = shutil.disk_usage(place).free
        if free < needed:
            fix = "make room, or fewer WORKERS, or put the work elsewhere with --tmp"
            got, expected = f"{free / 1e9:.1f} GB free", f"{needed / 1e9:.1f} GB"
            problems.append(Problem(where=str(place), got=got, expected=expected, fix=fix))
    if problems:
        raise LaunchError(problems)
