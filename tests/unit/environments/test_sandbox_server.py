"""The server that runs programs on this machine: the memory of a program, and a start that fails."""

from __future__ import annotations

import asyncio
import os
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.environments.sandbox import server as sandbox_server
from recipes.environments.sandbox.server import SandboxFailedError, SandboxServer, memory_mib

NOWHERE = ("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("total_gib", "places", "expected"), [(24, 4, 3072), (2048, 448, 2340), (256, 4, 4096), (4, 64, 1024)]
)
def test_programs_share_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, places: int, expected: int
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": total_gib << 18}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory_mib(places) == expected


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with one line for each start of a server that fails."""
    program, starts = tmp_path / "server.py", tmp_path / "starts"
    program.write_text(
        f"import sys\nprint('start', file=open({str(starts)!r}, 'a'))\nsys.exit('no bubblewrap')\n", encoding="utf-8"
    )
    monkeypatch.setattr(sandbox_server, "PROGRAM", program)
    monkeypatch.delenv("SANDBOX_TOKEN", raising=False)
    return starts


async def test_a_start_that_failed_is_remembered(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "FAILED_SECONDS", 600.0)
    server = SandboxServer()
    failures = await asyncio.gather(*(server.address(NOWHERE) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(failure, SandboxFailedError) for failure in failures), failures
    assert {str(failure) for failure in failures} == {"no sandbox could be started here: no bubblewrap"}
    assert starts.read_text(encoding="utf-8") == "start\n"
    monkeypatch.setattr(sandbox_server, "FAILED_SECONDS", 0.0)
    with pytest.raises(SandboxFailedError, match="no bubblewrap"):
        await server.address(NOWHERE)
    assert starts.read_text(encoding="utf-8") == "start\n" * 2


async def test_a_start_needs_no_thread_of_the_event_loop(starts: Path) -> None:
    loop, is_over = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, is_over.wait)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(SandboxFailedError, match="no bubblewrap"):
                await SandboxServer().address(NOWHERE)
        assert not busy.done()
    finally:
        is_over.set()
        await busy


def test_a_request_that_is_none_is_refused_and_stops_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(sandbox_server.PROGRAM.parent))
    program = runpy.run_path(str(sandbox_server.PROGRAM), run_name="sandbox")
    read = program["Execution"].parse
    for said in ("", "1" * 5_000, "[" * 100_000, '{"generated_code": ' + "[" * 100_000, "[1]", "{}"):
        with pytest.raises(program["RequestError"], match="not a request to execute"):
            read(said.encode(), "s")
    for field in ('"timeout": NaN', '"timeout": "nan"', '"max_output_characters": Infinity', '"timeout": {}'):
        with pytest.raises(program["RequestError"], match="not a request to execute"):
            read(f'{{"generated_code": "1", {field}}}'.encode(), "s")
    assert read(b'{"generated_code": "1", "timeout": 1e999}', "s").seconds == program["MAX_SECONDS"]
