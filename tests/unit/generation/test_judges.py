"""How long the run waits for the judges that it starts, on fake actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import EngineError
from recipes.generation import judges as judges_module
from recipes.generation.judges import Judges


class Actor:
    """Takes its address after a while, as on a cluster where Ray starts thousands of processes."""

    def __init__(self, seconds: float) -> None:
        async def hold_address(_port: int | None) -> str:
            await asyncio.sleep(seconds)
            return "http://node:3000/v1"

        self.hold_address = SimpleNamespace(remote=hold_address)
        self.shutdown = SimpleNamespace(remote=lambda: None)


def launch(monkeypatch: pytest.MonkeyPatch, *, placement: float, takes: float) -> Judges:
    made = SimpleNamespace(remote=lambda *_args, **_options: Actor(takes))
    ray = SimpleNamespace(
        remote=lambda _actor: SimpleNamespace(options=lambda **_options: made),
        wait=lambda calls, **_options: (calls, []),
        kill=lambda _actor: None,
    )
    monkeypatch.setattr(judges_module, "ray", ray)
    judge: Any = SimpleNamespace(name="equivalence", num_copies=1)
    deadlines: Any = SimpleNamespace(placement=placement, shutdown=5.0)
    return Judges.launch([judge], placement=[{}], ports=(3000, 4999), deadlines=deadlines)


def test_judges_have_as_long_to_be_placed_as_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"judge equivalence at no address yet: no answer within 0\.1 s"):
        launch(monkeypatch, placement=0.1, takes=30.0)
    judges = launch(monkeypatch, placement=30.0, takes=0.2)
    assert judges.addresses() == {"equivalence": ["http://node:3000/v1"]}
    judges.shutdown()
