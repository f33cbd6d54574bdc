"""The images that containers of this process use: each is mounted once, as long as a container needs it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipes.confinement.jails import AS_NOBODY, PATH, confined_user
from recipes.environments.swe.containers.container import END_SECONDS, MAX_SHOWN
from recipes.environments.swe.containers.places import MOUNT_IMAGE, home
from recipes.environments.swe.containers.sif import root_offset
from recipes.environments.swe.containers.waiting import has_ended, is_readable
from recipes.environments.swe.contract import ContainerFailedError

SCRIPTS = [Path(__file__).with_name("keep_image.sh"), Path(__file__).with_name("start_container.sh"), MOUNT_IMAGE]
MOUNT_SECONDS = 60.0
Key = tuple[str, int, int, int]


def environment() -> dict[str, str]:
    """Return the environment of what starts containers; a container can read that of its first process."""
    return {"PATH": os.environ.get("PATH", PATH)}


@dataclass(slots=True)
class HeldImage:
    """An image in the mount namespace of a process that holds it."""

    work: Path
    process: subprocess.Popen[bytes]
    num_users: int = 0


@dataclass(slots=True)
class _Slot:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    image: HeldImage | None = None


class HeldImages:
    """Images by file; one that has changed on disk is another one."""

    def __init__(self) -> None:
        self._slots: dict[Key, _Slot] = {}

    async def acquire(self, path: Path) -> tuple[Key, HeldImage]:
        """Mount an image, or use it where it is mounted already; raises `ContainerFailedError`."""
        key = _key(path)
        slot = self._slots.setdefault(key, _Slot())
        async with slot.lock:
            if slot.image is not None and slot.image.process.poll() is not None:
                slot.image = None  # its process was killed; containers that still use it fail by themselves
            if slot.image is None:
                slot.image = await _hold(Path(key[0]))
            slot.image.num_users += 1
            return key, slot.image

    async def release(self, key: Key, image: HeldImage) -> None:
        """Say that one container less needs it; after the last one it is unmounted."""
        slot = self._slots[key]
        async with slot.lock:
            image.num_users -= 1
            if image.num_users:
                return
            await _let_go(image)
            if slot.image is image:
                slot.image = None


def _key(path: Path) -> Key:
    try:
        real = path.resolve(strict=True)
        state = real.stat()
    except OSError as error:
        raise ContainerFailedError(f"the image {path} cannot be read: {error.strerror}") from error
    return str(real), state.st_ino, state.st_mtime_ns, state.st_size


async def _hold(path: Path) -> HeldImage:
    """Start the process that holds an image, and wait until it is mounted."""
    if path.is_dir():
        offset = "directory"
        if (owner := path.stat().st_uid) != confined_user():
            raise ContainerFailedError(
                f"{path} belongs to user {owner}, and containers of this process run as user {confined_user()}; make "
                f"a SIF file of it, or `chown -R {confined_user()}` it"
            )
    else:
        offset = str(root_offset(path))
    number = os.urandom(6).hex()
    work = home() / f"image-{number}"
    work.mkdir(mode=0o711)
    words = [str(AS_NOBODY), str(work), str(path), *map(str, SCRIPTS), "--"]
    words += ["bash", str(work / "1"), str(work), offset]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=environment(), cwd="/", stdin=pipe, stdout=pipe, stderr=pipe)
    image = HeldImage(work, process)
    try:
        await _wait_until_mounted(path, process)
    except BaseException:
        await _let_go(image)
        raise
    return image


async def _wait_until_mounted(path: Path, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None and process.stderr is not None
    is_answered = await is_readable(process.stdout.fileno(), MOUNT_SECONDS)
    if is_answered and os.read(process.stdout.fileno(), 100).startswith(b"ready"):
        return
    process.kill()
    os.set_blocking(process.stderr.fileno(), False)
    said = b""
    with suppress(BlockingIOError):
        said = os.read(process.stderr.fileno(), 65536)
    text = " ".join(said.decode(errors="replace").split())[-MAX_SHOWN:]
    raise ContainerFailedError(f"the image {path} could not be mounted: {text or 'its program said nothing'}")


async def _let_go(image: HeldImage) -> None:
    """End the process that holds an image: at the end of its input it unmounts it."""
    process = image.process
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with suppress(OSError):
        process.stdin.close()
    if not await has_ended(process, END_SECONDS):
        process.kill()
        await has_ended(process, END_SECONDS)
    process.stdout.close()
    process.stderr.close()
    shutil.rmtree(image.work, ignore_errors=True)
