"""Whether this machine can run the containers of tasks: one real image is started, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.containers.sif import root_offset
from recipes.environments.swe.contract import ContainerFailedError
from recipes.environments.swe.images import Listing, find_image
from recipes.errors import LaunchError
from tools.doctor.machine import is_node_of
from tools.doctor.task_images import needs_images, rows_by_instance, templates_of
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings

CODE = "CTR001"


def check(draft: Draft) -> Iterator[Finding]:
    """Start an image of the launch's rows, where its agents could work on this machine."""
    directory = draft.path("SIF_DIR")
    if not needs_images(draft) or directory is None or not directory.is_dir():
        return
    if draft.contract.is_local or is_node_of(draft.contract["SLURM_PARTITION"]):
        templates, listing = templates_of(draft, directory), Listing()
        images = (find_image(instance, templates, listing) for instance in rows_by_instance(draft))
        yield from start_one(image for image in images if image is not None)


def start_one(images: Iterable[Path]) -> Iterator[Finding]:
    """Start the first image that is one; those that are not are reported elsewhere."""
    image = next((image for image in images if _is_whole(image)), None)
    if image is None:
        return
    try:
        asyncio.run(check_runtime(runtime_of_machine(), str(image)))
    except LaunchError as error:
        yield from as_findings(CODE, error.problems)


def _is_whole(image: Path) -> bool:
    try:
        return image.is_dir() or root_offset(image) >= 0
    except ContainerFailedError:
        return False
