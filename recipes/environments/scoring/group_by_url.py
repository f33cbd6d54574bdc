"""A verifier of groups elsewhere: all answers to a row are sent at once, and one reward comes back for each.

    POST <url>/compare   {"conversation_history": [...], "response_objs": [...], "principle": ...}
    200                  {"rewards": [...], ...}, a number per answer; null where an answer has no verdict

NeMo Gym's server of `genrm_compare` answers it, and so does ours (`make serve-env NAME=genrm_compare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.verdict import NoVerdict, Pending, Response, Verdict, env_failed
from recipes.environments.http.client import JsonClient, RefusedError
from recipes.environments.scoring.clients import MAX_REASON, MAX_REWARD, RETRIES, is_number
from recipes.retry import NoReplyError, reply_within
from recipes.types import RolloutStatus, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGroupClient:
    """Has groups scored by a resources server."""

    name: str
    url: str
    timeout_seconds: float  # for one group
    http: JsonClient = field(default_factory=JsonClient)

    async def verify(self, row: Row, response: Response) -> Pending:
        """Let the answer wait for those of its group."""
        del row
        return Pending(response=response)

    async def open(self, row: Row) -> NoVerdict:
        """Refuse a session: answers that are compared call no tools."""
        del row
        return env_failed(f"{self.name}: it has no tools")

    async def score(self, row: Row, responses: Sequence[Response]) -> list[Verdict | NoVerdict]:
        """Score the answers to one row. Never raises for a failed environment."""
        if len(responses) < 2:  # a server rewards a single answer with a constant
            alone = NoVerdict(status=RolloutStatus.ABORTED, reason="there is no other answer to compare with")
            return [alone] * len(responses)
        try:
            body = {**_conversation(row), "response_objs": list(responses)}
            address = f"{self.url.rstrip('/')}/compare"
            reply = await reply_within(self.timeout_seconds, lambda: self.http.post(address, body), RETRIES)
            return self._read(reply.body, len(responses))
        except (NoReplyError, RefusedError, ValueError, TypeError) as error:  # TypeError: a row that JSON cannot carry
            return [env_failed(f"{self.name}: {self.url}: {error}")] * len(responses)

    def _read(self, reply: Mapping[str, Any], count: int) -> list[Verdict | NoVerdict]:
        rewards, reasons = reply.get("rewards"), reply.get("reasons")
        if not isinstance(rewards, list) or len(rewards) != count:
            raise RefusedError(f"/compare answered {str(rewards)[:100]!r} as rewards, expected a list of {count}")
        said = reasons if isinstance(reasons, list) and len(reasons) == count else [None] * count
        return [self._verdict(reward, reason) for reward, reason in zip(rewards, said, strict=True)]

    def _verdict(self, reward: object, reason: object) -> Verdict | NoVerdict:
        if reward is None:
            failure = f"{self.name}: {reason or 'it gave no reason'}"[:MAX_REASON]
            return NoVerdict(status=RolloutStatus.JUDGE_FAILED, reason=failure)
        if not is_number(reward) or abs(reward) > MAX_REWARD:
            return env_failed(f"{self.name}: /compare answered reward {str(reward)[:100]!r}, expected a number or null")
        return Verdict(reward=float(reward), reason=str(reason or f"rewarded {reward:g} by {self.url}")[:MAX_REASON])


def _conversation(row: Row) -> dict[str, Any]:
    asked = row["responses_create_params"]["input"]
    history = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    principle = row.get("principle")
    return {"conversation_history": history} | ({} if principle is None else {"principle": principle})
