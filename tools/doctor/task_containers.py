"""Whether this machine can run the containers of tasks, where one real image is started and ended, and their agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.environments.agents.coding.programs import PROGRAMS
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.containers.sif import root_offset
from recipes.environments.swe.contract import ContainerFailedError
from recipes.environments.swe.images import Listing, find_image
from recipes.errors import LaunchError
from tools.doctor.machine import is_node_of
from tools.doctor.task_images import needs_images, rows_by_instance, swe_agents, templates_of
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found

CODE = "CTR001"
NO_PROGRAM = "CTR002"


def check(draft: Draft) -> Iterator[Finding]:
    """Find agent programs that are not installed, and start an image of the rows, where agents could work here."""
    names = {str(agent.get("agent_framework")) for agent in swe_agents(draft)}
    for name in sorted(names & PROGRAMS.keys()):
        if wrong := PROGRAMS[name].missing():
            fix = f"`make swe-agent AGENT={name}`, or AGENT_PROGRAMS_DIR=... where all nodes see it"
            yield found(NO_PROGRAM, where="agent_framework", wrong=wrong, fix=fix)
    if draft.contract.is_local or is_node_of(draft.contract["SLURM_PARTITION"]):
        yield from start_one(images_of_rows(draft))


def images_of_rows(draft: Draft) -> Iterator[Path]:
    """Yield the images of the launch's rows; none for a launch whose agents work in no container."""
    directory = draft.path("SIF_DIR")
    if not needs_images(draft) or directory is None or not directory.is_dir():
        return
    templates, listing = templates_of(draft, directory), Listing()
    for instance in rows_by_instance(draft):
        if (image := find_image(instance, templates, listing)) is not None and is_whole(image):
            yield image


def start_one(images: Iterable[Path]) -> Iterator[Finding]:
    """Start the first of some whole images."""
    image = next(iter(images), None)
    if image is None:
        return
    try:
        asyncio.run(check_runtime(runtime_of_machine(), str(image)))
    except LaunchError as error:
        yield from as_findings(CODE, error.problems)


def is_whole(image: Path) -> bool:
    """Return whether a file is an image; one that is none is reported elsewhere."""
    try:
        return image.is_dir() or root_offset(image) >= 0
    except ContainerFailedError:
        return False
