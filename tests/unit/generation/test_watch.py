"""How the driver watches an engine: real connections to fake actors, of which another starts when one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.cluster.ports import hold
from recipes.errors import EngineError
from recipes.generation import generation as generation_module
from recipes.generation.clients import client as client_module
from recipes.generation.generation import Generation
from recipes.generation.serving.outstanding import Listener, OutstandingRequests

SECONDS = 30.0  # far more than any wait here takes
DEADLINES: Any = SimpleNamespace(generation=SECONDS, engine_start=SECONDS, refit=SECONDS, shutdown=SECONDS)
MAX_STARTS = 3
CONFIG: Any = SimpleNamespace(
    vllm_cfg=SimpleNamespace(max_model_len=16, tensor_parallel_size=1, pipeline_parallel_size=1),
    max_starts=MAX_STARTS,
    min_share_up=1.0,
)
INFO: Any = {"import_seconds": 0.0, "engine_seconds": 0.0}


class Handle:
    """Stands in for `EngineHandle`; `is_reachable` says whether clients can connect to the actors that start."""

    def __init__(self) -> None:
        self.actor = SimpleNamespace(update_weights=SimpleNamespace(remote=lambda *_args, **_options: None))
        self.can_see_file = True
        self.index, self.is_up, self.num_starts, self.num_kills, self.is_reachable = 0, True, 0, 0, True
        self.name, self.num_moves, self.place = "engine A", 0, self

    def __str__(self) -> str:
        return "engine A"

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.num_starts

    async def launch(self) -> Any:
        self.num_starts += 1
        engine: Any = SimpleNamespace(is_dead=False)
        self.listener = await Listener.start(OutstandingRequests(engine), hold(0, host="127.0.0.1"))
        self.address = self.listener.address
        if not self.is_reachable:
            self.listener.close()
        return SimpleNamespace(address=self.address, **INFO)

    def started(self, _info: Any) -> None:
        self.is_up = True

    def node(self) -> str:
        return "n7"

    def move(self) -> str:
        self.num_moves += 1
        return "somewhere"

    def kill(self) -> None:
        self.is_up = False
        self.num_kills += 1
        self.listener.close()


class Case:
    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.generation = Generation(
            [handle],  # type: ignore[list-item]
            cfg=CONFIG,
            deadlines=DEADLINES,
            loads_weights=True,
        )

    async def connected(self) -> Any:
        """Wait for the connection to the engine and return its stream."""
        await eventually(lambda: self.generation._client._streams[0]._writer is not None)
        return self.generation._client._streams[0]


async def eventually(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    handle = Handle()
    await handle.launch()
    made = Case(handle)
    yield made
    await asyncio.to_thread(made.generation._background.end, SECONDS)
    handle.listener.close()


def cut(case: Case, stream: Any) -> None:
    case.generation._loop.call_soon_threadsafe(stream._writer.transport.abort)


async def test_a_connection_that_breaks_costs_no_engine(case: Case) -> None:
    for _ in range(3):
        stream = await case.connected()
        cut(case, stream)
        await eventually(lambda: case.generation._client._streams[0] is not stream)  # noqa: B023
    assert case.handle.is_up and case.handle.num_kills == 0
    assert case.generation.num_engines_alive == 1


async def test_a_broadcast_ends_at_the_first_engine_that_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    await case.connected()
    case.generation._is_nccl = True  # as `connect_weights` leaves it for NCCL
    case.generation._connected = frozenset({case.handle.key})
    asked: list[bool] = []

    def outcomes(calls: dict[Any, Any], _seconds: float, *, stop_at_failure: bool = False) -> dict[Any, Any]:
        asked.append(stop_at_failure)
        return {case.handle: EngineError("engine A is dead")}

    monkeypatch.setattr(generation_module, "outcomes", outcomes)
    with pytest.raises(EngineError, match="engine A is dead"):
        case.generation.update_weights(1)
    assert asked == [True], "the engines that wait in the broadcast are not waited for"


async def test_an_engine_that_takes_no_connection_any_more_is_started_again(case: Case) -> None:
    stream = await case.connected()
    case.handle.listener.close()
    cut(case, stream)
    await eventually(lambda: case.handle.num_starts == 2 and case.generation.num_engines_alive == 1)
    assert case.handle.num_kills == 1


async def test_an_engine_that_starts_and_cannot_be_reached_stays_closed(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await case.connected()
    case.handle.is_reachable = False
    case.handle.listener.close()
    cut(case, stream)
    await eventually(lambda: "stays away after" in caplog.text)
    assert case.handle.num_starts == 1 + MAX_STARTS
    assert case.handle.num_moves == MAX_STARTS - 1, "each further start is tried elsewhere, if that is free"
    assert not case.handle.is_up
    reason = f"start {MAX_STARTS} of {MAX_STARTS} failed on node n7: the generation engine at 127.0.0.1, port "
    assert f"engine A: {reason}" in caplog.text
    assert case.generation.starts.missing()["engine A"].startswith(reason)
    assert case.generation.starts.num_failed == MAX_STARTS
