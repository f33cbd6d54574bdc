"""Which images the registry has, and how much disk they need, before anything is pulled.

Whether an image exists is asked for each one, by a request that Docker Hub does not count as a pull. Sizes come from
manifests, which it does count: those of at most `sample` images are read, evenly spread, and their mean stands for the
others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.sif.instances import Instance
from tools.sif.inventory import Failure
from tools.sif.registry.client import Manifest, Registry
from tools.sif.registry.errors import ImageError
from tools.sif.registry.references import Reference

UNPACKED_FACTOR = 6  # disk of one image during its work, over its compressed size: layers, copy, unpacked files, result
RESULT_FACTOR = 1.2  # size of a SIF file over that of the compressed layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """The images that can be pulled, and the sizes that are known of them."""

    instances: list[Instance]
    failures: list[Failure]
    manifests: dict[str, Manifest]  # instance -> manifest, of the sample
    num_bytes: int  # compressed, of all images; an estimate where not all manifests were read
    largest: int  # bytes of the largest image

    @property
    def is_exact(self) -> bool:
        return len(self.manifests) == len(self.instances)

    def needed(self, workers: int) -> tuple[int, int]:
        """Return the bytes of all results, and those of the temporary files of `workers` images."""
        return round(self.num_bytes * RESULT_FACTOR), min(workers, len(self.instances)) * self.largest * UNPACKED_FACTOR


def ask_registry(
    registry: Registry,
    instances: Sequence[Instance],
    locate: Callable[[Reference], Reference],
    *,
    workers: int,
    sample: int,
) -> Availability:
    """Ask for every image whether it exists, and for at most `sample` how large it is."""
    failures: dict[str, Failure] = {}
    manifests: dict[str, Manifest] = {}

    def exists(instance: Instance) -> None:
        try:
            if registry.digest(locate(instance.reference)) is None:
                raise ImageError("missing", f"{locate(instance.reference)}: not in the registry")
        except ImageError as error:
            failures[instance.id] = failure_of(instance, error)

    def measure(instance: Instance) -> None:
        try:
            manifests[instance.id] = registry.manifest(locate(instance.reference))
        except ImageError as error:
            failures[instance.id] = failure_of(instance, error)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(exists, instances))
        there = [instance for instance in instances if instance.id not in failures]
        list(threads.map(measure, spread(there, sample)))
    left = [instance for instance in instances if instance.id not in failures]
    sizes = [manifest.size for manifest in manifests.values()]
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    return Availability(
        instances=left,
        failures=[failures[instance.id] for instance in instances if instance.id in failures],
        manifests=manifests,
        num_bytes=round(mean * len(left)),
        largest=max(sizes, default=0),
    )


def failure_of(instance: Instance, error: ImageError) -> Failure:
    """Return the entry for the list of failures."""
    return Failure(instance=instance.id, reference=str(instance.reference), cause=error.cause, detail=error.detail)


def spread(instances: Sequence[Instance], number: int) -> list[Instance]:
    """Return at most `number` instances, evenly spread."""
    if len(instances) <= number:
        return list(instances)
    return [instances[index * len(instances) // number] for index in range(number)]


def require_space(available: Availability, directory: Path, work: Path, workers: int) -> None:
    """Raise `LaunchError` when the results or the temporary files do not fit on their disks."""
    result, temporary = available.needed(workers)
    is_one = directory.stat().st_dev == work.stat().st_dev
    wanted = {directory: result + temporary} if is_one else {directory: result, work: temporary}
    problems = []
    for place, needed in wanted.items():
        free = shutil.disk_usage(place).free
        if free < needed:
            fix = "free some disk, use fewer --workers, or name another disk with --tmp"
            got, expected = f"{free / 1e9:.1f} GB free", f"{needed / 1e9:.1f} GB"
            problems.append(Problem(where=str(place), got=got, expected=expected, fix=fix))
    if problems:
        raise LaunchError(problems)
