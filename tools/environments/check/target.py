"""What is checked: a verifier in this process with a judge and a sandbox of its own, or a resources server by URL.

A target says how an answer to a row is rewarded. One whose dependencies are dead has the same form.

What a resources server answers to requests that no client should send: never a reward.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import NoVerdict, Response, Verdict, Verifier, message_item, response_object
from recipes.environments.instances import GROUP_VERIFIERS, VERIFIERS, servers_of
from recipes.environments.sandbox.client import SandboxClient, client_of
from recipes.environments.sandbox.server import Address, HostPort, SandboxServer
from recipes.environments.scoring.clients import GroupClient, HttpVerifier, InProcessVerifier, is_number
from recipes.environments.scoring.judge import JudgeClient
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.verifiers.office.tables import paths_of_tables
from recipes.environments.verifiers.workplace_assistant import TABLES
from recipes.errors import InputError, Problem
from recipes.exact_json import loads
from recipes.types import Row
from tools.environments.check.answers import KEY
from tools.environments.check.judge import REFERENCE, Judge

REQUEST_SECONDS = 30.0
MAX_READ = 1 << 20  # bytes of a reply that are looked at
BODIES: Mapping[str, bytes] = {
    "an empty body": b"",
    "cut JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "bytes that are no text": b"\xff\xfe",
    "deep nesting": b"[" * 100_000,
    "not a number": b'{"reward": NaN}',
}


async def first_problem(url: str, row: Mapping[str, Any]) -> str:
    """Return what a server answered wrongly to a malformed `/verify`, "" when it refused all of them."""
    bodies = {**BODIES, "a row without a response": json.dumps(row).encode()}
    bodies["a response of text"] = json.dumps({**row, "response": "x"}).encode()
    for name, body in bodies.items():
        status, reply = await asyncio.to_thread(_post, f"{url.rstrip('/')}/verify", body)
        if status is None:
            return f"{name}: {reply.decode(errors='replace')}"
        if 200 <= status < 300 and _has_reward(reply):
            return f"{name}: status {status} with a reward"
    return ""


def _post(url: str, body: bytes) -> tuple[int | None, bytes]:
    """Return status and body of a reply, or None and why there was none."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_SECONDS) as reply:
            return reply.status, reply.read(MAX_READ)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, ValueError) as error:
        return None, f"no answer: {getattr(error, 'reason', error)}".encode()


def _has_reward(reply: bytes) -> bool:
    try:
        found = loads(reply)
    except ValueError:
        return False
    failed = isinstance(found, dict) and (found.get("_ng_failure_class") or found.get("mask_sample"))
    return isinstance(found, dict) and not failed and is_number(found.get("reward"))


EXAMPLES = Path(__file__).resolve().parents[3] / "configs" / "environments" / "examples"
"""Rows of our own: a file per environment, `NAME.jsonl` and `NAME__*.jsonl`, and what they refer to."""
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
    exempt: Callable[[Row], Mapping[str, str]] = lambda row: (row.get(KEY) or {}).get("exempt") or {}
    """What an environment declares that a row rightly pays -> why; of a server elsewhere the row says it."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class DeadSandbox(SandboxServer):
    """A sandbox that does not answer."""

    async def address(self, host_port: HostPort) -> Address:
        """Return an address at which nobody listens."""
        del host_port
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
    _directories: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)  # that are gone at the end

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
            return self._group(name, server.settings, given, seconds)
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
            exempt=lambda row: verifier.exempt(verifier.parse_task(row, server.settings)),
        )  # fmt: skip

    def _example_tables(self, name: str) -> dict[str, str]:
        """Return the setting that names the office of the example rows, where the run's own office is not there."""
        stored = self.examples / name
        if name != "workplace_assistant" or Path(TABLES).is_dir() or not stored.is_dir():
            return {}
        directory = tempfile.TemporaryDirectory(prefix="env-check-")
        self._directories.append(directory)
        for path in paths_of_tables(Path(directory.name)):
            path.parent.mkdir(exist_ok=True)
            path.symlink_to((stored / path.name).resolve())
        return {"tables": directory.name}

    def _group(self, name: str, settings: Any, given: Mapping[str, Any], seconds: float) -> Target:
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
            runs_programs=False, parse=lambda row: verifier.parse_task(row, settings), settings=given,
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
        for directory in self._directories:
            directory.cleanup()


def _runs_python(verifier: Verifier) -> bool:
    return verifier.needs_sandbox and verifier.tools is None
