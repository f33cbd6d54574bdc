"""A seccomp filter for jails: refuses what the kernel offers beyond the limits of a jail.

Refused are memory that belongs to no process and so counts against none (memfd, System V segments and queues), new
namespaces, mounts, keys, and interfaces to the kernel that programs of a sandbox do not need. Everything else is
allowed. A filter is a program of classic BPF: <linux/filter.h>, <linux/seccomp.h>.
"""

from __future__ import annotations

import errno
import platform
import struct

# System call -> its number on x86_64 and on aarch64.
REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone3": (435, 435),  # its flags are in memory, where a filter cannot look; the C library falls back to clone
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
CLONE = (56, 220)
NEW_NAMESPACES = 0x7E020000  # the flags CLONE_NEW* of clone
X32 = 0x40000000  # the numbers of the x32 interface of x86_64
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program() -> bytes:
    """Return the filter for this machine; raises `KeyError` for a processor that is not in `MACHINES`."""
    column, architecture = MACHINES[platform.machine()]
    refuse = _step(RETURN, FAIL | errno.EPERM)
    absent = _step(RETURN, FAIL | errno.ENOSYS)
    program = [_step(LOAD, ARCHITECTURE), _step(EQUAL, architecture, 1, 0), _step(RETURN, KILL), _step(LOAD, NUMBER)]
    program += [_step(AT_LEAST, X32, 0, 1), absent]
    for name, numbers in REFUSED.items():
        program += [_step(EQUAL, numbers[column], 0, 1), absent if name == "clone3" else refuse]
    program += [_step(EQUAL, CLONE[column], 0, 3), _step(LOAD, FIRST_ARGUMENT)]
    program += [_step(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse, _step(RETURN, ALLOW)]
    return b"".join(program)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; a jump skips `if_true` or `if_false` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
