"""The words in front of a program that confine it: one function for each profile, see the table of the room.

All but `agent` take a program everything that bubblewrap can take: network, other processes, rights, terminal. They
differ in what it sees. The order of the words matters: a later mount hides an earlier one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

NOBODY = 65534
AS_NOBODY = Path(__file__).with_name("as_nobody.sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image
CONFINED = ("bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent", "--new-session")
DEVICES = ("--proc", "/proc", "--dev", "/dev")
# What bubblewrap makes itself is a file system without a limit.
READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/")
LIBRARIES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
LINKS = ("/etc/alternatives", "/etc/ld.so.cache")  # through which programs and libraries are found


def program(*, disk_bytes: int, filter_descriptor: int, shown: Sequence[str]) -> list[str]:
    """Confine a program that a model wrote; `shown` are the words of the files that it is given.

    /tmp and /dev/shm are all that it can write, each of `disk_bytes`.
    """
    size = str(disk_bytes)
    words = [*CONFINED, "--as-pid-1", *system_words(*LINKS, "/opt"), *DEVICES]
    words += ["--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"]
    return [*words, "--seccomp", str(filter_descriptor), *shown, *READ_ONLY, "--chdir", "/tmp", "--"]


def scorer(shown: Iterable[Path]) -> list[str]:
    """Confine a process that scores; `shown` are the directories of Python, its packages and our code.

    It puts itself under its filter, once it has imported what it needs.
    """
    words = [*CONFINED, "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "scoring"]
    words += [*system_words(*LINKS, "/etc/localtime"), *DEVICES, "--tmpfs", "/tmp"]
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    return [*words, *READ_ONLY, "--chdir", "/tmp", "--"]


def task(*, root: Path, shared_memory: Path, shells: Path, filter_descriptor: int) -> list[str]:
    """Confine the container of a task; `root` is its image below a writable layer, `shells` the directory of pipes."""
    words = [*CONFINED, "--as-pid-1", "--hostname", "task", "--seccomp", str(filter_descriptor)]
    words += ["--bind", str(root), "/", *DEVICES, "--bind", str(shared_memory), "/dev/shm"]
    return [*words, "--ro-bind", str(shells), "/.shells", "--remount-ro", "/dev", "--chdir", "/", "--"]


def checked_image(*, root: Path, inputs: Path, network: bool) -> list[str]:
    """Confine a command in an image that is checked; `root` is the image below a writable layer."""
    words = [*CONFINED, *(["--share-net"] if network else []), "--bind", str(root), "/", *DEVICES]
    return [*words, "--ro-bind", str(inputs), "/inputs", "--chdir", "/", "--setenv", "HOME", "/root", "--"]


def repository(path: Path) -> list[str]:
    """Confine git, whose configuration in a repository that is not trusted can make it run programs."""
    words = [*CONFINED, *system_words(), *DEVICES, "--tmpfs", "/tmp"]
    return [*words, "--bind", str(path), "/repository", "--chdir", "/tmp", "--"]


def agent() -> list[str]:
    """Give an agent's program processes of its own, where bubblewrap is installed: it is trusted with all else."""
    if shutil.which("bwrap") is None:
        return []
    return ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent", "--"]


def system_words(*further: str) -> list[str]:
    """Show programs and libraries of this machine, and nothing else of its files but `further` ones."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in LIBRARIES:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            words += ["--ro-bind", name, name]
    return [*words, *(word for name in further for word in ("--ro-bind-try", name, name))]


def confined_user() -> int:
    """Return the user that confined programs run as: our own, but nobody in place of root where there is that user.

    An unprivileged container has one user only, and root in it has no rights outside.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()]
    is_mapped = any(int(low) <= NOBODY < int(low) + int(count) for low, _, count in ranges)
    return NOBODY if is_mapped else 0


def nobody_words() -> list[str]:
    """Return the words that make root become nobody, where that user exists."""
    if confined_user() == os.geteuid():
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]


def memory_file(name: str, content: bytes) -> int:
    """Return a descriptor from which bubblewrap can read a filter, or a file that it shows."""
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
