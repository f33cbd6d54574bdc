"""The image of every SWE task: a SIF file under SIF_DIR for each row that an agent works on in a container.

Whether this machine can run the containers of tasks, where one real image is started and ended, and their agents.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from recipes.environments.agents.coding.programs import PROGRAMS
from recipes.environments.contract.rows import shown
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.hidden_tests import deciding_calls
from recipes.environments.swe.images import Listing, find_image
from recipes.environments.swe.task import facts_of
from recipes.errors import LaunchError
from tools.doctor.machine import is_node_of
from tools.draft.findings import Finding, as_findings, found
from tools.draft.launch import Launch
from tools.images.lock import read_image
from tools.task_images.inventory import GOOD_INSTANCES, images_of_rows, lines_of, rows_by_instance, templates_of

CODE = "CTR001"
NO_PROGRAM = "CTR002"


def check_programs(launch: Launch) -> Iterator[Finding]:
    """Find agent programs that are not installed, and start an image of the rows, where agents could work here."""
    names = {str(agent.get("agent_framework")) for agent in launch.swe_agents}
    for name in sorted(names & PROGRAMS.keys()):
        if wrong := PROGRAMS[name].missing():
            fix = f"`make swe-agent AGENT={name}`, or AGENT_PROGRAMS_DIR=... where all nodes see it"
            yield found(NO_PROGRAM, where="agent_framework", wrong=wrong, fix=fix)
    if launch.contract.is_local or is_node_of(launch.contract["SLURM_PARTITION"]):
        yield from start_one(images_of_rows(launch))


def start_one(images: Iterable[Path]) -> Iterator[Finding]:
    """Start the first of some whole images."""
    image = next(iter(images), None)
    if image is None:
        return
    try:
        asyncio.run(check_runtime(runtime_of_machine(), str(image)))
    except LaunchError as error:
        yield from as_findings(CODE, error.problems)


MAX_LISTED = 5
GET = "fetch the images of the rows, or remove those rows"


def check(launch: Launch) -> Iterator[Finding]:
    """Check that every row which needs an image has one."""
    if not launch.needs_task_images:
        return
    yield from believed_commands(launch)
    wanted = rows_by_instance(launch)
    directory = launch.path("SIF_DIR")
    if directory is None or not directory.is_dir():
        needed = f"each of the {len(wanted)} instances of the data" if wanted else "each instance of a repository"
        needed += " needs a task image"
        wrong = f"not set: {needed}" if directory is None else f"no directory {directory}: {needed}"
        yield found("SIF001", where="SIF_DIR", wrong=wrong, fix="export SIF_DIR=..., the directory of task images")
        return
    templates = templates_of(launch, directory)
    listing = Listing()
    images = {instance: find_image(instance, templates, listing) for instance in wanted}
    missing = [instance for instance, image in images.items() if image is None]
    if missing:
        rows = sum(wanted[instance] for instance in missing)
        names = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        wrong = f"no image of {len(missing)} of {len(wanted)} instances ({rows} rows): {names}"
        yield found("SIF002", where=f"SIF_DIR={directory}", wrong=wrong, fix=GET)
    yield from bad_files([image for image in images.values() if image is not None])
    yield from not_good(directory, wanted)


def believed_commands(launch: Launch) -> Iterator[Finding]:
    """Name the commands of tests whose output or status is believed as it is."""
    commands = Counter(command for line in lines_of(launch) if b"test_cmd" in line and (command := _believed(line)))
    if commands:
        wrong = f"the output or status of {len(commands)} commands ({commands.total()} rows) is believed as it is, "
        wrong += f"such as: {shown(commands.most_common(1)[0][0])}"
        fix = "make it one line of simple commands that ends with a call of pytest or unittest, or accept that a patch"
        fix += " which prints results, or ends the command early, may count as a solution"
        yield found("SIF005", where="test_cmd", wrong=wrong, fix=fix)


def _believed(line: bytes) -> str:
    try:
        facts = facts_of(orjson.loads(line))
        return "" if deciding_calls(facts) else str(facts.get("test_cmd") or "")
    except (ValueError, TypeError, AttributeError):
        return ""  # the check of the data names it


def not_good(directory: Path, wanted: Mapping[str, int]) -> Iterator[Finding]:
    """Name the rows whose instances a check of the images did not find good: their reward may say nothing."""
    path = directory / GOOD_INSTANCES
    good = set(path.read_text(encoding="utf-8").split("\n")) if path.is_file() else wanted.keys()
    if others := [instance for instance in wanted if instance not in good]:
        wrong = f"{len(others)} of {len(wanted)} instances ({sum(wanted[name] for name in others)} rows) are not in it"
        fix = "train on the rows that `make sif-check` writes (data/BLEND-good), or check the images of these rows, too"
        yield found("SIF004", where=str(path), wrong=wrong, fix=fix)


def bad_files(images: Sequence[Path]) -> Iterator[Finding]:
    """Name the images that are no SIF file, or cut."""
    bad = []
    for image in sorted(set(images)):
        if image.is_dir():  # a root file system; runtimes take these, too
            continue
        file = read_image(image)
        if file.kind != "SIF":
            bad.append((image, "this is not a SIF file"))
        elif file.is_cut:
            bad.append((image, f"the file is cut: {file.size} bytes of {file.declared}"))
    for image, wrong in bad[:MAX_LISTED]:
        yield found("SIF003", where=str(image), wrong=wrong, fix="remove it and fetch it again")
    if len(bad) > MAX_LISTED:
        where, wrong = str(bad[0][0].parent), f"{len(bad) - MAX_LISTED} more files are cut or not SIF files"
        yield found("SIF003", where=where, wrong=wrong, fix="remove them and fetch them again")
