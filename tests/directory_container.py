"""Containers for tests of what works in them: a bash in a directory that is a copy of the image, and no isolation.

The image is a directory. Every container is copied to the same place, so that a task's workspace is a fixed path, and
only one can be open at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recipes.environments.swe.contract import (
    CommandResult,
    Container,
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
)


@dataclass
class DirectoryShell:
    """A bash whose commands are files that it reads."""

    process: asyncio.subprocess.Process
    home: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, command: str, *, seconds: float, max_characters: int) -> CommandResult:
        assert self.process.stdin is not None and self.process.stdout is not None
        base = self.home / f"{self.process.pid}_{next(self.numbers)}"
        base.with_suffix(".sh").write_text(command, encoding="utf-8", errors="surrogateescape")
        line = f". {base}.sh </dev/null >{base}.out 2>&1; echo $?\n"
        self.process.stdin.write(line.encode())
        reading = asyncio.ensure_future(self.process.stdout.readline())
        done, _ = await asyncio.wait({reading}, timeout=seconds)
        if not done:
            children = (
                Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="utf-8").split()
            )
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        status = int((await reading).decode() or -1)
        output = base.with_suffix(".out").read_bytes().decode("utf-8", "replace")
        dropped = max(len(output) - max_characters, 0)
        half = max_characters // 2
        cut = f"\n[{dropped} characters left out]\n"
        kept = output if not dropped else output[:half] + cut + output[len(output) - (max_characters - half) :]
        return CommandResult(status=status if done else None, output=kept, num_dropped=dropped)

    async def enter(self, command: str, *, seconds: float) -> CommandResult:
        return await self.run(command, seconds=seconds, max_characters=1000)


@dataclass
class DirectoryContainer:
    """A copy of the image's directory, at a fixed place."""

    place: Path
    home: Path
    ended: ContainerEndedError | None = None
    shells: list[DirectoryShell] = field(default_factory=list)
    is_closed: bool = False

    async def open_shell(self) -> DirectoryShell:
        if self.ended:
            raise self.ended
        process = await asyncio.create_subprocess_exec(
            "bash",
            "--noprofile",
            "--norc",
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.shells.append(DirectoryShell(process, self.home))
        return self.shells[-1]

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        if self.ended:
            raise self.ended
        try:
            with Path(path).open("rb") as file:
                return file.read(max_bytes)
        except OSError as error:
            raise FileNotFoundError(path) from error

    async def write_file(self, path: str, content: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)

    @property
    def peak_memory_mib(self) -> float:
        return 1.0

    async def close(self) -> None:
        self.is_closed = True
        for shell in self.shells:
            if shell.process.returncode is None:
                shell.process.kill()
                await shell.process.wait()
        shutil.rmtree(self.place)


@dataclass
class DirectoryRuntime:
    """Starts one container at a time, at `root/work`; `wrap` puts something around each."""

    root: Path
    wrap: Callable[[DirectoryContainer], Container] = lambda container: container
    started: list[DirectoryContainer] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "directory"

    @property
    def workspace(self) -> str:
        return str(self.root / "work")

    async def start(self, image: str, limits: ContainerLimits) -> Container:
        assert all(container.is_closed for container in self.started), "two containers at once"
        if not Path(image).is_dir():
            raise ContainerFailedError(f"{image} is no image")
        home = self.root / f"home{len(self.started)}"
        home.mkdir()
        shutil.copytree(image, self.workspace, symlinks=True)
        self.started.append(DirectoryContainer(Path(self.workspace), home))
        return self.wrap(self.started[-1])
