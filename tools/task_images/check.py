"""Check the SIF files of the rows: `make sif-check SIF_DIR=... [BLEND=swe2 | ROWS=file] [ARGS=--golden]`.

    python -m tools.task_images.check --sif-dir DIR --rows FILE... [--golden] [--out data/swe2-good]

Each image must run, hold its repository at the right commit, and have its test framework. With --golden the tests must
fail with an empty patch and pass with the right one, run by the code that judges agents' patches. DIR/checked.jsonl
holds the results, DIR/good_instances.txt the good instances; the same command checks only the others again. --out
writes row files with the good instances only.

Copy the rows to train on: those of instances whose images are good, and those that need no image.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recipes.environments.swe.containers.runtime import RUNTIMES, missing_programs
from recipes.environments.swe.contract import ContainerLimits, Runtime, SweTask
from recipes.environments.swe.evaluation import TestRun, evaluate_gold
from recipes.environments.swe.hidden_tests import ENTER, framework_of
from recipes.environments.swe.images import Listing
from recipes.environments.swe.task import parse_task
from recipes.errors import DataError, LaunchError, Problem
from recipes.files import write_atomically
from tools.command_line import amount, exit_status, positive
from tools.data.files.manifest import TOOL_VERSION, changes, describe, lineage_of, write_manifest
from tools.data.files.row_blocks import HashedWriter
from tools.locks import only_one
from tools.progress import duration
from tools.task_images.instances import Instance, instances_of_rows
from tools.task_images.inventory import GOOD_INSTANCES, Inventory, instance_of
from tools.task_images.registry.references import ImageError, trusted_registries
from tools.task_images.run import ImageRunner, run_in

MANIFEST = "manifest.json"


def require_place(rows: Sequence[Path], out: Path) -> None:
    """Raise `DataError` where a copy would overwrite a row file or another copy."""
    if same := [path for path in rows if path.resolve().parent == out.resolve()]:
        wrong = f"the copies would overwrite the rows in the directory of {same[0]}"
        raise DataError(Problem(where="--out", wrong=wrong, fix="name another directory"))
    names = [path.name for path in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        problem = Problem(
            where="--rows",
            got=f"{twice[0]} twice",
            expected="files of different names",
            fix="run it once for each file",
        )
        raise DataError(problem)


def write_good_rows(rows: Sequence[Path], good: set[str], out: Path, *, good_list: Path) -> None:
    """Copy the row files without the rows of other instances, byte by byte, and write a manifest.

    Copies that are up to date stay.

    `good_list` is the list of all good instances; `good` are those of these rows.
    """
    inputs: list[dict[str, Any]] = [describe(good_list)]
    for path in rows:
        origin = lineage_of(path.with_name(MANIFEST))
        inputs.append(describe(path, **({"made_by": origin} if origin else {})))
    known = {"tool": "sif-check", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": {}}
    if not (reasons := changes(out / MANIFEST, known)):
        print(f"sif-check: {out} is up to date")
        return
    outputs, counts = [], {}
    for path in rows:
        kept = dropped = 0
        with path.open("rb") as lines, HashedWriter.open(out / path.name) as file:
            for line in lines:
                instance = instance_of(line)
                if instance is None or instance in good:
                    file.write(line)
                    kept += 1
                else:
                    dropped += 1
        outputs.append(file.as_output(out / path.name, rows=kept))
        counts[path.name] = {"rows": kept, "left_out": dropped}
        print(f"sif-check: {out / path.name} ({', '.join(reasons)}): {kept} rows, {dropped} left out")
    write_manifest(out / MANIFEST, {**known, "counts": counts, "outputs": outputs})


CHECKED = "checked.jsonl"
MAX_COMMITS = 1  # on top of the base commit: SWE-bench images commit their set-up
GIT = "git -c safe.directory='*'"
MEMORY_MIB = 32_768  # of the containers of the tests, as in training by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """How images are checked."""

    container: ImageRunner
    runtime: Callable[[], Runtime]  # of the containers of the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result for one image."""

    instance: str
    file: str
    bytes: int
    subject: str  # sha256 of the row's facts and the file
    golden: bool  # whether the tests were run
    cause: str  # empty for a good image
    detail: str = ""


def check(instance: Instance, path: Path | None, inventory: Inventory, checks: Checks, *, golden: bool) -> CheckResult:
    """Check the image of one instance."""
    cause = detail = ""
    try:
        if path is None:
            raise ImageError("missing", f"there is no file {instance.file}, nor under another name that agents try")
        if not inventory.is_whole(path):
            raise ImageError("cut", "the SIF file is incomplete")
        check_content(instance, path, checks.container)
        if golden:
            check_patches(instance, path, checks)
    except ImageError as error:
        cause, detail = error.cause, error.detail
    file, size = (path.name, path.stat().st_size) if path else (instance.file, 0)
    subject = subject_of(instance, path, inventory)
    return CheckResult(
        instance=instance.id, file=file, bytes=size, subject=subject, golden=golden, cause=cause, detail=detail
    )


def subject_of(instance: Instance, path: Path | None, inventory: Inventory) -> str:
    """Return a digest of what is checked: the row's facts, and the file's name, size and recorded hash."""
    made = inventory.entry_of(path) if path else None
    file = [path.name, path.stat().st_size, made.sha256 if made else ""] if path else []
    return hashlib.sha256(json.dumps([dict(instance.facts), *file], sort_keys=True).encode()).hexdigest()


def check_all(options: argparse.Namespace, instances: Sequence[Instance], checks: Checks) -> list[CheckResult]:
    """Check every image that no earlier run found good, and append each result at once.

    An image that was checked with its tests before is checked with them again, also without --golden: a bad image must
    not become good because less is checked.
    """
    directory: Path = options.sif_dir
    listing, inventory = Listing(), Inventory(directory)
    paths = {instance.id: instance.existing(directory, listing) for instance in instances}
    known = {entry.instance: entry for entry in read_checked(directory / CHECKED)}
    golden = {name for name in paths if options.golden or (name in known and known[name].golden)}
    done = []
    for instance in () if options.again else instances:
        entry, subject = known.get(instance.id), subject_of(instance, paths[instance.id], inventory)
        if entry and not entry.cause and entry.subject == subject and entry.golden == (instance.id in golden):
            done.append(entry)
    here = {entry.instance for entry in done}
    left = [instance for instance in instances if instance.id not in here]
    print(f"sif-check: {len(instances)} images, {len(done)} were found good before, {len(left)} to check")
    start = time.monotonic()
    with ThreadPoolExecutor(options.workers) as threads, (directory / CHECKED).open("a", encoding="utf-8") as file:
        futures = [
            threads.submit(check, instance, paths[instance.id], inventory, checks, golden=instance.id in golden)
            for instance in left
        ]
        for number, future in enumerate(as_completed(futures), start=1):
            entry = future.result()
            done.append(entry)
            file.write(f"\n{json.dumps(asdict(entry), sort_keys=True)}\n")  # after a line that a kill cut, too
            file.flush()
            seconds = (time.monotonic() - start) / number * (len(left) - number)
            result = f"{entry.cause}: {entry.detail}" if entry.cause else "good"
            print(
                f"sif-check: {number} of {len(left)}, {duration(seconds)} left: {entry.instance}: {result}", flush=True
            )
    return done


def read_checked(path: Path) -> Iterator[CheckResult]:
    """Yield the results of earlier runs, oldest first."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):  # cut by a kill
            yield CheckResult(**json.loads(line))


def check_content(instance: Instance, path: Path, container: ImageRunner) -> None:
    """Raise `ImageError` unless the image runs, holds the base commit, and has the test framework."""
    run_in(container, path, ["/bin/sh", "-c", "true"])
    base = str(instance.facts.get("base_commit") or "")
    if not base:
        raise ImageError("commit", "the row names no base commit")
    ask = f"cd /testbed && {GIT} rev-parse HEAD && {GIT} rev-list --count {shlex.quote(base)}..HEAD"
    ask += f" && {GIT} merge-base --is-ancestor {shlex.quote(base)} HEAD"
    try:
        head, commits = run_in(container, path, ["/bin/sh", "-c", ask]).split()
    except ImageError as error:
        raise ImageError("commit", f"/testbed does not hold {base[:12]}: {error.detail}") from error
    if int(commits) > MAX_COMMITS:
        raise ImageError("commit", f"HEAD {head[:12]} is {commits} commits beyond {base[:12]}")
    framework = framework_of(instance.facts)
    try:
        run_in(container, path, ["/bin/sh", "-c", f"{{ {ENTER}; }} && {framework.present}"])
    except ImageError as error:
        raise ImageError("framework", f"{framework.name} is missing: {error.detail}") from error


def check_patches(instance: Instance, path: Path, checks: Checks) -> None:
    """Raise `ImageError` unless the tests fail without a patch and pass with the right one, as they run in training."""
    try:
        task = replace(parse_task(instance.facts), image=str(path))  # they hold the row
    except ValueError as error:
        raise ImageError("row", str(error)) from error
    if not task.gold_patch.strip():
        raise ImageError("row", "the row holds no golden patch")
    limits = ContainerLimits(memory_mib=MEMORY_MIB)
    tests = TestRun(runtime=checks.runtime(), limits=limits, seconds=checks.container.seconds)
    asyncio.run(_check_tests(tests, task))


async def _check_tests(tests: TestRun, task: SweTask) -> None:
    before = await tests.without_patch(task)
    if before.failed:
        raise ImageError("run", before.failed)
    if before.resolved:
        raise ImageError("empty", "the tests pass without any change")
    after = await evaluate_gold(tests, task)
    if after.failed:
        raise ImageError("run", after.failed)
    if not after.resolved:
        raise ImageError("golden", f"with the golden patch: {after.reason}")


def report(directory: Path, found: Sequence[CheckResult]) -> int:
    """Write both lists and print a summary; return the exit status."""
    known = {entry.instance: entry for entry in [*read_checked(directory / CHECKED), *found]}
    lines = [json.dumps(asdict(known[name]), sort_keys=True) for name in sorted(known)]
    write_atomically(directory / CHECKED, "".join(f"{line}\n" for line in lines).encode())
    good = sorted(name for name, entry in known.items() if not entry.cause)
    write_atomically(directory / GOOD_INSTANCES, "".join(f"{name}\n" for name in good).encode())
    bad = [entry for entry in found if entry.cause]
    causes = ", ".join(f"{count} {cause}" for cause, count in Counter(entry.cause for entry in bad).most_common())
    print(f"sif-check: {len(found) - len(bad)} of {len(found)} images are good{f' (others: {causes})' if bad else ''}")
    return 1 if bad else 0


def checks_of(options: argparse.Namespace) -> Checks:
    """Return how images are checked; raises `LaunchError` with every missing program."""
    name = options.runner or ("apptainer" if shutil.which("apptainer") else "bwrap")
    container = ImageRunner(apptainer=name == "apptainer", seconds=options.timeout)
    programs, runtime = RUNTIMES[name]
    fix = "install it (Debian: siftool squashfuse util-linux mount bubblewrap), or apptainer"
    if missing := sorted({*container.missing_tools, *missing_programs(programs)}):
        raise LaunchError([Problem(where=tool, wrong="not on PATH", fix=fix) for tool in missing])
    return Checks(container=container, runtime=runtime)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.task_images.check", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--sif-dir", type=Path, required=True, help="directory of the SIF files")
    add("--rows", type=Path, nargs="+", required=True, help="row files")
    add("--golden", action="store_true", help="run the tests with an empty and with the right patch")
    add("--again", action="store_true", help="check also the images that were good before")
    add("--out", type=Path, help="directory for row files with the good instances only")
    add("--runner", choices=("", "apptainer", "bwrap"), default="", help="default: apptainer where it is installed")
    add("--workers", type=positive, default=2, help="images checked at once")
    add(
        "--timeout", type=amount, default=ImageRunner(apptainer=False).seconds, help="seconds that one command may take"
    )
    options = parser.parse_args(arguments)
    checks = checks_of(options)
    if not options.sif_dir.is_dir():
        fix = "build the images first: `make sif SIF_DIR=...`"
        raise LaunchError(Problem(where="SIF_DIR", got=str(options.sif_dir), expected="a directory", fix=fix))
    instances = instances_of_rows(options.rows, trusted_registries(os.environ))
    if options.out:
        require_place(options.rows, options.out)
    with only_one(options.sif_dir / ".check.lock"):
        found = check_all(options, instances, checks)
        status = report(options.sif_dir, found)
        if options.out:
            good = {entry.instance for entry in found if not entry.cause}
            write_good_rows(options.rows, good, options.out, good_list=options.sif_dir / GOOD_INSTANCES)
    return status


if __name__ == "__main__":
    sys.exit(main())
