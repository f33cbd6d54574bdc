"""How long the run waits for the judges that it starts, on fake actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.cluster.placement import Place
from recipes.errors import ConfigError, EngineError, Problem, RunError
from recipes.generation import judges as judges_module
from recipes.generation.judges import Judges
from tests.configuration import block

SECONDS = 30.0  # far more than any wait here takes


class Actor:
    """Takes its address after a while, as on a cluster where Ray starts thousands of processes; may fail before."""

    def __init__(self, seconds: float, fault: Exception | None) -> None:
        async def hold_address(_port: int | None) -> str:
            if fault is not None:
                raise fault
            await asyncio.sleep(seconds)
            return "http://node:3000/v1"

        self.hold_address = SimpleNamespace(remote=hold_address)
        self.shutdown = SimpleNamespace(remote=lambda: None)


class Copy:
    """An actor of one of several copies. What the test has not allowed by name waits."""

    def __init__(self, url: str, allowed: set[str]) -> None:
        async def hold_address(_port: int | None) -> str:
            await self._allowed("address")
            return url

        async def watch(_seconds: float) -> None:
            await self._allowed("death")
            raise EngineError("its process died")

        self._url, self.may = url, allowed
        self.hold_address = SimpleNamespace(remote=hold_address)
        self.watch = SimpleNamespace(remote=watch)
        self.shutdown = SimpleNamespace(remote=lambda: None)

    async def _allowed(self, what: str) -> None:
        while what not in self.may:
            await asyncio.sleep(0.01)

    async def load(self) -> None:
        await self._allowed("model")


def launch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    placement: float,
    takes: float,
    faults: Sequence[Sequence[Exception]] = ((),),
) -> Judges:
    """Launch a judge with a copy for each entry of `faults`, whose first actors fail as it says, one after another."""
    to_come = [iter(of_copy) for of_copy in faults]

    def made(copy: int) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *_args, **_options: Actor(takes, next(to_come[copy], None)))

    ray = SimpleNamespace(
        remote=lambda _actor: SimpleNamespace(options=made),
        wait=lambda calls, **_options: (calls, []),
        kill=lambda _actor: None,
    )
    monkeypatch.setattr(judges_module, "ray", ray)
    monkeypatch.setattr(Place, "node", lambda _place: "n3")
    judge: Any = SimpleNamespace(name="equivalence", num_copies=len(faults))
    deadlines: Any = SimpleNamespace(placement=placement, engine_start=5.0, shutdown=5.0)
    cfg = block("policy.generation", max_starts=2, min_share_up=0.5)
    return Judges.launch(
        [judge], placement=[{"copy": copy} for copy in range(len(faults))], cfg=cfg, deadlines=deadlines
    )


def test_judges_have_as_long_to_be_placed_as_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = r"judge equivalence, copy 0: start 1 of 2 failed on node n3: no answer within 0\.1 s"
    with pytest.raises(RunError, match=reason):
        launch(monkeypatch, placement=0.1, takes=30.0)
    judges = launch(monkeypatch, placement=30.0, takes=0.2)
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    judges.shutdown()


def test_a_copy_that_gets_no_address_is_started_again_and_may_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = EngineError("no room")
    judges = launch(monkeypatch, placement=30.0, takes=0.0, faults=[[lost]])
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    assert judges.starts.num_failed == 1
    judges.shutdown()
    judges = launch(monkeypatch, placement=30.0, takes=0.0, faults=[[lost, lost], []])
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    judges.shutdown()
    wrong = ConfigError(Problem(where="a key", wrong="vLLM has no such argument", fix="remove it"))
    with pytest.raises(ConfigError, match="no such argument"):
        launch(monkeypatch, placement=30.0, takes=0.0, faults=[[wrong]])


def test_copies_are_asked_when_they_are_up_wherever_and_however_late_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (f"http://{node}:3000/v1" for node in ("n1", "n2", "n3"))
    actors = [Copy(a, {"address", "model"}), Copy(b, set()), Copy(c, {"address"})]
    made = SimpleNamespace(remote=lambda *_args, **_options: actors.pop(0))
    ray = SimpleNamespace(
        remote=lambda _actor: SimpleNamespace(options=lambda **_options: made),
        wait=lambda calls, **_options: (calls, []),
        kill=lambda _actor: None,
    )
    monkeypatch.setattr(judges_module, "ray", ray)
    monkeypatch.setattr(Place, "node", lambda _place: "n3")
    monkeypatch.setattr(judges_module.JudgeEngine, "load", lambda engine, _seconds: engine.actor.load())
    first, late, moved = actors
    judge: Any = SimpleNamespace(name="grader", num_copies=2)
    deadlines: Any = SimpleNamespace(placement=SECONDS, engine_start=SECONDS, shutdown=5.0)
    cfg = block("policy.generation", max_starts=2, min_share_up=0.5)
    judges = Judges.launch([judge], placement=[{}, {}], cfg=cfg, deadlines=deadlines)
    told: list[list[str]] = []

    def wait_for(urls: list[str]) -> None:
        end = time.monotonic() + SECONDS
        while told[-1] != urls:
            assert time.monotonic() < end, told
            time.sleep(0.01)

    try:
        assert judges.addresses() == {"grader": [a]}, "the run has this address only"
        judges.load()
        judges.subscribe(lambda addresses: told.append(list(addresses["grader"])))
        assert told == [[a]]
        late.may.add("address")
        time.sleep(0.1)
        assert told == [[a]], "it could not answer yet"
        late.may.add("model")
        wait_for([a, b])
        first.may.add("death")
        wait_for([b])
        moved.may.add("model")
        wait_for([c, b])
        assert judges.starts.missing() == {}
    finally:
        judges.shutdown()
