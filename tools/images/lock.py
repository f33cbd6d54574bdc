"""containers/images.lock: the digest of every image that was built, and which image a launch would run.

What kind of container image a file is, and whether it is complete, from its header alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from recipes.errors import LaunchError, Problem
from recipes.files import read_object, sha256_of, write_atomically

SQUASHFS_MAGIC = b"hsqs"
SQUASHFS_USED = 40  # offset of the number of bytes of the file system
SIF_MAGIC_OFFSET, SIF_MAGIC = 32, b"SIF_MAGIC\0"  # after the line that makes the file executable
SIF_DATA = 112  # offset of two numbers: where the data begins, and how long it is
HEADER_BYTES = 128

Kind = Literal["squashfs", "SIF", "directory", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """One image on disk."""

    kind: Kind
    size: int  # bytes of the file
    declared: int  # bytes that the header names; 0 where it names none

    @property
    def is_cut(self) -> bool:
        return self.size < self.declared


def read_image(path: Path) -> ImageFile:
    """Read the header of an image."""
    if path.is_dir():
        return ImageFile(kind="directory", size=0, declared=0)
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    size = path.stat().st_size
    if header.startswith(SQUASHFS_MAGIC):
        return ImageFile(kind="squashfs", size=size, declared=_number(header, SQUASHFS_USED))
    if header[SIF_MAGIC_OFFSET:].startswith(SIF_MAGIC):
        return ImageFile(kind="SIF", size=size, declared=_number(header, SIF_DATA) + _number(header, SIF_DATA + 8))
    return ImageFile(kind="none", size=size, declared=0)


def _number(header: bytes, offset: int) -> int:
    """Return a little-endian number of eight bytes; where the header ends before it, more than any file has."""
    if len(header) < offset + 8:
        return 2**63
    return int.from_bytes(header[offset : offset + 8], "little")


LOCK = Path("containers/images.lock")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedImage:
    """One built image, as the lock records it."""

    tag: str
    digest: str
    inputs: str  # sha256 of the files of this repository that it was built from
    arguments: Mapping[str, str]
    bases: Mapping[str, str] = field(default_factory=dict)  # name and tag of each base image -> its digest


def read_lock(path: Path) -> dict[str, LockedImage]:
    """Return image name -> entry; raises `LaunchError` for a damaged lock."""
    if not path.is_file():
        return {}
    try:
        return {
            name: LockedImage(**entry) for name, entry in json.loads(path.read_text(encoding="utf-8"))["images"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong, fix = f"the lock of images is damaged ({error!r})", "restore it from git, or delete it and build again"
        raise LaunchError(Problem(where=str(path), wrong=wrong, fix=fix)) from error


def write_lock(path: Path, entries: Mapping[str, LockedImage]) -> None:
    """Replace the lock."""
    text = json.dumps({"images": {name: asdict(entries[name]) for name in sorted(entries)}}, indent=2)
    write_atomically(path, f"{text}\n".encode())


def hash_inputs(root: Path, inputs: Iterable[Path]) -> str:
    """Return a sha256 over the names and contents of files, and of all files below directories."""
    total = hashlib.sha256()
    for given in inputs:
        path = root / given
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                total.update(f"{file.relative_to(root)}\0".encode() + bytes.fromhex(sha256_of(file)))
    return f"sha256:{total.hexdigest()}"


def record_of(image_file: Path) -> Path:
    """Return the file beside an imported image that holds its tag and digest."""
    return image_file.with_name(f"{image_file.name}.json")


def launch_digest(image: str) -> str | None:
    """Return the digest of the image of a launch; None where only the registry knows it."""
    if match := DIGEST.search(image):
        return match[0]
    record = record_of(Path(image))
    if not record.is_file():
        return None
    found = read_object(record)
    size = Path(image).stat().st_size if Path(image).exists() else -1
    if "digest" not in found or "bytes" not in found:
        return f"unknown: {record} is damaged"
    return str(found["digest"]) if found["bytes"] == size else f"unknown: {image} was replaced after its import"


def digest_problems(images: Mapping[str, str], lock: Mapping[str, LockedImage]) -> Iterator[Problem]:
    """Compare the images of a launch (variable -> image) with the lock; yields each whose digest is not in it."""
    known = {entry.digest: name for name, entry in lock.items()}
    for variable, image in images.items():
        digest = launch_digest(image)
        if digest is not None and known and digest not in known:
            expected = "one of " + ", ".join(f"{name} {digest[:19]}" for digest, name in sorted(known.items()))
            fix = f"build and import it again, or add it to {LOCK}"
            yield Problem(where=f"{variable}={image}", got=digest, expected=expected, fix=fix)
