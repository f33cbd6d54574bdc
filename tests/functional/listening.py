"""What processes listen on, from the kernel's tables; as a program: what all processes of this node listen on."""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def sockets(pids: Iterable[int]) -> dict[tuple[str, int], str]:
    """Return (address, port) -> command of what these processes listen on."""
    owners: dict[str, str] = {}
    for pid in pids:
        with suppress(OSError):  # it ended while we looked
            command = (
                Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ").strip()
            )
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners[str(descriptor.readlink())] = command
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and f"socket:[{inode}]" in owners:
                address, port = local.split(":")
                found[decoded(address), int(port, 16)] = owners[f"socket:[{inode}]"]
    return found


def decoded(hexadecimal: str) -> str:
    """Return an address of the kernel's tables as text; its words are in the byte order of the machine."""
    raw = bytes.fromhex(hexadecimal)
    address = ipaddress.ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def beyond_loopback(pids: Iterable[int]) -> dict[str, str]:
    """Return address:port -> command of what these processes listen on beyond the loopback interface."""
    return {
        f"{address}:{port}": command
        for (address, port), command in sockets(pids).items()
        if not ipaddress.ip_address(address).is_loopback
    }


if __name__ == "__main__":
    every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    json.dump([[*place, command] for place, command in sockets(every).items()], sys.stdout)
