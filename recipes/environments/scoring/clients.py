"""How an agent reaches a verifier: in this process, or a resources server over HTTP. Both give the same verdicts.

A client always answers, within its deadline: with a verdict, or with the reason why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipes.environments.contract.asking import Replies, advance
from recipes.environments.contract.verdict import NoVerdict, Response, Verdict, env_failed
from recipes.environments.contract.verifier import Verifier
from recipes.environments.http.client import JsonClient, JsonReply, RefusedError
from recipes.environments.judges.client import JudgeClient, JudgeFailedError
from recipes.environments.scoring.pool import Scored, ScoringPool
from recipes.retry import NoReplyError, RetryPolicy, reply_within
from recipes.types import RolloutStatus, Row

RETRIES = RetryPolicy(max_retries=2, first_seconds=0.2, jitter=0.25)


class VerifierClient(Protocol):
    """What agents, and wrappers such as the benchmark's, know of a verifier."""

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row. Never raises for a failed environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessVerifier:
    """Scores in this process when that is cheap, else in a scoring process of the pool."""

    name: str
    verifier: Verifier
    settings: Mapping[str, Any]
    pool: ScoringPool
    timeout_seconds: float
    judge: JudgeClient | None = None  # of a verifier that needs one

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row, and ask the judge as often as the verifier needs."""
        try:
            task = self.verifier.parse_task(row, self.settings)
            replies: list[list[Response]] = []
            while isinstance(scored := await self._advance(task, response, replies), list):
                if self.judge is None:
                    return env_failed(f"{self.name}: it asks a judge, and none is configured")
                replies.append(await self.judge.ask(scored))
            return scored
        except JudgeFailedError as error:
            return NoVerdict(status=RolloutStatus.JUDGE_FAILED, reason=f"{self.name}: {error}")
        except Exception as error:  # an environment that fails is a value with a reason, not the end of the run
            return env_failed(f"{self.name}: {type(error).__name__}: {error}")

    async def _advance(self, task: Any, response: Response, replies: Replies) -> Scored:
        if self.verifier.is_cheap(task):
            return advance(self.verifier.score(response, task), replies)
        return await self.pool.score(self.verifier, task, response, replies=replies, seconds=self.timeout_seconds)


@dataclass(slots=True, kw_only=True)
class HttpVerifier:
    """Asks a resources server: `POST /seed_session`, then `POST /verify` with the session's cookies.

    Transport errors and statuses that may pass are tried again, within the deadline; other answers are final.
    """

    name: str
    url: str
    timeout_seconds: float
    http: JsonClient = field(default_factory=JsonClient)

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row on the server."""
        sent = {**row, "response": response}

        async def ask() -> JsonReply:
            session = await self.http.post(f"{self._base}/seed_session", row)
            return await self.http.post(f"{self._base}/verify", sent, cookies=session.cookies)

        try:
            reply = await reply_within(self.timeout_seconds, ask, RETRIES)
            return self._read(reply.body, sent)
        except (NoReplyError, RefusedError, ValueError, TypeError) as error:  # TypeError: a row that JSON cannot carry
            return env_failed(f"{self.name}: {self.url}: {error}")

    @property
    def _base(self) -> str:
        return self.url.rstrip("/")

    def _read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Verdict | NoVerdict:
        """Return the verdict in a reply: the row and response as sent, `reward`, and the verifier's extras."""
        failure = reply.get("_ng_failure_class")
        if failure is not None:
            status = RolloutStatus.JUDGE_FAILED if failure == "judge_failed" else RolloutStatus.ENV_FAILED
            reason = reply.get("_ng_failure_judge_error") or "no reason given"
            return NoVerdict(status=status, reason=f"{self.name}: {failure}: {reason}")
        reward = reply.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RefusedError(f"/verify answered reward {reward!r}, expected a finite number")
        extras = {key: value for key, value in reply.items() if key not in sent and key not in ("reward", "reason")}
        instance = reply.get("instance_config")
        return Verdict(
            reward=float(reward),
            reason=str(reply.get("reason") or f"rewarded {reward:g} by {self.url}"),
            metrics={key: float(value) for key, value in extras.items() if isinstance(value, int | float)},
            details={key: value for key, value in extras.items() if value is None or isinstance(value, str)},
            is_flagged=isinstance(instance, Mapping) and bool(instance.get("mask_sample")),
        )
