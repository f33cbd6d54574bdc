"""The pipes to a container's programs: where they cannot be made, the container ends, and no patch is blamed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.environments.swe.containers.container import ContainerStart, RunningContainer
from recipes.environments.swe.containers.processes import number_inside
from recipes.environments.swe.contract import ContainerEnd, ContainerEndedError, ContainerLimits

PIPE = subprocess.PIPE


@pytest.fixture
async def container(tmp_path: Path):
    """A container whose first process is a program that reads requests and starts nothing."""
    launch = ContainerStart(words=["cat"], environment={}, directory=tmp_path, owner=os.geteuid(), token="x")
    process = subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0)
    running = RunningContainer(launch, process, ContainerLimits(memory_mib=64))
    yield running
    await running.close()


def full(*_arguments: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def crowded(*_arguments: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("call", "fails", "why"), [("mkfifo", full, "No space"), ("open", crowded, "Too many open")])
async def test_pipes_that_cannot_be_made_end_the_container(container, tmp_path, monkeypatch, call, fails, why):
    for use in (
        container.open_shell,
        lambda: container.write_file("/tmp/x", b""),  # a plain OSError would be the container's refusal
        lambda: container.read_file("/tmp/x", max_bytes=1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            with pytest.raises(ContainerEndedError, match=f"its pipes cannot be made: .*{why}") as caught:
                await use()
        assert caught.value.end is ContainerEnd.DIED
        assert list(tmp_path.iterdir()) == []


async def test_a_lost_directory_of_pipes_is_no_missing_file(container, tmp_path):
    tmp_path.rmdir()
    with pytest.raises(ContainerEndedError, match="its pipes cannot be made"):
        await container.read_file("/tmp/x", max_bytes=1)


NAMED = "open('/proc/self/comm', 'wb').write({name!r})\nprint()\nimport sys\nsys.stdin.read()"


@pytest.mark.parametrize("name", [b"\rNSpid: 1", b"\rNSpid: x", b"\x0cNSpid:\t1", b"\xff", b"a\nNSpid: 1"])
def test_a_process_cannot_name_its_number(name: bytes) -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED.format(name=name)], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert number_inside(process.pid) == process.pid
        finally:
            process.kill()
