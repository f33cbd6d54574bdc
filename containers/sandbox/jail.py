"""Run a program that nobody trusts: namespaces of its own by bubblewrap, limits set inside, an empty environment.

The order of the words matters. `env -i` comes first, for /proc/1/environ of the jail is what bubblewrap was started
with. A server that is root becomes nobody, for root has no limit of processes. The limits are set inside, where the
number of processes counts per user namespace and not over the machine.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATH = "/usr/local/bin:/usr/bin:/bin"
NOBODY = 65534
KILL_FACTOR = 64  # a program that writes this many times the kept output is ended
MEMORY_CHECK_SECONDS = 0.25
MIB = 2**20

# One thread lives as long as the server and starts every jail: `--die-with-parent` means the thread that forked.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one jail may use."""

    memory_mib: int = 4096  # address space of each process, and resident memory of all together
    processes: int = 64
    disk_mib: int = 256  # each of /tmp and /dev/shm
    file_mib: int = 64
    open_files: int = 256
    output_bytes: int = MIB  # kept of each stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended; `status` is None when it was killed, `reason` then says why."""

    status: int | None
    stdout: str
    stderr: str
    reason: str = ""

    @property
    def timed_out(self) -> bool:
        return self.reason == "time"


def jail_words(
    command: Sequence[str], limits: Limits, *, cpu_seconds: int | None, files: Sequence[str] = ()
) -> list[str]:
    """Return the words that run `command` in a jail; `files` are further words for bubblewrap."""
    words = ["env", "-i", f"PATH={PATH}", "HOME=/tmp", "LANG=C.UTF-8", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
    words += [*_user_words(), "bwrap", "--unshare-all", *no_namespaces(), "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", *_system_words()]
    size = str(limits.disk_mib * MIB)
    words += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--size", size]
    words += ["--tmpfs", "/tmp", *files]
    # What bubblewrap makes itself is a file system without a limit.
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", "prlimit", "--core=0"]
    words += [f"--as={limits.memory_mib * MIB}", f"--nproc={limits.processes}", f"--fsize={limits.file_mib * MIB}"]
    words += [f"--nofile={limits.open_files}", *([f"--cpu={cpu_seconds}"] if cpu_seconds else []), "--"]
    return [*words, *command]


@cache
def no_namespaces() -> tuple[str, ...]:
    """Return the words that keep programs from namespaces of their own, in which a tmpfs has no limit.

    None for a bubblewrap before 0.8, and where /proc/sys cannot be written.
    """
    words = ("--unshare-user", "--disable-userns")
    trial = [*_user_words(), "bwrap", "--unshare-all", *words, *_system_words(), "--", "true"]
    return words if subprocess.run(trial, capture_output=True, timeout=30, check=False).returncode == 0 else ()


def _user_words() -> list[str]:
    """Become nobody where the server is root."""
    if os.geteuid() == 0 and _is_mapped(NOBODY):
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
    return []


def _system_words() -> list[str]:
    """Show programs and libraries, nothing else of the file system."""
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
    """Whether a user exists in this user namespace: in an unprivileged container only its own does."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(low) <= uid < int(low) + int(count) for low, _, count in ranges)


def start(words: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    """Start a jail in a session of its own."""
    return _SPAWNER.submit(subprocess.Popen, words, start_new_session=True, **options).result()  # type: ignore[arg-type, return-value]


def run(command: Sequence[str], code: str, stdin: str, seconds: float, limits: Limits) -> Outcome:
    """Run `command` on a file /main that holds `code`; returns when it ended, or was killed for time or size."""
    script, given = _memory_file("main", code), _memory_file("stdin", stdin)
    files = ["--ro-bind-data", str(script), "/main"]
    words = jail_words(command, limits, cpu_seconds=int(seconds * 2) + 2, files=files)
    try:
        process = start(words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(script,))
    finally:
        os.close(script)
        os.close(given)
    return _collect(process, time.monotonic() + seconds, limits)


def _memory_file(name: str, text: str) -> int:
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as content:
        content.write(text.encode(errors="surrogateescape"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _collect(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> Outcome:
    kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    total, reason, next_check = 0, "", time.monotonic() + MEMORY_CHECK_SECONDS
    with process, selectors.DefaultSelector() as selector:
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map() and not reason:
            now = time.monotonic()
            for key, _ in selector.select(max(0.0, min(deadline, next_check) - now)):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                total += len(data)
                kept[key.data] += data[: limits.output_bytes - len(kept[key.data])]
            reason = "time" if now >= deadline else "output" if total > KILL_FACTOR * limits.output_bytes else ""
            if not reason and now >= next_check:
                next_check = now + MEMORY_CHECK_SECONDS
                reason = "memory" if resident_bytes(process.pid) > limits.memory_mib * MIB else ""
        if not reason:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it closed its streams and went on
                reason = "time"
        kill(process)
    stdout, stderr = (bytes(kept[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    return Outcome(status=None if reason else process.returncode, stdout=stdout, stderr=stderr, reason=reason)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a jail with everything in it: its first process is init of its process namespace."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and all below it; 0 for what has ended meanwhile."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return 0
    own = int(words[1]) * os.sysconf("SC_PAGE_SIZE")
    return own + sum(resident_bytes(int(child)) for child in children)
