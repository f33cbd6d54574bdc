"""Check the SIF files of the rows: `make sif-check SIF_DIR=... [BLEND=swe2 | ROWS=file] [ARGS=--golden]`.

    python -m tools.sif.check --sif-dir DIR --rows FILE... [--golden] [--out data/swe2-good]

Each image must run, hold its repository at the right commit, and have what runs the tests. With --golden the tests
must fail with an empty patch and pass with the right one. DIR/checked.jsonl says what was found, DIR/good_instances.txt
lists the good ones, and the same command checks only the others again; --out writes the rows of the good instances,
byte by byte, as row files to train on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from recipes.files import write_atomically
from tools.command_line import amount, exit_status, positive
from tools.files.locks import only_one
from tools.files.progress import duration
from tools.sif.good_rows import require_place, write_good_rows
from tools.sif.ledger import Ledger
from tools.sif.names import GOOD_INSTANCES, Listing
from tools.sif.process import MAX_SHOWN
from tools.sif.registry import PullError
from tools.sif.run import Box, run_in
from tools.sif.tests import ENTER, command_of, expected_tests, is_solved, results, runner_of, wrong_tests
from tools.sif.wanted import Task, tasks_of_rows

CHECKED = "checked.jsonl"
MAX_COMMITS = 1  # of the image's own on top of the base commit: SWE-bench commits its set-up
GIT = "git -c safe.directory='*'"
APPLY = "apply --verbose --whitespace=nowarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found of one image."""

    instance: str
    file: str
    bytes: int
    subject: str  # digest of row and file
    golden: bool  # with the tests
    cause: str  # empty for a good one
    detail: str = ""


def check(task: Task, path: Path | None, ledger: Ledger, box: Box, *, golden: bool) -> Checked:
    """Check the image of one task."""
    cause = detail = ""
    try:
        if path is None:
            raise PullError("missing", f"no file under any name of {task.file}")
        if not ledger.is_whole(path):
            raise PullError("cut", "no whole SIF file")
        check_content(task, path, box)
        if golden:
            check_patches(task, path, box)
    except PullError as error:
        cause, detail = error.cause, error.detail
    file, size = (path.name, path.stat().st_size) if path else (task.file, 0)
    subject = subject_of(task, path, ledger)
    return Checked(
        instance=task.instance, file=file, bytes=size, subject=subject, golden=golden, cause=cause, detail=detail
    )


def subject_of(task: Task, path: Path | None, ledger: Ledger) -> str:
    """Return a digest of what is checked: the row's facts, and the file as far as the ledger knows it."""
    made = ledger.entry_of(path) if path else None
    file = [path.name, path.stat().st_size, made.sha256 if made else ""] if path else []
    return hashlib.sha256(json.dumps([dict(task.facts), *file], sort_keys=True).encode()).hexdigest()


def check_all(options: argparse.Namespace, tasks: Sequence[Task], box: Box) -> list[Checked]:
    """Check every image that an earlier run did not find good; each result is written when it is known.

    One that was checked with its tests before is again: a bad one does not become good by being checked less.
    """
    directory: Path = options.sif_dir
    listing, ledger = Listing(), Ledger(directory)
    paths = {task.instance: task.existing(directory, listing) for task in tasks}
    known = {entry.instance: entry for entry in read_checked(directory / CHECKED)}
    golden = {name for name in paths if options.golden or (name in known and known[name].golden)}
    done = []
    for task in () if options.again else tasks:
        entry, subject = known.get(task.instance), subject_of(task, paths[task.instance], ledger)
        if entry and not entry.cause and entry.subject == subject and entry.golden == (task.instance in golden):
            done.append(entry)
    here = {entry.instance for entry in done}
    left = [task for task in tasks if task.instance not in here]
    print(f"sif-check: {len(tasks)} images, {len(done)} were found good before, {len(left)} to check")
    start = time.monotonic()
    with ThreadPoolExecutor(options.workers) as threads, (directory / CHECKED).open("a", encoding="utf-8") as file:
        futures = [
            threads.submit(check, task, paths[task.instance], ledger, box, golden=task.instance in golden)
            for task in left
        ]
        for number, future in enumerate(as_completed(futures), start=1):
            entry = future.result()
            done.append(entry)
            file.write(f"\n{json.dumps(asdict(entry), sort_keys=True)}\n")  # a line that a kill has cut stays alone
            file.flush()
            seconds = (time.monotonic() - start) / number * (len(left) - number)
            said = f"{entry.cause}: {entry.detail}" if entry.cause else "good"
            print(f"sif-check: {number} of {len(left)}, {duration(seconds)} left: {entry.instance}: {said}", flush=True)
    return done


def read_checked(path: Path) -> Iterator[Checked]:
    """Yield what earlier runs found, the last of an instance last."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):  # cut by a kill
            yield Checked(**json.loads(line))


def check_content(task: Task, path: Path, box: Box) -> None:
    """Raise `PullError` unless the image runs, with the right commit and what runs the tests."""
    run_in(box, path, ["/bin/sh", "-c", "true"])
    base = str(task.facts.get("base_commit") or "")
    if not base:
        raise PullError("commit", "the row names no base commit")
    ask = f"cd /testbed && {GIT} rev-parse HEAD && {GIT} rev-list --count {shlex.quote(base)}..HEAD"
    ask += f" && {GIT} merge-base --is-ancestor {shlex.quote(base)} HEAD"
    try:
        head, commits = run_in(box, path, ["/bin/sh", "-c", ask]).split()
    except PullError as error:
        raise PullError("commit", f"/testbed does not hold {base[:12]}: {error.detail}") from error
    if int(commits) > MAX_COMMITS:
        raise PullError("commit", f"HEAD {head[:12]} is {commits} commits beyond {base[:12]}")
    runner = runner_of(task)
    try:
        run_in(box, path, ["/bin/sh", "-c", f"{{ {ENTER}; }} && {runner.present}"])
    except PullError as error:
        raise PullError("runner", f"no {runner.name}: {error.detail}") from error


def check_patches(task: Task, path: Path, box: Box) -> None:
    """Raise `PullError` unless the tests fail with an empty patch and pass with the right one."""
    facts = task.facts
    patch = str(facts.get("golden_patch") or facts.get("patch") or "")
    try:
        expected = expected_tests(task)
    except (ValueError, AttributeError) as error:
        raise PullError("row", str(error)) from error
    if not patch.strip():
        raise PullError("row", "no golden patch")
    if is_solved(expected, run_tests(task, path, box, "")):
        raise PullError("empty", "the tests pass without any change")
    found = run_tests(task, path, box, patch)
    if wrong := wrong_tests(expected, found):
        raise PullError("golden", f"{len(wrong)} of {len(expected)} tests fail with the golden patch, as {wrong[0]}")


def run_tests(task: Task, path: Path, box: Box, patch: str) -> dict[str, bool]:
    """Return test -> passed with a patch and the task's own tests applied."""
    with tempfile.TemporaryDirectory(prefix="sif-patch-") as place:
        lines = [ENTER]
        for name, text in (("solution.patch", patch), ("tests.patch", str(task.facts.get("test_patch") or ""))):
            if text.strip():
                (Path(place) / name).write_text(text if text.endswith("\n") else f"{text}\n")
                lines.append(f"{GIT} {APPLY} /inputs/{name} || exit 9")
        lines.append(f"{{ {command_of(task)}; }} 2>&1 || true")
        output = run_in(box, path, ["/bin/sh", "-c", "\n".join(lines)], inputs=Path(place))
    found = results(runner_of(task), output)
    if not found:
        raise PullError("tests", f"no result of any test: {' '.join(output[-MAX_SHOWN:].split())}")
    return found


def report(directory: Path, found: Sequence[Checked]) -> int:
    """Write the lists and say what is wrong; return the exit status."""
    known = {entry.instance: entry for entry in [*read_checked(directory / CHECKED), *found]}
    lines = [json.dumps(asdict(known[name]), sort_keys=True) for name in sorted(known)]
    write_atomically(directory / CHECKED, "".join(f"{line}\n" for line in lines).encode())
    good = sorted(name for name, entry in known.items() if not entry.cause)
    write_atomically(directory / GOOD_INSTANCES, "".join(f"{name}\n" for name in good).encode())
    bad = [entry for entry in found if entry.cause]
    causes = ", ".join(f"{count} {cause}" for cause, count in Counter(entry.cause for entry in bad).most_common())
    print(f"sif-check: {len(found) - len(bad)} of {len(found)} images are good{f' (others: {causes})' if bad else ''}")
    return 1 if bad else 0


def box_of(options: argparse.Namespace) -> Box:
    """Return how commands are run in images; raises `LaunchError` with every program that is missing."""
    apptainer = (options.runner or ("apptainer" if shutil.which("apptainer") else "")) == "apptainer"
    box = Box(apptainer=apptainer, network=options.network, seconds=options.timeout)
    fix = "install it (Debian: siftool util-linux mount bubblewrap), or apptainer"
    if missing := box.missing_tools:
        raise LaunchError([Problem(where=tool, got="not on PATH", expected="it", fix=fix) for tool in missing])
    return box


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.sif.check", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sif-dir", type=Path, required=True, help="where the files are")
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="files of rows")
    parser.add_argument("--golden", action="store_true", help="run the tests with an empty and with the right patch")
    parser.add_argument("--again", action="store_true", help="also those that were found good before")
    parser.add_argument("--out", type=Path, help="directory for row files with only the good instances")
    parser.add_argument("--runner", choices=("", "apptainer", "bwrap"), default="", help="default: what is there")
    parser.add_argument("--network", action="store_true", help="let tests use the network (without Apptainer)")
    parser.add_argument("--workers", type=positive, default=2, help="images at once")
    parser.add_argument("--timeout", type=amount, default=Box(apptainer=False).seconds, help="seconds of one command")
    options = parser.parse_args(arguments)
    box = box_of(options)
    if not options.sif_dir.is_dir():
        fix = "make the images first: `make sif SIF_DIR=...`"
        raise LaunchError(Problem(where="SIF_DIR", got=str(options.sif_dir), expected="a directory", fix=fix))
    tasks = tasks_of_rows(options.rows)
    if options.out:
        require_place(options.rows, options.out)
    with only_one(options.sif_dir / ".check.lock"):
        found = check_all(options, tasks, box)
        status = report(options.sif_dir, found)
        if options.out:
            good = {entry.instance for entry in found if not entry.cause}
            write_good_rows(options.rows, good, options.out, good_list=options.sif_dir / GOOD_INSTANCES)
    return status


if __name__ == "__main__":
    sys.exit(main())
