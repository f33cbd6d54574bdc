"""How a container starts on an image that is mounted already: the ground of bubblewrap's and of Podman's.

The image is mounted once, by squashfuse, in namespaces in which this user is root and on this machine nobody (`nobody`
where this process is root). Every container starts in them, with an overlay in a tmpfs of its own, and leaves them for
its own (`start_container.sh`). It has no rights there and a filter of system calls: without it, namespaces and memory
that belongs to no process would be ways around its limits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from recipes.confinement.jails import PATH, confined_user, nobody_words
from recipes.environments.swe.containers.container import ContainerStart, RunningContainer, init_words
from recipes.environments.swe.containers.images import HeldImages, environment
from recipes.environments.swe.containers.places import container_directory
from recipes.environments.swe.contract import ContainerFailedError, ContainerLimits

PROGRAMS = {
    "squashfuse": "squashfuse",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
FILES_PER_MIB = 128  # of the writable layer: also an empty file takes memory of the kernel
MIN_FILES = 20_000
VARIABLES = (f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8", "TERM=dumb")  # of a container
BASH = ("/bin/bash", "--noprofile", "--norc", "-c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a program needs for one container beside its words."""

    namespaces: Sequence[str]  # words that make those it starts in
    words: Sequence[str]  # before those of its first process
    descriptors: Sequence[int] = field(default=())  # that the container's programs inherit
    own_tasks: int = 0  # of the program itself, which count among the container's processes
    layers: Sequence[str] = ("/dev/shm",)  # see `ContainerStart`
    ends_by_itself: bool = False


class Starter(Protocol):
    """What starts the container in the end."""

    name: str

    def open(self, directory: Path, layer: Path) -> Opened:
        """Make what one container needs; `directory` is that of its pipes. Raises `OSError`.

        `layer` will have its image below a writable layer as `root`, and `shm` for its /dev/shm.
        """
        ...


class HeldRuntime:
    """See `contract.Runtime`."""

    def __init__(self, program: Starter) -> None:
        self._program = program
        self._images = HeldImages()

    @property
    def name(self) -> str:
        return self._program.name

    async def start(self, image: str, limits: ContainerLimits) -> RunningContainer:
        key, held = await self._images.acquire(Path(image))

        async def release() -> None:
            await self._images.release(key, held)

        token = secrets.token_hex(16)
        try:
            directory = container_directory(token)
            opened = self._program.open(directory, held.work / "layer")
        except OSError as error:
            await release()
            raise ContainerFailedError(f"the container's filter cannot be written: {error}") from error
        except BaseException:
            await release()
            raise
        files = max(MIN_FILES, limits.disk_mib * FILES_PER_MIB)
        words = [*nobody_words(), "nsenter", "--preserve-credentials", "--user", "--mount"]
        words += [f"--target={held.process.pid}", "--", *opened.namespaces, "--", "bash", str(held.work / "2")]
        words += [self.name, str(held.work), str(limits.disk_mib), str(files), *opened.words, *BASH]
        launch = ContainerStart(
            words=[*words, *init_words(token, limits, own_tasks=opened.own_tasks)],
            environment=environment(),
            directory=directory,
            owner=confined_user(),
            token=token,
            release=release,
            descriptors=opened.descriptors,
            layers=opened.layers,
            ends_by_itself=opened.ends_by_itself,
        )
        return await RunningContainer.start(launch, limits)
