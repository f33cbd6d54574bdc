"""Containers by bubblewrap, for machines without Apptainer: on a SIF file, a squashfs or a directory with a root.

The image is mounted once, by squashfuse, in namespaces in which this user is root and on this machine nobody (`nobody`
where this process is root). Every container starts in them, with an overlay in a tmpfs of its own, and leaves them for
its own. It has no rights there and a filter of system calls: without it, namespaces and memory that belongs to no
process would be ways around its limits.
"""

from __future__ import annotations

import os
import runpy
import secrets
from functools import cache
from pathlib import Path

from recipes.environments.swe.containers.container import Launch, RunningContainer, init_words
from recipes.environments.swe.containers.images import HeldImages, environment
from recipes.environments.swe.containers.places import NOBODY, container_directory, container_user
from recipes.environments.swe.contract import ContainerLimits

PROGRAMS = {
    "bwrap": "bubblewrap",
    "squashfuse": "squashfuse",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
FILTER = Path(__file__).resolve().parents[4] / "containers/sandbox/seccomp.py"  # also that of the sandbox's jails
FILES_PER_MIB = 128  # of the writable layer: also an empty file takes memory of the kernel
MIN_FILES = 20_000


class BwrapRuntime:
    """See `contract.Runtime`."""

    name = "bwrap"

    def __init__(self) -> None:
        self._images = HeldImages()

    async def start(self, image: str, limits: ContainerLimits) -> RunningContainer:
        key, held = await self._images.acquire(Path(image))

        async def release() -> None:
            await self._images.release(key, held)

        token = secrets.token_hex(16)
        try:
            descriptor = _memory_file(filter_program())
            directory = container_directory(token)
        except BaseException:
            await release()
            raise
        files = max(MIN_FILES, limits.disk_mib * FILES_PER_MIB)
        words = [*user_words(), "nsenter", "--preserve-credentials", "--user", "--mount"]
        words += [f"--target={held.process.pid}", "--", "unshare", "--mount", "--", "bash", str(held.work / "2")]
        words += [str(held.work), str(limits.disk_mib), str(files), str(directory), str(descriptor)]
        launch = Launch(
            words=[*words, *init_words(token, limits)],
            environment=environment(),
            directory=directory,
            owner=container_user(),
            token=token,
            release=release,
            descriptors=(descriptor,),
        )
        return await RunningContainer.start(launch, limits)


def user_words() -> list[str]:
    """Return the words that make root become nobody, where that user exists."""
    if container_user() == os.geteuid():
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]


@cache
def filter_program() -> bytes:
    """Return the filter of system calls."""
    program = runpy.run_path(str(FILTER))["filter_program"]()
    assert isinstance(program, bytes)
    return program


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("filter")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
