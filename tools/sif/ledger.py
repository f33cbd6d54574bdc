"""What is known of the SIF files in a directory: one JSON line per file that was made, and the list of failures.

A line is written before the file takes its name, so a file with a wrong size or without a line was made by others or
by an earlier run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import DataError, Problem
from recipes.files import write_atomically
from tools.images.files import read_image

LEDGER, FAILED = "ledger.jsonl", "images.failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One SIF file and where it is from."""

    file: str
    instance: str
    reference: str
    digest: str  # of the manifest
    bytes: int
    sha256: str
    tool: str
    stripped: bool  # of the history beyond the base commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One instance without an image."""

    instance: str
    reference: str
    cause: str
    detail: str


class Ledger:
    """The ledger of one directory; may be used by many threads."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self.made = {entry.file: entry for entry in _read(directory / LEDGER)}

    def add(self, entry: Made) -> None:
        """Append a line; a line that a kill or a full disk has cut before it stays alone."""
        path = self._directory / LEDGER
        with self._lock, path.open("ab+") as file:
            size = file.seek(0, 2)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(asdict(entry), sort_keys=True).encode() + b"\n")
            file.flush()
            self.made[entry.file] = entry

    def is_whole(self, path: Path) -> bool:
        """Return whether a file is the one that was made; one that others made must be a whole SIF file."""
        if not path.is_file():
            return False
        if self.entry_of(path):
            return True
        image = read_image(path)
        return image.kind == "SIF" and not image.is_cut

    def is_stripped(self, path: Path) -> bool:
        """Return whether the history was taken out of a file."""
        entry = self.entry_of(path)
        return entry is not None and entry.stripped

    def entry_of(self, path: Path) -> Made | None:
        """Return the line of a file, unless there is another file under its name."""
        entry = self.made.get(path.name)
        return entry if entry and path.is_file() and entry.bytes == path.stat().st_size else None


def _read(path: Path) -> Iterable[Made]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield Made(**json.loads(line))
        except (ValueError, TypeError):  # cut by a kill, or by a full disk
            continue


def read_failures(directory: Path) -> list[Failure]:
    """Return the failures of the last run; raises `DataError` for a list that no run has written."""
    path = directory / FAILED
    try:
        return [Failure(**json.loads(line)) for line in path.read_bytes().splitlines()] if path.is_file() else []
    except (ValueError, TypeError) as error:
        got, fix = f"{type(error).__name__} ({error})", "remove it: the next run writes it again"
        problem = Problem(where=str(path), got=got, expected="a list that `make sif` wrote", fix=fix)
        raise DataError(problem) from error


def write_failures(directory: Path, failures: Iterable[Failure]) -> Path | None:
    """Write the list, or remove the old one where nothing failed; return where it is."""
    path = directory / FAILED
    lines = [json.dumps(asdict(failure), sort_keys=True) for failure in failures]
    if not lines:
        path.unlink(missing_ok=True)
        return None
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path
