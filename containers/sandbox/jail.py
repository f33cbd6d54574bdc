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

from recipes.confinement import filters, jails
from recipes.confinement.usage import JailUsage, OwnTime, usage_of

PATH = "/usr/local/bin:/usr/bin:/bin"
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
    used_seconds: float = 0.0  # of the time until it was killed, see `OwnTime`

    @property
    def timed_out(self) -> bool:
        return self.reason == "time"


def jail_words(
    command: Sequence[str], limits: Limits, *, cpu_seconds: int | None, filter_descriptor: int, shown: Sequence[str]
) -> list[str]:
    """Return the words that run `command` in a jail; `shown` are bubblewrap's words for the files that it is given."""
    jail = ["env", "-i", f"PATH={PATH}", "HOME=/tmp", "LANG=C.UTF-8", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
    jail += jails.nobody_words()
    jail += jails.program(disk_bytes=limits.disk_mib * MIB, filter_descriptor=filter_descriptor, shown=shown)
    jail += ["prlimit", "--core=0"]
    jail += [f"--as={limits.memory_mib * MIB}", f"--nproc={limits.processes}", f"--fsize={limits.file_mib * MIB}"]
    jail += [f"--nofile={limits.open_files}", *([f"--cpu={cpu_seconds}"] if cpu_seconds else []), "--"]
    return [*jail, "sh", "-c", INIT, "sh", *command]


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
    descriptors = {path: jails.memory_file(path, _as_bytes(content)) for path, content in files.items()}
    shown = [word for path, descriptor in descriptors.items() for word in ("--ro-bind-data", str(descriptor), path)]
    seccomp = jails.memory_file("seccomp", filters.jail())
    jail = jail_words(command, limits, cpu_seconds=cpu_seconds, filter_descriptor=seccomp, shown=shown)
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
    given = jails.memory_file("stdin", _as_bytes(stdin))
    try:
        process = start(command, limits, cpu_seconds=int(seconds * 2) + 2, files={"/main": code}, stdin=given)
    finally:
        os.close(given)
    return _collect(process, time.monotonic() + seconds, limits)


def _as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode(errors="surrogateescape")


def broken_limit(process: subprocess.Popen[bytes], limits: Limits) -> str:
    """Return which limit the processes of a jail together break: memory, sockets or files; an empty text for none."""
    return _broken(usage_of(process.pid, limits.disk_mib * MIB), limits)


def _broken(usage: JailUsage, limits: Limits) -> str:
    if usage.memory_bytes > limits.memory_mib * MIB:
        return "memory"
    if usage.sockets > limits.sockets:
        return "sockets"
    return "files" if usage.files > limits.files else ""


def _collect(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> Outcome:
    """Read what a jail prints until it has ended; kill it at the deadline or when it breaks a limit."""
    kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    total, reason, next_check, own = 0, "", time.monotonic() + CHECK_SECONDS, OwnTime()
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
                if now >= min(next_check, deadline):
                    next_check = now + CHECK_SECONDS
                    usage = usage_of(process.pid, limits.disk_mib * MIB)
                    own.add(usage)
                    reason = reason or _broken(usage, limits)
        finally:  # nothing may leave a jail without its limits
            kill(process)
    stdout, stderr = (bytes(kept[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    status = None if reason else process.returncode
    return Outcome(status=status, stdout=stdout, stderr=stderr, reason=reason, used_seconds=own.seconds)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a jail and every process in it: process 1 of the jail ends with bubblewrap, and all others with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
