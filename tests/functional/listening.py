"""What processes listen on, from the kernel's tables."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def beyond_loopback(pids: Iterable[int]) -> dict[str, str]:
    """Return address:port (hexadecimal) -> command of what these processes listen on beyond the loopback interface."""
    inodes: dict[str, str] = {}
    for pid in pids:
        with suppress(OSError):  # it ended while we looked
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes[str(descriptor.readlink())] = command
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and not local.startswith(_LOOPBACK) and f"socket:[{inode}]" in inodes:
                found[local] = inodes[f"socket:[{inode}]"]
    return found
