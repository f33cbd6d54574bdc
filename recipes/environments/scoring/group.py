"""How the answers of a group reach the verifier that scores them together.

A rollout of such a verifier ends without a verdict and keeps its answer. Once all rollouts of the group have ended,
`GroupClient.score` gives each answer its verdict. Answers are told apart by their place in the group, so nothing of
another group, or of an earlier attempt at the same prompt, can be taken for them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from recipes.environments.contract.group import GroupVerifier
from recipes.environments.contract.verdict import NoVerdict, Pending, Response, Verdict, env_failed
from recipes.environments.judges.client import SHORTENED, JudgeClient
from recipes.types import Rollout, RolloutStatus, Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClient:
    """Scores groups in this process, with the replies of a judge."""

    name: str
    verifier: GroupVerifier
    settings: Mapping[str, Any]
    judge: JudgeClient | None
    timeout_seconds: float  # for one group

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
        try:
            return await self._score(row, responses)
        except Exception as error:  # an environment that fails is a value with a reason, not the end of the run
            logger.warning("a group was not scored", exc_info=True)
            return [env_failed(f"{self.name}: {type(error).__name__}: {error}")] * len(responses)

    async def _score(self, row: Row, responses: Sequence[Response]) -> list[Verdict | NoVerdict]:
        end = time.monotonic() + self.timeout_seconds
        scoring = self.verifier.score(responses, self.verifier.parse_task(row, self.settings))
        try:
            questions, num_shortened = next(scoring), 0
            while True:
                if self.judge is None:
                    raise ValueError("it asks a judge, and none is configured")
                replies = await self.judge.ask_each(questions, seconds=max(end - time.monotonic(), 0.0))
                num_shortened += sum(isinstance(reply, Mapping) and "is_shortened" in reply for reply in replies)
                questions = scoring.send(replies)
        except StopIteration as ended:
            verdicts: list[Verdict | NoVerdict] = ended.value
            return [_noting(verdict, num_shortened) for verdict in verdicts] if num_shortened else verdicts
        finally:
            scoring.close()


def _noting(verdict: Verdict | NoVerdict, num_shortened: int) -> Verdict | NoVerdict:
    if isinstance(verdict, NoVerdict):
        return verdict
    return replace(verdict, metrics={**verdict.metrics, SHORTENED: float(num_shortened)})


class GroupScorer(Protocol):
    """Scores the answers of a group, here (`GroupClient`) or elsewhere (`HttpGroupClient`)."""

    @property
    def name(self) -> str:
        """The name of the server instance."""
        ...

    async def score(self, row: Row, responses: Sequence[Response]) -> list[Verdict | NoVerdict]:
        """Score the answers to one row. Never raises for a failed environment."""
        ...


async def score_group(client: GroupScorer, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts of one group with the verdicts on the answers that wait; the others stay as they are."""
    start = time.monotonic()
    waiting = [(number, rollout.response) for number, rollout in enumerate(rollouts) if rollout.response is not None]
    if not waiting:
        return tuple(rollouts)
    verdicts = await client.score(row, [response for _, response in waiting])
    seconds = time.monotonic() - start
    scored = list(rollouts)
    for (number, _), verdict in zip(waiting, verdicts, strict=True):
        scored[number] = _with_verdict(rollouts[number], verdict, seconds)
    reasons = Counter(verdict.reason for verdict in verdicts if isinstance(verdict, NoVerdict))
    if reasons:
        (reason, count), total = reasons.most_common(1)[0], len(verdicts)
        logger.warning(
            "%s: %d of %d answers of a group have no verdict (%d: %s)",
            client.name,
            reasons.total(),
            total,
            count,
            reason,
        )
    return tuple(scored)


def _with_verdict(rollout: Rollout, verdict: Verdict | NoVerdict, seconds: float) -> Rollout:
    timed = replace(
        rollout, response=None, seconds=rollout.seconds + seconds, env_seconds=rollout.env_seconds + seconds
    )
    if isinstance(verdict, NoVerdict):
        return replace(timed, status=RolloutStatus(verdict.status), reason=verdict.reason)
    return replace(
        timed,
        reward=verdict.reward,
        reason=verdict.reason,
        metrics={**rollout.metrics, **verdict.metrics},
        is_flagged=rollout.is_flagged or verdict.is_flagged,
    )
