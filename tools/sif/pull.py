"""Pull images in parallel and convert each to a SIF file; the failure of one stops no other."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipes.errors import RecipeError
from recipes.files import sha256_of, sync_directory, sync_files
from tools.files.progress import Progress
from tools.sif.availability import Availability, failure_of
from tools.sif.convert import Conversion, convert, remove_tree
from tools.sif.instances import Instance
from tools.sif.inventory import Failure, Inventory, SifFile
from tools.sif.registry.client import Manifest, Registry
from tools.sif.registry.errors import ImageError
from tools.sif.registry.layers import LayerCache
from tools.sif.registry.references import Reference

SPACE = "space"
ODD = (ValueError, TypeError, AttributeError, KeyError, RecursionError)  # what code raises that reads an odd image


@dataclass(kw_only=True)
class Pull:
    """What the images of one run share."""

    directory: Path
    work: Path
    registry: Registry
    conversion: Conversion
    inventory: Inventory
    blobs: LayerCache
    locate: Callable[[Reference], Reference]
    manifests: Mapping[str, Manifest]
    progress: Progress
    finished: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, num_bytes: int) -> None:
        """Add bytes to the progress line."""
        with self._lock:
            self.progress.add(num_bytes)

    def make(self, instance: Instance) -> SifFile:
        """Write the SIF file of one instance; raises `ImageError`. Its temporary files are removed in any case."""
        place = self.work / instance.file.removesuffix(".sif")
        partial = partial_of(self.directory / instance.file)
        try:
            place.mkdir()
            reference = self.locate(instance.reference)
            manifest = self.manifests.get(instance.id) or self.registry.manifest(reference)
            with self.blobs.of(self.registry, reference, manifest, self.count) as blobs:
                sif = convert(self.conversion, manifest, blobs, place, instance.facts)
            entry = SifFile(
                file=instance.file,
                instance=instance.id,
                reference=str(instance.reference),
                digest=manifest.digest,
                bytes=sif.stat().st_size,
                sha256=sha256_of(sif),
                tool=self.conversion.name,
                stripped=self.conversion.strip_history,
            )
            shutil.move(sif, partial)  # copies when the work is on another file system
            if partial.stat().st_size != entry.bytes:
                raise ImageError("convert", f"{partial}: {partial.stat().st_size} bytes of {entry.bytes}")
            sync_files([partial])  # a file that has its name is taken for whole when it has its size
            self.inventory.add(entry)
            partial.replace(self.directory / instance.file)
            sync_directory(self.directory)
            return entry
        except RecipeError:
            raise
        except ODD as error:
            raise ImageError("convert", f"{type(error).__name__}: {error}") from error
        except OSError as error:
            cause = SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk"
            raise ImageError(cause, str(error)) from error
        finally:
            partial.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                remove_tree(place)

    def run(self, instances: Sequence[Instance], workers: int, total: int) -> list[Failure]:
        """Make the file of every instance; return the failures."""
        failures = []
        with ThreadPoolExecutor(workers) as threads:
            futures = {threads.submit(self.make, instance): instance for instance in instances}
            for future in as_completed(futures):
                instance = futures[future]
                try:
                    entry = future.result()
                    said = f"{entry.file} ({entry.bytes / 1e6:.1f} MB)"
                except ImageError as error:
                    failures.append(failure_of(instance, error))
                    said = f"FAILED: {error}"
                self.finished += 1
                print(f"sif: {self.finished} of {total} {instance.id}: {said}", flush=True)
        return failures


def pull(work: Pull, available: Availability, workers: int) -> list[Failure]:
    """Make every file; those for which the disk was full are tried once more, one at a time."""
    total = len(available.instances)
    failures = work.run(available.instances, workers, total)
    full = [failure.instance for failure in failures if failure.cause == SPACE]
    if full:
        print(f"sif: the disk was full for {len(full)} images; trying each of them alone", flush=True)
        work.blobs.clear()
        work.finished -= len(full)
        failures = [failure for failure in failures if failure.cause != SPACE]
        for instance in available.instances:
            if instance.id in full:
                failures += work.run([instance], 1, total)
                work.blobs.clear()
    work.progress.end()
    return failures


def partial_of(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(f".{path.name}.partial")
