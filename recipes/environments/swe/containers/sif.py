"""Where the root file system of a SIF file begins. Layout: the SIF specification, version 1 (github.com/sylabs/sif).

The header has 128 bytes; at 96 and 104 stand the offset and the length of the table of descriptors, which have 585
bytes each. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path

from recipes.environments.swe.contract import ContainerFailedError

MAGIC_AT, MAGIC, TABLE_AT, DESCRIPTOR_BYTES = 32, b"SIF_MAGIC\0", 96, 585
PARTITION = 0x4004  # kind of a descriptor
SQUASHFS, ROOT_PARTITION = 1, 2  # its file system, its role
EXTRA_AT = 201  # in a descriptor: file system and role of a partition
MAX_TABLE_BYTES = 2**20
SQUASHFS_MAGIC = b"hsqs"


def root_offset(image: Path) -> int:
    """Return where the squashfs of a SIF file begins, in bytes; 0 for a file that is a squashfs itself.

    Raises `ContainerFailedError` for a file without one.
    """
    try:
        with image.open("rb") as file:
            header = file.read(128)
            if header.startswith(SQUASHFS_MAGIC):
                return 0
            if len(header) < 128 or header[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
                raise ContainerFailedError(f"{image} is neither a SIF file nor a squashfs; make it with `make sif`")
            start, length = struct.unpack_from("<qq", header, TABLE_AT)
            if start < 0 or not 0 <= length <= MAX_TABLE_BYTES:
                raise ContainerFailedError(f"{image} is a damaged SIF file; make it again with `make sif`")
            file.seek(start)
            table = file.read(length)
    except OSError as error:
        raise ContainerFailedError(f"{image} cannot be read: {error.strerror}") from error
    for at in range(0, len(table) - DESCRIPTOR_BYTES + 1, DESCRIPTOR_BYTES):
        kind, is_used = struct.unpack_from("<i?", table, at)
        (offset,) = struct.unpack_from("<q", table, at + 17)
        if (
            is_used
            and kind == PARTITION
            and struct.unpack_from("<ii", table, at + EXTRA_AT)
            == (
                SQUASHFS,
                ROOT_PARTITION,
            )
        ):
            return int(offset)
    raise ContainerFailedError(f"{image} has no squashfs partition with a root file system; make it again")
