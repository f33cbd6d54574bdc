"""How an agent reaches a verifier: in this process, or a resources server over HTTP. Both give the same verdicts.

A client always answers, within its deadline: with a verdict, or with the reason why there is none.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import httpx
import orjson

from recipes.environments.contract.verdict import NoVerdict, Response, Verdict, env_failed
from recipes.environments.contract.verifier import Verifier
from recipes.environments.scoring.pool import ScoringPool
from recipes.types import RolloutStatus, Row

_ATTEMPTS = 3
_FIRST_PAUSE_SECONDS = 0.2  # before the second attempt; doubles
_SHOWN_CHARS = 200  # of a server's error text


class VerifierClient(Protocol):
    """What agents, and wrappers such as the benchmark's, know of a verifier."""

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row. Never raises for a failed environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessVerifier:
    """Scores here, or in this process's scoring workers."""

    name: str
    verifier: Verifier
    settings: Mapping[str, Any]
    pool: ScoringPool
    timeout_seconds: float

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row."""
        try:
            task = self.verifier.parse_task(row, self.settings)
            if self.verifier.is_cheap(task):
                return self.verifier.score(response, task)
            async with asyncio.timeout(self.timeout_seconds):
                return await self.pool.score(self.name, task, response)
        except TimeoutError:
            return env_failed(f"{self.name}: no verdict within {self.timeout_seconds:g} s")
        except Exception as error:  # an environment that fails is a value with a reason, not the end of the run
            return env_failed(f"{self.name}: {type(error).__name__}: {error}")


class _Refused(Exception):  # noqa: N818 (an answer of the server, final)
    """The server gave an answer that no further attempt would change."""


class _Unreachable(Exception):  # noqa: N818 (a state of the server, worth another attempt)
    """The server could not be reached or failed on its side."""


@dataclass(slots=True, kw_only=True)
class HttpVerifier:
    """Asks a resources server: `POST /seed_session`, then `POST /verify` with the session's cookies.

    Transport errors and statuses of 500 and above are tried again, within the deadline; other answers are final.
    """

    name: str
    url: str
    timeout_seconds: float
    _clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = field(
        default_factory=WeakKeyDictionary
    )  # connections belong to the event loop that opened them

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row on the server."""
        deadline = time.monotonic() + self.timeout_seconds
        problem = "no attempt was made"
        for attempt in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    if attempt:
                        await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
                    _, cookies = await self._post("/seed_session", row, httpx.Cookies())
                    reply, _ = await self._post("/verify", {**row, "response": response}, cookies)
                return self._read(reply, {**row, "response": response})
            except TimeoutError:
                late = f"{self.name}: no verdict from {self.url} within {self.timeout_seconds:g} s"
                return env_failed(late if attempt == 0 else f"{late}; before that {problem}")
            except _Unreachable as error:
                problem = str(error)
            except (_Refused, ValueError, TypeError) as error:  # TypeError: a row that JSON cannot carry
                return env_failed(f"{self.name}: {self.url}: {error}")
        return env_failed(f"{self.name}: {self.url}: {problem} ({_ATTEMPTS} attempts)")

    async def _post(
        self, path: str, body: Mapping[str, Any], cookies: httpx.Cookies
    ) -> tuple[dict[str, Any], httpx.Cookies]:
        headers = {"content-type": "application/json"}
        if cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            reply = await self._client().post(self.url.rstrip("/") + path, content=orjson.dumps(body), headers=headers)
        except httpx.HTTPError as error:
            raise _Unreachable(f"{path}: {type(error).__name__}: {error}") from error
        if reply.status_code >= 500:
            raise _Unreachable(f"{path} answered {reply.status_code}: {reply.text[:_SHOWN_CHARS]}")
        if not reply.is_success:
            raise _Refused(f"{path} answered {reply.status_code}: {reply.text[:_SHOWN_CHARS]}")
        try:
            value = orjson.loads(reply.content)
        except orjson.JSONDecodeError as error:
            raise _Refused(f"{path} answered no JSON: {reply.text[:_SHOWN_CHARS]!r}") from error
        if not isinstance(value, dict):
            raise _Refused(f"{path} answered {reply.text[:_SHOWN_CHARS]!r}, expected an object")
        return value, reply.cookies

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                timeout=None,
                trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
                cookies=CookieJar(
                    DefaultCookiePolicy(allowed_domains=[])
                ),  # keeps none: a session's are sent explicitly
            )
        return self._clients[loop]

    def _read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Verdict | NoVerdict:
        """Return the verdict in a reply: the row and response as sent, `reward`, and the verifier's extras."""
        failure = reply.get("_ng_failure_class")
        if failure is not None:
            status = RolloutStatus.JUDGE_FAILED if failure == "judge_failed" else RolloutStatus.ENV_FAILED
            reason = reply.get("_ng_failure_judge_error") or "no reason given"
            return NoVerdict(status=status, reason=f"{self.name}: {failure}: {reason}")
        reward = reply.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise _Refused(f"/verify answered reward {reward!r}, expected a finite number")
        extras = {key: value for key, value in reply.items() if key not in sent and key not in ("reward", "reason")}
        instance = reply.get("instance_config")
        return Verdict(
            reward=float(reward),
            reason=str(reply.get("reason") or f"rewarded {reward:g} by {self.url}"),
            metrics={key: float(value) for key, value in extras.items() if isinstance(value, int | float)},
            details={key: value for key, value in extras.items() if value is None or isinstance(value, str)},
            is_flagged=isinstance(instance, Mapping) and bool(instance.get("mask_sample")),
        )
