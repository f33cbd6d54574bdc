"""Run an untrusted program in a jail: its own namespaces by bubblewrap, a filter of system calls, limits.

The order of the words matters. `env -i` comes first, because /proc/1/environ in the jail is the environment that
bubblewrap was started with. A server that is root becomes nobody, because no limit of processes holds for root. The
limits are set inside the jail, where processes are counted per user namespace and not over the machine.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from seccomp import filter_program
from usage import usage_of

PATH = "/usr/local/bin:/usr/bin:/bin"
NOBODY = 65534
MAX_OUTPUT_BYTES = 64 * 2**20  # of both streams; a program that prints more is ended
# Process 1 of a jail, which collects what its parents left. That of bubblewrap has no filter, and could be traced.
INIT = '"$@"; exit $?'
CHECK_SECONDS = 0.25  # between two looks at what a jail uses
MIB = 2**20

# Starts every jail, because --die-with-parent means the thread that forked, and this one lives as long as the server.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one jail may use."""

    memory_mib: int = 4096  # address space of each process, and resident memory of all together
    processes: int = 64
    sockets: int = 256  # their buffers are memory of the kernel
    files: int = 20_000  # in /tmp and in /dev/shm; also the empty ones take memory of the kernel
    disk_mib: int = 256  # each of /tmp and /dev/shm
    file_mib: int = 64
    open_files: int = 256
    output_bytes: int = MIB  # kept of each of stdout and stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended; `status` is None when it was killed, and `reason` then names the limit."""

    status: int | None
    stdout: str
    stderr: str
    reason: str = ""

    @property
    def timed_out(self) -> bool:
        return self.reason == "time"


def jail_words(command: Sequence[str], limits: Limits, *, cpu_seconds: int | None, words: Sequence[str]) -> list[str]:
    """Return the words that run `command` in a jail; `words` are further ones for bubblewrap."""
    jail = ["env", "-i", f"PATH={PATH}", "HOME=/tmp", "LANG=C.UTF-8", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
    jail += [*_user_words(), "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    jail += ["--as-pid-1", "--cap-drop", "ALL", *_system_words()]
    size = str(limits.disk_mib * MIB)
    jail += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--size", size]
    jail += ["--tmpfs", "/tmp", *words]
    # What bubblewrap makes itself is a file system without a limit.
    jail += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", "prlimit", "--core=0"]
    jail += [f"--as={limits.memory_mib * MIB}", f"--nproc={limits.processes}", f"--fsize={limits.file_mib * MIB}"]
    jail += [f"--nofile={limits.open_files}", *([f"--cpu={cpu_seconds}"] if cpu_seconds else []), "--"]
    return [*jail, "sh", "-c", INIT, "sh", *command]


def _user_words() -> list[str]:
    """Return the words that make a server that is root become nobody."""
    if os.geteuid() == 0 and _is_mapped(NOBODY):
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
    return []


def _system_words() -> list[str]:
    """Show programs and libraries of this machine, and nothing else of its files."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            words += ["--ro-bind", name, name]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/opt"):
        words += ["--ro-bind-try", name, name]
    return words


def _is_mapped(uid: int) -> bool:
    """Whether this user namespace has the user `uid`; that of an unprivileged container has one user only."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(low) <= uid < int(low) + int(count) for low, _, count in ranges)


def start(
    command: Sequence[str],
    limits: Limits,
    *,
    cpu_seconds: int | None = None,
    files: Mapping[str, str | bytes],
    stdin: int,
) -> subprocess.Popen[bytes]:
    """Start a command in a jail that shows `files`, path -> content; stdout and stderr are pipes.

    The jail leads a process group of its own.
    """
    descriptors = {path: _memory_file(path, content) for path, content in files.items()}
    seccomp = _memory_file("seccomp", filter_program())
    words = ["--seccomp", str(seccomp)]
    for path, descriptor in descriptors.items():
        words += ["--ro-bind-data", str(descriptor), path]
    jail = jail_words(command, limits, cpu_seconds=cpu_seconds, words=words)
    passed = (seccomp, *descriptors.values())

    def fork() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(jail, stdin=stdin, stdout=pipe, stderr=pipe, pass_fds=passed, start_new_session=True)

    try:
        return _SPAWNER.submit(fork).result()
    finally:
        for descriptor in passed:
            os.close(descriptor)


def run(command: Sequence[str], code: str, stdin: str, seconds: float, limits: Limits) -> Outcome:
    """Run `command` on a file /main that holds `code`; returns when it has ended, or was killed for a limit."""
    given = _memory_file("stdin", stdin)
    try:
        process = start(command, limits, cpu_seconds=int(seconds * 2) + 2, files={"/main": code}, stdin=given)
    finally:
        os.close(given)
    return _collect(process, time.monotonic() + seconds, limits)


def _memory_file(name: str, content: str | bytes) -> int:
    """Return a descriptor from which `content` can be read."""
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def broken_limit(process: subprocess.Popen[bytes], limits: Limits) -> str:
    """Return which limit the processes of a jail together break: memory, sockets or files; an empty text for none."""
    usage = usage_of(process.pid, limits.disk_mib * MIB)
    if usage.memory_bytes > limits.memory_mib * MIB:
        return "memory"
    if usage.sockets > limits.sockets:
        return "sockets"
    return "files" if usage.files > limits.files else ""


def _collect(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> Outcome:
    """Read what a jail prints until it has ended; kill it at the deadline or when it breaks a limit."""
    kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    total, reason, next_check = 0, "", time.monotonic() + CHECK_SECONDS
    with process, selectors.DefaultSelector() as selector:
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, name)
        try:
            while not reason and (selector.get_map() or process.poll() is None):
                wait = max(0.0, min(deadline, next_check) - time.monotonic())
                if not selector.get_map():  # it closed its streams and runs on
                    _wait(process, wait)
                for key, _ in selector.select(wait) if selector.get_map() else ():
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    total += len(data)
                    kept[key.data] += data[: limits.output_bytes - len(kept[key.data])]
                now = time.monotonic()
                reason = "time" if now >= deadline else "output" if total > MAX_OUTPUT_BYTES else ""
                if not reason and now >= next_check:
                    next_check = now + CHECK_SECONDS
                    reason = broken_limit(process, limits)
        finally:  # nothing may leave a jail without its limits
            kill(process)
    stdout, stderr = (bytes(kept[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    return Outcome(status=None if reason else process.returncode, stdout=stdout, stderr=stderr, reason=reason)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a jail and every process in it: process 1 of the jail ends with bubblewrap, and all others with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
