"""Pull images in parallel and make a SIF file of each; what fails is named, and stops nothing else."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipes.files import sha256_of
from tools.files.progress import Progress
from tools.sif.blobs import Blobs
from tools.sif.convert import Conversion, convert, remove_tree
from tools.sif.ledger import Failure, Ledger, Made
from tools.sif.manifests import Available, failure_of
from tools.sif.registry import Manifest, PullError, Registry
from tools.sif.wanted import Reference, Task

SPACE = "space"


@dataclass(kw_only=True)
class Pull:
    """The work of one run."""

    directory: Path
    work: Path
    registry: Registry
    conversion: Conversion
    ledger: Ledger
    blobs: Blobs
    locate: Callable[[Reference], Reference]
    manifests: Mapping[str, Manifest]
    progress: Progress
    finished: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, num_bytes: int) -> None:
        """Add bytes to the progress line."""
        with self._lock:
            self.progress.add(num_bytes)

    def make(self, task: Task) -> Made:
        """Bring one image into the directory; raises `PullError`. Its temporary files are gone in any case."""
        place = self.work / task.file.removesuffix(".sif")
        partial = partial_of(self.directory / task.file)
        try:
            place.mkdir()
            reference = self.locate(task.reference)
            manifest = self.manifests.get(task.instance) or self.registry.manifest(reference)
            with self.blobs.of(self.registry, reference, manifest, self.count) as blobs:
                sif = convert(self.conversion, manifest, blobs, place, task.facts)
            entry = Made(
                file=task.file,
                instance=task.instance,
                reference=str(task.reference),
                digest=manifest.digest,
                bytes=sif.stat().st_size,
                sha256=sha256_of(sif),
                tool=self.conversion.name,
                stripped=self.conversion.strip_history,
            )
            shutil.move(sif, partial)  # a copy when the work is on another file system
            if partial.stat().st_size != entry.bytes:
                raise PullError("convert", f"{partial}: {partial.stat().st_size} bytes of {entry.bytes}")
            self.ledger.add(entry)
            partial.replace(self.directory / task.file)
            return entry
        except OSError as error:
            cause = SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk"
            raise PullError(cause, str(error)) from error
        finally:
            partial.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                remove_tree(place)

    def run(self, tasks: Sequence[Task], workers: int, total: int) -> list[Failure]:
        """Make every image; return those that failed."""
        failures = []
        with ThreadPoolExecutor(workers) as threads:
            futures = {threads.submit(self.make, task): task for task in tasks}
            for future in as_completed(futures):
                task = futures[future]
                try:
                    entry = future.result()
                    said = f"{entry.file} ({entry.bytes / 1e6:.1f} MB)"
                except PullError as error:
                    failures.append(failure_of(task, error))
                    said = f"FAILED: {error}"
                self.finished += 1
                print(f"sif: {self.finished} of {total} {task.instance}: {said}", flush=True)
        return failures


def pull(work: Pull, available: Available, workers: int) -> list[Failure]:
    """Make every image that is there; those for which the disk was full are tried once more, one at a time."""
    total = len(available.tasks)
    failures = work.run(available.tasks, workers, total)
    full = [failure.instance for failure in failures if failure.cause == SPACE]
    if full:
        print(f"sif: the disk was full for {len(full)} images; trying each of them alone", flush=True)
        work.blobs.clear()
        work.finished -= len(full)
        failures = [failure for failure in failures if failure.cause != SPACE]
        for task in available.tasks:
            if task.instance in full:
                failures += work.run([task], 1, total)
                work.blobs.clear()
    work.progress.end()
    return failures


def partial_of(path: Path) -> Path:
    """Return the name of a file that is not whole yet."""
    return path.with_name(f".{path.name}.partial")
