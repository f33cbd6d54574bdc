"""Make the SIF files that the rows of a blend need: `make sif SIF_DIR=... [BLEND=swe2 | ROWS=file | ALL=1]`.

    python -m tools.sif.make --sif-dir DIR --rows data/swe2/train-split.jsonl [--retry-failed] [--strip-history]

The list comes from the rows. First it is asked what is missing upstream and how much room the rest takes; then images
are pulled in parallel. A killed run is continued by the same command. It ends with a summary; where images failed,
with status 1 and their list in DIR/images.failed. Users: APPTAINER_DOCKER_USERNAME and _PASSWORD, or `docker login`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.command_line import amount, exit_status, positive
from tools.files.locks import only_one
from tools.files.progress import Progress
from tools.processes import kill_descendants
from tools.sif.blobs import Blobs
from tools.sif.convert import Conversion, remove_tree
from tools.sif.credentials import Credentials
from tools.sif.datasets import DATASETS_FILE, tasks_of_datasets
from tools.sif.ledger import Failure, Ledger, read_failures, write_failures
from tools.sif.manifests import Available, examine, require_space
from tools.sif.names import Listing
from tools.sif.pull import Pull, pull
from tools.sif.registry import REGISTRY_RETRIES, RateLimit, Registry
from tools.sif.wanted import Reference, Task, tasks_of_rows

SHOWN_FAILURES = 20
KILL_SECONDS, MAX_REMOVALS = 10.0, 5
DEFAULT_WORKERS = 4


def make(options: argparse.Namespace) -> int:
    """Do the work; return the exit status."""
    directory: Path = options.sif_dir
    directory.mkdir(parents=True, exist_ok=True)
    conversion = conversion_of(options)
    with only_one(directory / ".lock"):
        work = clean(directory, options.tmp)
        end_on_signal(work)
        try:
            ledger, before = Ledger(directory), read_failures(directory)
            tasks = wanted(options, before)
            listing = Listing()
            found = {task.instance: task.existing(directory, listing) for task in tasks}
            todo = [task for task in tasks if not is_there(found[task.instance], ledger, conversion)]
            print(f"sif: {len(tasks)} images needed, {len(tasks) - len(todo)} there, {len(todo)} to make")
            failures = [failure for task in todo if (failure := hidden(task, found[task.instance]))]
            here = {failure.instance for failure in failures}
            if left := [task for task in todo if task.instance not in here]:
                failures += fetch(options, left, work, ledger, conversion)
        finally:
            remove_tree(work)
        if options.check_only:
            return 1 if failures else 0
        return summarise(directory, tasks, before, failures)


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
        raise LaunchError([Problem(where=tool, got="not on PATH", expected="it", fix=fix) for tool in missing])
    return conversion


def clean(directory: Path, tmp: Path | None) -> Path:
    """Remove what killed runs left, and return an empty directory for this one; the lock says that none is at work."""
    for stale in directory.glob(".*.partial"):
        stale.unlink()
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    work = (tmp or directory) / f".sif-work-{name}"
    if work.exists():
        print(f"sif: removing {work}, which a killed run left")
        remove_tree(work)
    work.mkdir(parents=True)
    return work.resolve()


def wanted(options: argparse.Namespace, before: Sequence[Failure]) -> list[Task]:
    """Return the tasks that this run is about; `before` are the failures of the last one."""
    if options.all:
        tables = options.sif_dir / "tables"
        tasks = tasks_of_datasets(options.datasets, tables, allow_moving=options.allow_moving_revision)
    else:
        tasks = tasks_of_rows(options.rows)
    if options.retry_failed:
        failed = {failure.instance for failure in before}
        tasks = [task for task in tasks if task.instance in failed]
    return tasks


def is_there(path: Path | None, ledger: Ledger, conversion: Conversion) -> bool:
    """Return whether the file that an agent finds is whole, and made as asked."""
    return path is not None and ledger.is_whole(path) and (ledger.is_stripped(path) or not conversion.strip_history)


def hidden(task: Task, path: Path | None) -> Failure | None:
    """Return why a new file would not be used: another one, cut or not made as asked, is found before it."""
    if path is None or path.name == task.file:
        return None
    detail = f"{path} is found before {task.file}, and is cut or still has its history: remove it"
    return Failure(instance=task.instance, reference=str(task.reference), cause="hidden", detail=detail)


def fetch(
    options: argparse.Namespace, todo: Sequence[Task], work: Path, ledger: Ledger, conversion: Conversion
) -> list[Failure]:
    """Ask for the images and pull those that are there; return all that failed."""

    def locate(reference: Reference) -> Reference:
        return reference.behind(options.mirror) if options.mirror else reference

    policy = replace(REGISTRY_RETRIES, max_retries=options.retries, first_seconds=options.back_off)
    registry = Registry(Credentials.read(), policy, RateLimit(per_second=options.per_second))
    try:
        available = examine(registry, todo, locate, workers=options.workers, sample=options.sample)
        announce(available, options.workers)
        if options.check_only:
            return available.failures
        require_space(available, options.sif_dir, work, options.workers)
        task = Pull(
            directory=options.sif_dir,
            work=work,
            registry=registry,
            conversion=conversion,
            ledger=ledger,
            blobs=Blobs(work / "blobs", round(options.layer_cache_gb * 1e9)),
            locate=locate,
            manifests=available.manifests,
            progress=Progress("sif", available.num_bytes),
        )
        failures = available.failures + pull(task, available, options.workers)
    finally:
        registry.close()
    if registry.waits:
        print("sif: tried again after " + ", ".join(f"{count} x {why}" for why, count in registry.waits.items()))
    return failures


def announce(available: Available, workers: int) -> None:
    """Say what is missing and how much room is needed."""
    result, temporary = available.needed(workers)
    how = "" if available.is_exact else f", estimated from {len(available.manifests)}"
    print(
        f"sif: {len(available.tasks)} images are there upstream, {available.num_bytes / 1e9:.2f} GB to pull{how}; "
        f"room needed: {result / 1e9:.2f} GB for the files, {temporary / 1e9:.2f} GB while at work"
    )
    if available.failures:
        print(f"sif: {len(available.failures)} images cannot be had:")
        show(available.failures)


def show(failures: Sequence[Failure]) -> None:
    """Print the first failures."""
    for failure in failures[:SHOWN_FAILURES]:
        print(f"  {failure.instance}: {failure.cause}: {failure.detail}")
    if len(failures) > SHOWN_FAILURES:
        print(f"  ... and {len(failures) - SHOWN_FAILURES} more")


def summarise(directory: Path, tasks: Sequence[Task], before: Sequence[Failure], failures: Sequence[Failure]) -> int:
    """Write the list of failures and say how it ended; return the exit status."""
    here = {task.instance for task in tasks}
    path = write_failures(directory, [*(old for old in before if old.instance not in here), *failures])
    print(f"sif: {len(tasks) - len(failures)} of {len(tasks)} images are in {directory}")
    if not failures:
        return 0
    causes = ", ".join(f"{count} {cause}" for cause, count in Counter(entry.cause for entry in failures).most_common())
    print(
        f"sif: {len(failures)} failed ({causes}); {path} lists them, `--retry-failed` tries only those", file=sys.stderr
    )
    return 1


def end_on_signal(work: Path) -> None:
    """End at once on SIGINT or SIGTERM, whatever threads wait for; the temporary files go."""

    def end(number: int, _: object) -> None:
        for _ in range(MAX_REMOVALS):  # threads are still writing
            kill_descendants(deadline_seconds=KILL_SECONDS)
            shutil.rmtree(work, ignore_errors=True)
            if not work.exists():
                break
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sif.make", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sif-dir", type=Path, required=True, help="where the files go")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, nargs="+", help="files of rows")
    source.add_argument("--all", action="store_true", help="every instance of the published data sets")
    parser.add_argument("--datasets", type=Path, default=DATASETS_FILE, help="table of data sets for --all")
    parser.add_argument("--allow-moving-revision", action="store_true", help="follow a branch of a data set of --all")
    parser.add_argument("--workers", type=positive, default=DEFAULT_WORKERS, help="images at once")
    parser.add_argument("--mirror", default="", help="HOST[:PORT][/PREFIX] that is asked instead of Docker Hub")
    parser.add_argument("--tmp", type=Path, help="where to work; by default in the directory itself")
    parser.add_argument("--converter", choices=("", "apptainer", "umoci"), default="", help="default: what is there")
    parser.add_argument("--compression", choices=("gzip", "zstd", "lz4", "xz"), default="gzip", help="of the files")
    parser.add_argument("--strip-history", action="store_true", help="remove git history beyond the base commit")
    parser.add_argument("--check-only", action="store_true", help="say what is missing upstream, and pull nothing")
    parser.add_argument("--retry-failed", action="store_true", help="only the images of the list of failures")
    parser.add_argument("--sample", type=positive, default=50, help="manifests to read for the estimate of room")
    parser.add_argument("--layer-cache-gb", type=amount, default=20.0, help="layers kept for other images of this run")
    parser.add_argument("--per-second", type=amount, default=RateLimit().per_second, help="requests to one registry")
    retries, wait = REGISTRY_RETRIES.max_retries, REGISTRY_RETRIES.first_seconds
    parser.add_argument("--retries", type=positive, default=retries, help="of a request, in a row without progress")
    parser.add_argument("--back-off", type=amount, default=wait, help="seconds before the first retry; doubles")
    parser.add_argument("--timeout", type=amount, default=3600.0, help="seconds for one program of a conversion")
    return parser.parse_args(arguments)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return make(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
