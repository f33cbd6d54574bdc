"""What is checked: a verifier in this process with a judge and a sandbox of its own, or a resources server by URL.

A target says how an answer to a row is rewarded. One whose dependencies are dead has the same form.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from recipes.environments.contract.responses import message_item, response_object
from recipes.environments.contract.verdict import NoVerdict, Response, Verdict
from recipes.environments.contract.verifier import Verifier
from recipes.environments.http.client import JsonClient
from recipes.environments.instances import servers_of
from recipes.environments.judges.client import JudgeClient
from recipes.environments.office.tables import paths_of_tables
from recipes.environments.registry import GROUP_VERIFIERS, VERIFIERS
from recipes.environments.sandbox.client import SandboxClient, client_of
from recipes.environments.sandbox.server import Address, Place, SandboxServer
from recipes.environments.scoring.clients import HttpVerifier, InProcessVerifier
from recipes.environments.scoring.group import GroupClient
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.verifiers.workplace_assistant import TABLES
from recipes.errors import InputError, Problem
from recipes.types import Row
from tools.env_check.judge import REFERENCE, Judge

JUDGE_SECONDS = 5.0  # for one question; the judge of the checks answers at once
NOWHERE = "http://127.0.0.1:9"  # the port of `discard`, where nobody listens
# Settings that the recipe has and a verifier alone has not.
RECIPE_SETTINGS: Mapping[str, Mapping[str, Any]] = {"math_with_judge": {"should_use_judge": True}}


class Scorer(Protocol):
    """Gives verdicts; `InProcessVerifier` and `HttpVerifier` do."""

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One environment under check."""

    name: str
    url: str | None
    scorer: Scorer
    dead: Scorer | None  # the same with dependencies that do not answer, None where it needs none
    full: float  # the reward of a right answer, where no row shows another
    judge: Judge
    asks_judge: bool
    runs_programs: bool
    parse: Callable[[Row], object] | None  # reads a row; None where only the server can
    settings: Mapping[str, Any] = field(default_factory=dict)


class DeadSandbox(SandboxServer):
    """A sandbox that does not answer."""

    async def address(self, place: Place) -> Address:
        """Return an address at which nobody listens."""
        del place
        return Address(url=NOWHERE, token="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Scores an answer by comparing it with a reference answer; its reward is how far it is ahead of that."""

    group: GroupClient

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one answer in a group of two."""
        mine, other = await self.group.score(row, [response, response_object([message_item(REFERENCE)])])
        if isinstance(mine, NoVerdict) or isinstance(other, NoVerdict):
            return mine if isinstance(mine, NoVerdict) else other  # type: ignore[return-value]
        return replace(mine, reward=mine.reward - other.reward)


@dataclass(slots=True)
class Workshop:
    """Everything that targets share while they are checked; close it at the end."""

    examples: Path  # directory of example rows; a directory in it may hold what an environment's rows refer to
    http: JsonClient = field(default_factory=JsonClient)
    judge: Judge = field(default_factory=Judge)
    sandbox: SandboxServer = field(default_factory=SandboxServer)
    pool: ScoringPool = field(default_factory=lambda: ScoringPool(num_workers=1, cached_verdicts=0))
    _places: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)  # that are gone at the end

    def by_url(self, url: str, name: str, *, seconds: float) -> Target:
        """Return the target of a server elsewhere, of which nothing is known but its address and perhaps its type."""
        scorer = HttpVerifier(name=name, url=url, timeout_seconds=seconds, http=self.http)
        verifier = VERIFIERS.get(name)
        return Target(
            name=name, url=url, scorer=scorer, dead=None, full=verifier.rewards[1] if verifier else 1.0,
            judge=self.judge, asks_judge=True, runs_programs=True, parse=None,
        )  # fmt: skip

    def own(self, name: str, settings: Mapping[str, Any], *, seconds: float) -> Target:
        """Return the target of a verifier of ours; raises `InputError` for a wrong setting and for missing tables."""
        given = {**RECIPE_SETTINGS.get(name, {}), **self._example_tables(name), **settings}
        server = servers_of({name: {"resources_servers": {name: given}}})[name]
        if name in GROUP_VERIFIERS:
            return self._group(name, server.settings, seconds)
        verifier = VERIFIERS[name]
        if verifier.tools is not None:
            try:
                verifier.tools.start(server.settings)
            except ValueError as error:
                raise InputError(Problem(where=name, wrong=str(error), fix="get it, or correct the setting")) from error
        asks = verifier.needs_judge(server.settings)

        def scorer(judge: JudgeClient, sandbox: SandboxClient) -> InProcessVerifier:
            return InProcessVerifier(
                name=name, verifier=verifier, settings=server.settings, pool=self.pool, timeout_seconds=seconds,
                judge=judge if asks else None, sandbox=sandbox if verifier.needs_sandbox else None,
            )  # fmt: skip

        alive = scorer(self._judge(self.judge.url), client_of(server.settings, self.sandbox, self.http))
        dead = scorer(self._judge(NOWHERE), client_of(server.settings, DeadSandbox(), self.http))
        return Target(
            name=name, url=None, scorer=alive, dead=dead if asks or verifier.needs_sandbox else None,
            full=verifier.rewards[1], judge=self.judge, asks_judge=asks, runs_programs=_runs_python(verifier),
            parse=lambda row: verifier.parse_task(row, server.settings), settings=given,
        )  # fmt: skip

    def _example_tables(self, name: str) -> dict[str, str]:
        """Return the setting that names the office of the example rows, where the run's own office is not there."""
        stored = self.examples / name
        if name != "workplace_assistant" or Path(TABLES).is_dir() or not stored.is_dir():
            return {}
        place = tempfile.TemporaryDirectory(prefix="env-check-")
        self._places.append(place)
        for path in paths_of_tables(Path(place.name)):
            path.parent.mkdir(exist_ok=True)
            path.symlink_to((stored / path.name).resolve())
        return {"tables": place.name}

    def _group(self, name: str, settings: Mapping[str, Any], seconds: float) -> Target:
        verifier = GROUP_VERIFIERS[name]
        alive, dead = (
            Versus(
                group=GroupClient(
                    name=name, verifier=verifier, settings=settings, judge=self._judge(url), timeout_seconds=seconds
                )
            )
            for url in (self.judge.url, NOWHERE)
        )
        return Target(
            name=name, url=None, scorer=alive, dead=dead, full=0.0, judge=self.judge, asks_judge=True,
            runs_programs=False, parse=lambda row: verifier.parse_task(row, settings), settings=settings,
        )  # fmt: skip

    def _judge(self, url: str) -> JudgeClient:
        return JudgeClient(
            name="judge", urls=(url,), model="judge", params={}, timeout_seconds=JUDGE_SECONDS, max_concurrency=64,
            http=self.http,
        )  # fmt: skip

    async def close(self) -> None:
        """End the processes, servers and connections."""
        await self.http.close()
        self.pool.close()
        self.sandbox.close()
        self.judge.close()
        for place in self._places:
            place.cleanup()


def _runs_python(verifier: Verifier) -> bool:
    return verifier.needs_sandbox and verifier.tools is None
