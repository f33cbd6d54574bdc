"""Filters of system calls (seccomp): one for jails, which refuses, and one for scorers, which allows.

A filter is a program of classic BPF: <linux/filter.h>, <linux/seccomp.h>. It is written by hand, so that it needs no
library; the numbers are those of the kernel's `unistd.h`.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from typing import Any

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables below, AUDIT_ARCH_*
ABSENT = -1  # a call that a machine does not have

# System call -> its number on x86_64 and on aarch64. `jail` refuses these: memory that belongs to no process and so
# counts against none, new namespaces, mounts, keys, and interfaces to the kernel that programs in a jail do not need.
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
NOT_THERE = "clone3"  # the one of them that is said not to exist
CLONE = (56, 220)
NEW_NAMESPACES = 0x7E020000  # the flags CLONE_NEW* of clone
X32 = 0x40000000  # the numbers of the x32 interface of x86_64

# `scorer` allows these without a look at their arguments.
ALLOWED = {
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67)},
    **{"readv": (19, 65), "writev": (20, 66), "dup": (32, 23)},
    **{"stat": (4, ABSENT), "lstat": (6, ABSENT), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"access": (21, ABSENT), "faccessat": (269, 48), "faccessat2": (439, 439)},
    **{"readlink": (89, ABSENT), "readlinkat": (267, 78)},
    **{"getdents": (78, ABSENT), "getcwd": (79, 17), "getdents64": (217, 61)},
    **{"statfs": (137, 43), "fstatfs": (138, 44)},
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214)},
    **{"mremap": (25, 216), "madvise": (28, 233)},
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132)},
    **{"getitimer": (36, 102), "setitimer": (38, 103)},
    **{"nanosleep": (35, 101), "gettimeofday": (96, 169), "times": (100, 153), "time": (201, ABSENT)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)},
    **{"poll": (7, ABSENT), "select": (23, ABSENT), "pselect6": (270, 72), "ppoll": (271, 73), "futex": (202, 98)},
    **{"set_robust_list": (273, 99), "membarrier": (324, 283), "rseq": (334, 293)},
    **{"sched_yield": (24, 124), "getpid": (39, 172), "getrlimit": (97, 163), "getrusage": (98, 165)},
    **{"sysinfo": (99, 179), "uname": (63, 160), "sched_getaffinity": (204, 123), "getrandom": (318, 278)},
    **{"getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177)},
    **{"getppid": (110, 173), "gettid": (186, 178)},
    **{"exit": (60, 93), "restart_syscall": (219, 128), "exit_group": (231, 94)},
}
# It allows these with some arguments only.
OPENING = {"open": ((2, ABSENT), 1), "openat": ((257, 56), 2)}  # numbers, which argument holds the flags
WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY or O_RDWR, O_CREAT, O_TRUNC
FCNTL = (72, 25)
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld [k]; jeq #k; jge #k; jset #k; ret #k
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; each argument has 8 bytes
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_*; FAIL with the number of an error


def is_supported() -> bool:
    """Return whether there are filters for this machine's processor."""
    return platform.machine() in MACHINES


def jail(machine: str = "") -> bytes:
    """Return the filter of programs in jails: all but `REFUSED` and new namespaces is allowed.

    Raises `KeyError` for a processor that is not in `MACHINES`; the default is this machine's.
    """
    column, architecture = MACHINES[machine or platform.machine()]
    refuse, absent = _step(RETURN, FAIL | errno.EPERM), _step(RETURN, FAIL | errno.ENOSYS)
    program = [*_start(architecture, _step(RETURN, KILL)), _step(AT_LEAST, X32, 0, 1), absent]
    for name, numbers in REFUSED.items():
        program += [_step(EQUAL, numbers[column], 0, 1), absent if name == NOT_THERE else refuse]
    program += [_step(EQUAL, CLONE[column], 0, 3), _step(LOAD, ARGUMENTS)]
    program += [_step(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse, _step(RETURN, ALLOW)]
    return b"".join(program)


def jail_profile() -> str:
    """Return the filter of jails in the form of the OCI runtime specification, as Podman takes it."""
    refused = sorted(set(REFUSED) - {NOT_THERE})
    rules: list[dict[str, Any]] = [{"names": refused, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}]
    rules.append({"names": [NOT_THERE], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS})
    for bit in (1 << number for number in range(32)):
        if NEW_NAMESPACES & bit:  # a rule compares a whole value, so each flag needs one
            compared = {"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}
            rule = {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM, "args": [compared]}
            rules.append(rule)
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})


def scorer(machine: str = "") -> bytes:
    """Return the filter of processes that score model text: what scoring needs is allowed, the rest fails with EPERM.

    A process under it can compute, read files and answer on the pipes that it was given. It cannot open a file for
    writing, start or signal a process, make a socket, change a limit, or use what the kernel offers beyond that.
    """
    column, architecture = MACHINES[machine or platform.machine()]
    refuse, allow = _step(RETURN, FAIL | errno.EPERM), _step(RETURN, ALLOW)
    program = _start(architecture, refuse)
    for numbers, flags in OPENING.values():
        if numbers[column] != ABSENT:
            program += [_step(EQUAL, numbers[column], 0, 4), _step(LOAD, ARGUMENTS + 8 * flags)]
            program += [_step(ANY_BIT, WRITING, 0, 1), refuse, allow]
    count = len(FCNTL_COMMANDS)
    program += [_step(EQUAL, FCNTL[column], 0, count + 3), _step(LOAD, ARGUMENTS + 8)]
    program += [_step(EQUAL, command, count - i, 0) for i, command in enumerate(FCNTL_COMMANDS)]
    program += [refuse, allow]
    for numbers in ALLOWED.values():
        if numbers[column] != ABSENT:
            program += [_step(EQUAL, numbers[column], 0, 1), allow]
    return b"".join([*program, refuse])


def _start(architecture: int, otherwise: bytes) -> list[bytes]:
    """Return the steps that load a call's number, after `otherwise` for calls of another architecture."""
    return [_step(LOAD, ARCHITECTURE), _step(EQUAL, architecture, 1, 0), otherwise, _step(LOAD, NUMBER)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; a jump skips `if_true` or `if_false` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
