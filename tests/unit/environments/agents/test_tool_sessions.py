"""Sessions of tools that fail, and that each is closed however its rollout ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from recipes.environments.contract.verifier import NoVerdict, Response, Verdict, env_failed
from recipes.environments.environments import Environments
from recipes.environments.scoring.clients import LocalSession, Session, ToolFailedError, VerifierClient
from recipes.errors import EngineError
from recipes.types import Completion, RolloutStatus, Row
from tests.unit.environments.agents.tool_case import (
    DONE,
    ROW,
    SEND,
    Scripted,
    called,
    made_environments,
)

environments = pytest.fixture(made_environments)


@dataclass
class Broken:
    """A verifier whose session cannot be opened, or whose tools fail."""

    opened: bool

    async def open(self, row: Row) -> Session | NoVerdict:
        return self if self.opened else env_failed("no seat is free")

    async def call(self, name: str, arguments: Any) -> str:
        raise ToolFailedError("the server is gone")

    async def verify(self, *given: Any) -> Verdict | NoVerdict:
        raise AssertionError("a failed rollout is not scored")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("opened", "reason"), [(False, "no seat is free"), (True, "the server is gone")])
async def test_a_failed_environment_is_no_reward(environments: Environments, opened: bool, reason: str) -> None:
    environments.wrap_verifiers(lambda _: Broken(opened))
    model = Scripted(environments.codec, [called("email_send_email", **SEND)])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, rollout.reward, rollout.reason) == (RolloutStatus.ENV_FAILED, None, reason)


@dataclass
class Noting:
    """A verifier that notes which of its sessions were closed, and how many opened."""

    inner: VerifierClient
    opened: int = 0
    closed: int = 0

    async def open(self, row: Row) -> Session | NoVerdict:
        session = await self.inner.open(row)
        assert isinstance(session, LocalSession)
        self.opened += 1
        return NotingSession(session, self)

    async def verify(self, *given: Any) -> Any:
        raise AssertionError("a session has a verdict of its own")


@dataclass
class NotingSession:
    """A session of `Noting`."""

    inner: LocalSession
    client: Noting

    async def call(self, name: str, arguments: Any) -> str:
        return await self.inner.call(name, arguments)

    async def verify(self, response: Response) -> Verdict | NoVerdict:
        return await self.inner.verify(response)

    async def close(self) -> None:
        self.client.closed += 1


async def test_a_session_is_closed_however_its_rollout_ends(environments: Environments) -> None:
    noting: list[Noting] = []

    def wrapped(client: VerifierClient) -> Noting:
        noting.append(Noting(client))
        return noting[-1]

    environments.wrap_verifiers(wrapped)
    codec, says = environments.codec, [called("email_send_email", **SEND), DONE]

    class Dying(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            raise EngineError("engine 0 died")

    class Hanging(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            await asyncio.sleep(3600)
            raise AssertionError

    await environments.run(ROW, Scripted(codec, says), max_tokens=64)
    await environments.run(ROW, Scripted(codec, says, room=1), max_tokens=64)
    with pytest.raises(EngineError):
        await environments.run(ROW, Dying(codec, says), max_tokens=64)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(environments.run(ROW, Hanging(codec, says), max_tokens=64), timeout=0.5)
    (used,) = [client for client in noting if client.opened]
    assert (used.opened, used.closed) == (4, 4)


async def test_a_row_that_cannot_be_scored_costs_no_model_call(environments: Environments) -> None:
    model = Scripted(environments.codec, [DONE])
    rollout = await environments.run({**ROW, "ground_truth": 5}, model, max_tokens=64)
    assert (rollout.status, model.prompts) == (RolloutStatus.ENV_FAILED, [])
