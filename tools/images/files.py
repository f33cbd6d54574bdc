"""What kind of container image a file is, and whether it is complete, from its header alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
