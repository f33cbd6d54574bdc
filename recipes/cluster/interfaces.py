"""Which network interface of this machine has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_NAME_BYTES = 15  # the kernel's limit


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address; None where none has it as its first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:_NAME_BYTES]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
