"""What a program beside a container may ask of it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import dataclass, field

import pytest

from recipes.environments.agents.programs import process as bridges
from recipes.environments.agents.programs.process import Bridge, bridge_to
from recipes.environments.swe.contract import CommandResult


@dataclass
class Recording:
    """A shell that notes how long each command may take."""

    seconds: list[float] = field(default_factory=list)

    async def run(self, command: str, *, seconds: float, max_characters: int) -> CommandResult:
        self.seconds.append(seconds)
        return CommandResult(status=0, output=command)


@pytest.mark.parametrize(
    ("asked", "given"),
    [("5", 5.0), ("0", 1.0), ("-Infinity", 1.0), ("1e9", 60.0), ("Infinity", 60.0), ("NaN", 60.0), ('"nan"', 60.0)],
)
async def test_a_command_has_at_most_the_time_of_the_bridge(asked: str, given: float) -> None:
    shell = Recording()
    bridge = Bridge(shell=shell, seconds=60.0, descriptor=-1)  # type: ignore[arg-type]
    answer = await bridge.answer(b'{"command": "ls", "lasting": true, "seconds": %s}' % asked.encode())
    assert answer == {"output": "ls", "status": 0} and shell.seconds == [given]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"command": "ls", "seconds": 1%s}' % (b"0" * 400)])
async def test_a_wrong_request_is_a_command_that_failed(line: bytes) -> None:
    bridge = Bridge(shell=Recording(), seconds=60.0, descriptor=-1)  # type: ignore[arg-type]
    answer = await bridge.answer(line)
    assert answer["status"] == 2 and answer["output"].startswith("the command was not run: ")


async def replies_to(request: bytes) -> bytes:
    """Return what a program reads after one request."""
    async with bridge_to(Recording(), seconds=60.0) as bridge:  # type: ignore[arg-type]
        with socket.socket(fileno=os.dup(bridge.descriptor)) as ours:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(request)
            async with asyncio.timeout(30):
                return await reader.readline()


async def test_a_command_that_is_too_long_is_answered() -> None:
    answer = json.loads(await replies_to(json.dumps({"command": "\u00e9" * 400_000}).encode() + b"\n"))
    assert answer["status"] == 2 and "the command has 400000 characters" in answer["output"]


async def test_a_request_beyond_all_bounds_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "MAX_LINE", 1000)
    assert await replies_to(b"x" * 5000 + b"\n") == b""
