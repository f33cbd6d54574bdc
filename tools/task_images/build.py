"""Build the SIF files that the rows of a blend need: `make sif SIF_DIR=... [BLEND=swe2 | ROWS=file | ALL=1]`.

    python -m tools.task_images.build --sif-dir DIR --rows data/swe2/train-split.jsonl [--retry-failed]

First the registry is asked which images exist and how large they are; then they are pulled in parallel. The same
command continues a killed run. Where images failed it ends with status 1, and DIR/images.failed lists them.

Environment: APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD (of Docker Hub, or of the registry in
SIF_LOGIN_HOST) or the files of `docker login`; SIF_REGISTRIES, further registries that rows may name.

Which images the registry has, and how much disk they need, before anything is pulled.

Whether an image exists is asked for each one, by a request that Docker Hub does not count as a pull. Sizes come from
manifests, which it does count: those of at most `sample` images are read, evenly spread, and their mean stands for the
others.

Pull images in parallel and convert each to a SIF file; the failure of one stops no other.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from recipes.environments.swe.images import Listing
from recipes.errors import LaunchError, Problem, RecipeError
from recipes.files import sha256_of, sync_directory, sync_files
from tools.command_line import amount, exit_status, positive
from tools.locks import only_one
from tools.processes import kill_descendants
from tools.progress import Progress
from tools.task_images.convert import Conversion, convert, remove_tree
from tools.task_images.instances import DATASETS_FILE, Instance, instances_of_datasets, instances_of_rows
from tools.task_images.inventory import Failure, Inventory, SifFile, read_failures, write_failures
from tools.task_images.registry.client import REGISTRY_RETRIES, Credentials, Manifest, RateLimit, Registry
from tools.task_images.registry.layers import LayerCache
from tools.task_images.registry.references import ImageError, Reference, trusted_registries

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


SHOWN_FAILURES = 20
KILL_SECONDS, MAX_REMOVALS = 10.0, 5
DEFAULT_WORKERS = 4


def build(options: argparse.Namespace) -> int:
    """Build what is missing; return the exit status."""
    directory: Path = options.sif_dir
    directory.mkdir(parents=True, exist_ok=True)
    conversion = conversion_of(options)
    with only_one(directory / ".lock"):
        work = clean(directory, options.tmp)
        end_on_signal(work)
        try:
            inventory, before = Inventory(directory), read_failures(directory)
            instances = wanted(options, before)
            listing = Listing()
            found = {instance.id: instance.existing(directory, listing) for instance in instances}
            todo = [instance for instance in instances if not is_there(found[instance.id], inventory, conversion)]
            print(f"sif: {len(instances)} images needed, {len(instances) - len(todo)} there, {len(todo)} to build")
            failures = [failure for instance in todo if (failure := shadowed(instance, found[instance.id]))]
            here = {failure.instance for failure in failures}
            if left := [instance for instance in todo if instance.id not in here]:
                failures += fetch(options, left, work, inventory, conversion)
        finally:
            remove_tree(work)
        if options.check_only:
            return 1 if failures else 0
        return summarise(directory, instances, before, failures)


def conversion_of(options: argparse.Namespace) -> Conversion:
    """Return how images are converted; raises `LaunchError` with every program that is missing."""
    conversion = Conversion(
        apptainer=options.converter == "apptainer"
        or (options.converter == "" and shutil.which("apptainer") is not None),
        compression=options.compression,
        processors=max(1, len(os.sched_getaffinity(0)) // options.workers),
        strip_history=options.strip_history,
        seconds=options.timeout,
    )
    fix = "install it (Debian: skopeo umoci squashfs-tools siftool bubblewrap git), or apptainer"
    if missing := conversion.missing_tools():
        raise LaunchError([Problem(where=tool, wrong="not on PATH", fix=fix) for tool in missing])
    return conversion


def clean(directory: Path, tmp: Path | None) -> Path:
    """Remove what killed runs left and return an empty directory for this one. The caller holds the lock."""
    for stale in directory.glob(".*.partial"):
        stale.unlink()
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    work = (tmp or directory) / f".sif-work-{name}"
    if work.exists():
        print(f"sif: removing {work}, which a killed run left")
        remove_tree(work)
    work.mkdir(parents=True)
    return work.resolve()


def wanted(options: argparse.Namespace, before: Sequence[Failure]) -> list[Instance]:
    """Return the instances of this run; `before` are the failures of the run before it."""
    if options.all:
        tables = options.sif_dir / "tables"
        instances = instances_of_datasets(options.datasets, tables, allow_moving=options.allow_moving_revision)
    else:
        instances = instances_of_rows(options.rows, trusted_registries(os.environ))
    if options.retry_failed:
        failed = {failure.instance for failure in before}
        instances = [instance for instance in instances if instance.id in failed]
    return instances


def is_there(path: Path | None, inventory: Inventory, conversion: Conversion) -> bool:
    """Whether the file that an agent would find is whole, and without its history where that was asked for."""
    return (
        path is not None and inventory.is_whole(path) and (inventory.is_stripped(path) or not conversion.strip_history)
    )


def shadowed(instance: Instance, path: Path | None) -> Failure | None:
    """Return the failure where agents would not use a new file, because they find another name of it first."""
    if path is None or path.name == instance.file:
        return None
    detail = f"agents find {path} before {instance.file}, and it is cut or still has its history: remove it"
    return Failure(instance=instance.id, reference=str(instance.reference), cause="shadowed", detail=detail)


def fetch(
    options: argparse.Namespace, todo: Sequence[Instance], work: Path, inventory: Inventory, conversion: Conversion
) -> list[Failure]:
    """Ask which images exist and pull those; return all failures."""

    def locate(reference: Reference) -> Reference:
        return reference.behind(options.mirror)

    policy = replace(REGISTRY_RETRIES, max_retries=options.retries, first_seconds=options.back_off)
    rate = RateLimit(per_second=options.per_second)
    registry = Registry(Credentials.read(), policy, rate, trusted=trusted_registries(os.environ))
    try:
        available = ask_registry(registry, todo, locate, workers=options.workers, sample=options.sample)
        announce(available, options.workers)
        if options.check_only:
            return available.failures
        require_space(available, options.sif_dir, work, options.workers)
        instance = Pull(
            directory=options.sif_dir,
            work=work,
            registry=registry,
            conversion=conversion,
            inventory=inventory,
            blobs=LayerCache(work / "blobs", round(options.layer_cache_gb * 1e9)),
            locate=locate,
            manifests=available.manifests,
            progress=Progress("sif", available.num_bytes),
        )
        failures = available.failures + pull(instance, available, options.workers)
    finally:
        registry.close()
    if registry.waits:
        print("sif: repeated requests after " + ", ".join(f"{count} x {why}" for why, count in registry.waits.items()))
    return failures


def announce(available: Availability, workers: int) -> None:
    """Print what is missing and how much disk is needed."""
    result, temporary = available.needed(workers)
    how = "" if available.is_exact else f", estimated from {len(available.manifests)}"
    print(
        f"sif: the registry has {len(available.instances)} images, {available.num_bytes / 1e9:.2f} GB to pull{how}; "
        f"disk needed: {result / 1e9:.2f} GB for the files, {temporary / 1e9:.2f} GB more during the work"
    )
    if available.failures:
        print(f"sif: {len(available.failures)} images cannot be pulled:")
        show(available.failures)


def show(failures: Sequence[Failure]) -> None:
    """Print the first failures."""
    for failure in failures[:SHOWN_FAILURES]:
        print(f"  {failure.instance}: {failure.cause}: {failure.detail}")
    if len(failures) > SHOWN_FAILURES:
        print(f"  ... and {len(failures) - SHOWN_FAILURES} more")


def summarise(
    directory: Path, instances: Sequence[Instance], before: Sequence[Failure], failures: Sequence[Failure]
) -> int:
    """Write the list of failures and print a summary; return the exit status."""
    here = {instance.id for instance in instances}
    path = write_failures(directory, [*(old for old in before if old.instance not in here), *failures])
    print(f"sif: {len(instances) - len(failures)} of {len(instances)} images are in {directory}")
    if not failures:
        return 0
    causes = ", ".join(f"{count} {cause}" for cause, count in Counter(entry.cause for entry in failures).most_common())
    print(
        f"sif: {len(failures)} failed ({causes}); {path} lists them, `--retry-failed` tries only those", file=sys.stderr
    )
    return 1


def end_on_signal(work: Path) -> None:
    """On SIGINT or SIGTERM end at once, whatever the threads wait for, and remove the temporary files."""

    def end(number: int, _: object) -> None:
        for _ in range(MAX_REMOVALS):  # threads may still be writing
            kill_descendants(deadline_seconds=KILL_SECONDS)
            shutil.rmtree(work, ignore_errors=True)
            if not work.exists():
                break
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.task_images.build", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--sif-dir", type=Path, required=True, help="directory of the SIF files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, nargs="+", help="row files")
    source.add_argument("--all", action="store_true", help="every instance of the published data sets")
    add("--datasets", type=Path, default=DATASETS_FILE, help="table of data sets for --all")
    add("--allow-moving-revision", action="store_true", help="follow a branch of a data set of --all")
    add("--workers", type=positive, default=DEFAULT_WORKERS, help="images built at once")
    add("--mirror", default="", help="HOST[:PORT][/PREFIX] to ask instead of Docker Hub")
    add("--tmp", type=Path, help="directory for temporary files; default: the SIF directory")
    add("--converter", choices=("", "apptainer", "umoci"), default="", help="default: apptainer where it is installed")
    add("--compression", choices=("gzip", "zstd", "lz4", "xz"), default="gzip", help="compression of the files")
    add("--strip-history", action="store_true", help="remove git history beyond the base commit")
    add("--check-only", action="store_true", help="print what is missing in the registry, and pull nothing")
    add("--retry-failed", action="store_true", help="only the images in DIR/images.failed")
    add("--sample", type=positive, default=50, help="manifests that are read to estimate the disk space")
    add("--layer-cache-gb", type=amount, default=20.0, help="disk for layers that several images share")
    add("--per-second", type=amount, default=RateLimit().per_second, help="requests per second to one registry")
    retries, wait = REGISTRY_RETRIES.max_retries, REGISTRY_RETRIES.first_seconds
    add("--retries", type=positive, default=retries, help="retries of one request, in a row without progress")
    add("--back-off", type=amount, default=wait, help="seconds before the first retry; doubles with each retry")
    add("--timeout", type=amount, default=3600.0, help="seconds that one program of a conversion may take")
    return parser.parse_args(arguments)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return build(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
