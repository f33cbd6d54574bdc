"""The inventory of a SIF directory: one JSON line per file that was built, and the list of failures.

The disk holds the content of a file and its line before the file takes its name, so that a power cut leaves no file of
the right size with wrong content. A file without a line, or with another size than its line says, was
made by another program, or its run was killed in between.

The instances that rows name, and the list of those whose images are good.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.swe.containers.sif import root_offset
from recipes.environments.swe.contract import ContainerFailedError
from recipes.environments.swe.images import TEMPLATES, Listing, find_image
from recipes.errors import DataError, Problem
from recipes.files import sync_files, write_atomically
from tools.draft.launch import Launch
from tools.images.lock import read_image

GOOD_INSTANCES = "good_instances.txt"  # in SIF_DIR: what `make sif-check` found to be good, one id per line


def instance_of(line: bytes) -> str | None:
    """Return the instance id of a row, None where there is none."""
    try:
        metadata: Any = orjson.loads(line)["responses_create_params"].get("metadata")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the check of the data names it
    name = metadata.get("instance_id") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def images_of_rows(launch: Launch) -> Iterator[Path]:
    """Yield the images of the launch's rows; none for a launch whose agents work in no container."""
    directory = launch.path("SIF_DIR")
    if not launch.needs_task_images or directory is None or not directory.is_dir():
        return
    templates, listing = templates_of(launch, directory), Listing()
    for instance in rows_by_instance(launch):
        if (image := find_image(instance, templates, listing)) is not None and is_whole(image):
            yield image


def is_whole(image: Path) -> bool:
    """Return whether a file is an image; one that is none is reported elsewhere."""
    try:
        return image.is_dir() or root_offset(image) >= 0
    except ContainerFailedError:
        return False


def rows_by_instance(launch: Launch) -> Counter[str]:
    """Count the rows of each instance in both files."""
    return Counter(name for line in lines_of(launch) if (name := instance_of(line)))


def lines_of(launch: Launch) -> Iterator[bytes]:
    """Yield the lines of both files of rows."""
    for path in (launch.path("TRAIN_PATH"), launch.path("VAL_PATH")):
        if path is not None and path.is_file():
            with path.open("rb") as lines:
                yield from lines


def templates_of(launch: Launch, directory: Path) -> list[str]:
    """Return the names of images: those of CONTAINER_FORMATTER, one or a JSON list, else of the agents, else all known.

    A relative one lies in the directory.
    """
    formatter = launch.contract["CONTAINER_FORMATTER"]
    texts: list[str] = json.loads(formatter) if formatter.startswith("[") else [formatter] if formatter else []
    for settings in () if texts else launch.swe_agents:
        chosen = settings.get("container_formatter") or []
        texts += [chosen] if isinstance(chosen, str) else chosen
    return [str(directory / text) for text in dict.fromkeys(texts or TEMPLATES)]


INVENTORY, FAILED = "inventory.jsonl", "images.failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SifFile:
    """One SIF file that was built, and from what."""

    file: str
    instance: str
    reference: str
    digest: str  # of the manifest
    bytes: int
    sha256: str
    tool: str
    stripped: bool  # whether the history beyond the base commit was removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One instance whose image could not be built, and why."""

    instance: str
    reference: str
    cause: str
    detail: str


class Inventory:
    """The files that were built in one directory; may be used by many threads."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self.files = {entry.file: entry for entry in _read(directory / INVENTORY)}

    def add(self, entry: SifFile) -> None:
        """Append a line, and wait until the disk holds it; one before it that was cut stays a line of its own."""
        path = self._directory / INVENTORY
        with self._lock:
            with path.open("ab+") as file:
                size = file.seek(0, 2)
                if size:
                    file.seek(size - 1)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(json.dumps(asdict(entry), sort_keys=True).encode() + b"\n")
            sync_files([path])
            self.files[entry.file] = entry

    def is_whole(self, path: Path) -> bool:
        """Whether a file is complete: as the inventory has it, or, for a file of another program, by its header."""
        if not path.is_file():
            return False
        if self.entry_of(path):
            return True
        image = read_image(path)
        return image.kind == "SIF" and not image.is_cut

    def is_stripped(self, path: Path) -> bool:
        """Whether the history was removed from a file."""
        entry = self.entry_of(path)
        return entry is not None and entry.stripped

    def entry_of(self, path: Path) -> SifFile | None:
        """Return the entry of a file; None where the file has another size, so is another one."""
        entry = self.files.get(path.name)
        return entry if entry and path.is_file() and entry.bytes == path.stat().st_size else None


def _read(path: Path) -> Iterable[SifFile]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield SifFile(**json.loads(line))
        except (ValueError, TypeError):  # cut by a kill or a full disk
            continue


def read_failures(directory: Path) -> list[Failure]:
    """Return the failures of the last run; raises `DataError` for a file that is not such a list."""
    path = directory / FAILED
    try:
        return [Failure(**json.loads(line)) for line in path.read_bytes().splitlines()] if path.is_file() else []
    except (ValueError, TypeError) as error:
        wrong = f"not a list that `make sif` wrote ({type(error).__name__}: {error})"
        problem = Problem(where=str(path), wrong=wrong, fix="remove it; the next run writes it again")
        raise DataError(problem) from error


def write_failures(directory: Path, failures: Iterable[Failure]) -> Path | None:
    """Write the list and return its path; where nothing failed remove the old list and return None."""
    path = directory / FAILED
    lines = [json.dumps(asdict(failure), sort_keys=True) for failure in failures]
    if not lines:
        path.unlink(missing_ok=True)
        return None
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path
