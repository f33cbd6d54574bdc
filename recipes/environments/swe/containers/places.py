"""The directory in which a process keeps its containers' pipes and mount points.

A process that is killed cannot clear its directory. So it holds a lock on it as long as it lives, and the next process
of the same user that starts containers on this machine removes its directories without a lock. Their names have the
machine's: a temporary directory may lie on a file system that others share, and a lock of a directory holds on one
machine only.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from recipes.confinement.jails import confined_user
from recipes.environments.swe.contract import ContainerFailedError
from recipes.files import lock_directory

MOUNT_IMAGE = Path(__file__).with_name("mount_image.sh")
PREFIX = "swe-containers-"
_homes: dict[int, Path] = {}  # process -> its directory; a fork makes its own


def home() -> Path:
    """Return this process's directory; the first call makes it, and removes those that killed processes have left."""
    if os.getpid() not in _homes:
        parent = _parent(Path(tempfile.gettempdir()))
        clear_abandoned(parent)
        _homes[os.getpid()] = _make(parent)
        atexit.register(leave)
    return _homes[os.getpid()]


def leave() -> None:
    """Remove this process's directory, where it has one; the next container makes another.

    Call it where a process will be killed, as actors are: then nothing of what is registered for its end runs.
    """
    own = _homes.pop(os.getpid(), None)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


def container_directory(token: str) -> Path:
    """Make the directory of one container's pipes; raises `ContainerFailedError`."""
    directory = home() / f"container-{token[:12]}"
    try:
        directory.mkdir(mode=0o711)
    except OSError as error:
        raise ContainerFailedError(f"{directory} cannot be made: {error.strerror}") from error
    return directory


def clear_abandoned(parent: Path) -> None:
    """Remove this user's directories of this machine below `parent` that no process holds."""
    for path in parent.glob(f"{_prefix()}*"):
        with suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if (lock := lock_directory(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _parent(temporary: Path) -> Path:
    """Return the temporary directory, or /tmp where the containers' user could not pass through it.

    That of a run is its user's alone, and root's containers run as nobody.
    """
    is_own = confined_user() == os.geteuid()
    can_pass = all(path.stat().st_mode & stat.S_IXOTH for path in (temporary, *temporary.parents))
    return temporary if is_own or can_pass else Path("/tmp")


def _prefix() -> str:
    return f"{PREFIX}{socket.gethostname()}-"


def _make(parent: Path) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
        lock = lock_directory(path)
        if lock is not None and os.fstat(lock).st_nlink:  # else another start took it for an abandoned one
            path.chmod(0o711)  # the container's user passes through
            return path
        if lock is not None:
            os.close(lock)
