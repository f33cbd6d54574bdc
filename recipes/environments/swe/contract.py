"""What the parts of a task in a repository are to each other: the task, its container, how an agent ended, the verdict.

`task.py` reads rows and finds images, `containers/` starts them by the program that the machine has, `agents/coding/`
works in one, and `evaluation.py` runs the hidden tests in another. They meet only here.

What an agent must not see is not in its container: it is given a `SweTask.public`, never the task itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

KEPT_CHARACTERS = 2**19  # that a shell keeps of the beginning of an output, and as many of its end


@dataclass(frozen=True, slots=True, kw_only=True)
class SweTask:
    """One instance of a data set, as its row says."""

    id: str
    dataset: str  # name of the data set, which decides how it is evaluated
    repository: str  # "owner/name"
    base_commit: str
    problem: str
    gold_patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str  # file of its container image; empty until it is looked up
    workspace: str = "/testbed"  # directory of the repository in the image
    public: Mapping[str, str] = field(default_factory=dict)  # the fields of the row that an agent may see
    facts: Mapping[str, Any] = field(default_factory=dict)  # the whole instance, for the evaluation only


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """What all processes of one container together may use."""

    memory_mib: int
    processes: int = 512
    disk_mib: int = 8192  # of its writable layer
    file_mib: int = 2048  # of one file


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How one command ended. Its output is that of both streams, in the order in which it came."""

    status: int | None  # None: it ran out of its time, and was interrupted
    output: str
    num_dropped: int = 0  # characters that were cut out of the middle of the output; a line there says so, too


class ContainerFailedError(Exception):
    """A container could not be started: the program or the image is missing or broken. The task gets no verdict."""


class ContainerEnd(StrEnum):
    """Why a container ended before it was closed."""

    MEMORY = "memory"  # its processes used more than their limit
    DISK = "disk"
    DIED = "died"  # it was killed from outside, or its program failed


class ContainerEndedError(Exception):
    """A container has ended, and nothing can run in it any more."""

    def __init__(self, end: ContainerEnd, detail: str = "") -> None:
        super().__init__(f"the container ended: {end}{f' ({detail})' if detail else ''}")
        self.end = end


class Shell(Protocol):
    """A bash that keeps its directory and its variables from command to command."""

    async def run(self, command: str, *, seconds: float, max_characters: int) -> CommandResult:
        """Run a command. One that is late is interrupted, and the shell stays usable with what it had.

        Where a command ends the shell itself, a new one takes its place in the directory in which the command began,
        and the last line of the output says so.

        Raises `ContainerEndedError`.
        """
        ...

    async def enter(self, command: str, *, seconds: float) -> CommandResult:
        """Run a command now, and first in every shell that takes the place of this one."""
        ...


class Container(Protocol):
    """A running image with a writable layer of its own. Raises `ContainerEndedError` once it has ended."""

    async def open_shell(self) -> Shell:
        """Return a new shell, in the root directory, with the environment of the image."""
        ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return the first bytes of a file; raises `FileNotFoundError` for a path that is no readable file."""
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file whole; its directory is made. Raises `OSError` where the container refuses."""
        ...

    @property
    def peak_memory_mib(self) -> float:
        """The most memory that its processes had together."""
        ...

    async def close(self) -> None:
        """End it: no process, mount or file of it is left. Never raises."""
        ...


class Runtime(Protocol):
    """The program that runs containers on this machine."""

    @property
    def name(self) -> str:
        """apptainer, podman or bwrap."""
        ...

    async def start(self, image: str, limits: ContainerLimits) -> Container:
        """Start an image without a network; raises `ContainerFailedError`."""
        ...


class AgentEnd(StrEnum):
    """How an agent's work on a task ended."""

    FINISHED = "finished"
    MAX_TURNS = "max_iteration"
    CONTEXT = "context_window"
    STUCK = "stuck_in_loop"
    MEMORY = "oom"
    TIME = "timeout"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the hidden tests say of a patch."""

    resolved: bool
    reason: str  # which tests failed, or why none ran
    is_late: bool = False  # the tests ran out of their time
    out_of_memory: bool = False
    failed: str = ""  # why there is no result, when the evaluation itself failed; then there is no verdict
    peak_memory_mib: float = 0.0


class Evaluator(Protocol):
    """Runs the hidden tests of a task in a fresh container, with a patch applied."""

    async def __call__(self, task: SweTask, patch: str) -> Evaluation: ...
