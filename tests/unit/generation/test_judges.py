"""How long the run waits for the judges that it starts, on fake actors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import ConfigError, EngineError, Problem, RunError
from recipes.generation import judges as judges_module
from recipes.generation.judges import Judges
from tests.configuration import block


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


def launch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    placement: float,
    takes: float,
    faults: Sequence[Exception | None] = (),
    num_copies: int = 1,
) -> Judges:
    """Launch a judge whose first actors fail as `faults` says, in the order in which they are made."""
    to_come = iter(faults)
    made = SimpleNamespace(remote=lambda *_args, **_options: Actor(takes, next(to_come, None)))
    ray = SimpleNamespace(
        remote=lambda _actor: SimpleNamespace(options=lambda **_options: made),
        wait=lambda calls, **_options: (calls, []),
        kill=lambda _actor: None,
    )
    monkeypatch.setattr(judges_module, "ray", ray)
    monkeypatch.setattr(judges_module, "node_of", lambda _options: "n3")
    judge: Any = SimpleNamespace(name="equivalence", num_copies=num_copies)
    deadlines: Any = SimpleNamespace(placement=placement, engine_start=5.0, shutdown=5.0)
    cfg = block("policy.generation", max_starts=2, min_share_up=0.5)
    return Judges.launch([judge], placement=[{}] * num_copies, cfg=cfg, deadlines=deadlines)


def test_judges_have_as_long_to_be_placed_as_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = r"judge equivalence, copy 0: start 1 of 2 failed on node n3: no answer within 0\.1 s"
    with pytest.raises(RunError, match=reason):
        launch(monkeypatch, placement=0.1, takes=30.0)
    judges = launch(monkeypatch, placement=30.0, takes=0.2)
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    judges.shutdown()


def test_a_copy_that_gets_no_address_is_started_again_and_may_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = EngineError("no room")
    judges = launch(monkeypatch, placement=30.0, takes=0.0, faults=[lost])
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    assert judges.starts.num_failed == 1
    judges.shutdown()
    judges = launch(monkeypatch, placement=30.0, takes=0.0, faults=[lost, None, lost], num_copies=2)
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    judges.shutdown()
    wrong = ConfigError(Problem(where="a key", wrong="vLLM has no such argument", fix="remove it"))
    with pytest.raises(RunError, match=r"copy 0: start 1 of 2 failed.*no such argument"):
        launch(monkeypatch, placement=30.0, takes=0.0, faults=[wrong])
