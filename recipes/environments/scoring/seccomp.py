"""A filter of system calls for processes that score model text: what scoring needs is allowed, the rest is refused.

A refused call fails with EPERM. A process under the filter can compute, read files and answer on the pipes that it was
given. It cannot open a file for writing, start or signal a process, make a socket, change a limit, or use what the
kernel offers beyond that. The filter needs no privilege and cannot be taken off again. It is written by hand as
classic BPF (`seccomp(2)`), so that it needs no library; the numbers are those of the kernel's `unistd.h`.
"""

from __future__ import annotations

import ctypes
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld [k]; jeq #k; jset #k; ret #k
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; each argument has 8 bytes
WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY or O_RDWR, O_CREAT, O_TRUNC
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# machine -> (number of the call, index of its flags) of the calls that open files
OPENING = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
# machine -> number of fcntl, and its allowed commands: F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC
FCNTL = {"x86_64": 72, "aarch64": 25}
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
# machine -> numbers, one line for each purpose
ALLOWED = {
    "x86_64": (
        *(0, 1, 3, 5, 8, 17, 19, 20, 32),  # read write close fstat lseek pread readv writev dup
        *(
            4,
            6,
            262,
            332,
            21,
            269,
            439,
            89,
            267,
        ),  # stat lstat newfstatat statx access faccessat faccessat2 readlink(at)
        *(78, 79, 217, 137, 138),  # getdents getcwd getdents64 statfs fstatfs
        *(9, 10, 11, 12, 25, 28),  # mmap mprotect munmap brk mremap madvise
        *(13, 14, 15, 131, 36, 38),  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack getitimer setitimer
        *(35, 96, 100, 201, 228, 229, 230),  # nanosleep gettimeofday times time clock_gettime _getres _nanosleep
        *(7, 23, 270, 271, 202, 273, 324, 334),  # poll select pselect6 ppoll futex set_robust_list membarrier rseq
        *(24, 39, 97, 98, 99, 63, 204, 318),  # sched_yield getpid getrlimit getrusage sysinfo uname affinity getrandom
        *(102, 104, 107, 108, 110, 186),  # getuid getgid geteuid getegid getppid gettid
        *(60, 219, 231),  # exit restart_syscall exit_group
    ),
    "aarch64": (
        *(63, 64, 57, 80, 62, 67, 65, 66, 23),
        *(79, 291, 48, 439, 78),
        *(61, 17, 43, 44),
        *(222, 226, 215, 214, 216, 233),
        *(134, 135, 139, 132, 102, 103),
        *(101, 169, 153, 113, 114, 115),
        *(72, 73, 98, 99, 283, 293),
        *(124, 172, 163, 165, 179, 160, 123, 278),
        *(174, 176, 175, 177, 173, 178),
        *(93, 128, 94),
    ),
}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_LIBC = ctypes.CDLL(None, use_errno=True)


def is_supported() -> bool:
    """Return whether the filter exists for this machine's processor."""
    return platform.machine() in ALLOWED


def forbid_all_but_scoring() -> None:
    """Put this process under the filter, for good; raises `OSError` when the kernel refuses."""
    code = _program(platform.machine())
    program = _Program(len(code) // 8, code)
    _prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def end_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends."""
    _prctl(1, number, 0)


def _prctl(option: int, first: object, second: object) -> None:
    if _LIBC.prctl(option, first, second, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed")


def _program(machine: str) -> bytes:
    """Return the filter: 8 bytes for each instruction."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    refuse = step(RETURN, REFUSE)
    lines = [step(LOAD, ARCHITECTURE), step(EQUAL, AUDIT_ARCHITECTURES[machine], 1, 0), refuse, step(LOAD, NUMBER)]
    for number, flags in OPENING[machine]:
        lines += [step(EQUAL, number, 0, 4), step(LOAD, ARGUMENTS + 8 * flags), step(ANY_BIT, WRITING, 0, 1), refuse]
        lines.append(step(RETURN, ALLOW))
    count = len(FCNTL_COMMANDS)
    lines += [step(EQUAL, FCNTL[machine], 0, count + 3), step(LOAD, ARGUMENTS + 8)]
    lines += [step(EQUAL, command, count - i, 0) for i, command in enumerate(FCNTL_COMMANDS)]
    lines += [refuse, step(RETURN, ALLOW)]
    for number in ALLOWED[machine]:
        lines += [step(EQUAL, number, 0, 1), step(RETURN, ALLOW)]
    return b"".join([*lines, refuse])
