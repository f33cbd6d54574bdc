"""The inventory of a SIF directory: one JSON line per file that was built, and the list of failures.

The disk holds the content of a file and its line before the file takes its name, so that a power cut leaves no file of
the right size with wrong content. A file without a line, or with another size than its line says, was
made by another program, or its run was killed in between.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import DataError, Problem
from recipes.files import sync_files, write_atomically
from tools.images.files import read_image

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
