"""How an agent reaches a verifier: in this process, or a resources server over HTTP. Both give the same verdicts.

A client always answers, within its deadline: with a verdict, or with the reason why there is none. An agent that calls
tools opens a session first, in which they keep their state until the verdict.

How the answers of a group reach the verifier that scores them together.

A rollout of such a verifier ends without a verdict and keeps its answer. Once all rollouts of the group have ended,
`GroupClient.score` gives each answer its verdict. Answers are told apart by their place in the group, so nothing of
another group, or of an earlier attempt at the same prompt, can be taken for them.

A verifier of groups elsewhere: all answers to a row are sent at once, and one reward comes back for each.

    POST <url>/compare   {"conversation_history": [...], "response_objs": [...], "principle": ...}
    200                  {"rewards": [...], ...}, a number per answer; null where an answer has no verdict

NeMo Gym's server of `genrm_compare` answers it, and so does ours (`make serve-env NAME=genrm_compare`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard, TypeVar
from urllib.parse import quote

from recipes.environments.contract import (
    Cell,
    Execution,
    GroupVerifier,
    JudgeQuestion,
    NoVerdict,
    Pending,
    Replies,
    Requests,
    Response,
    SilentJudgeError,
    Tools,
    Verdict,
    Verifier,
    advance,
    env_failed,
    shown,
)
from recipes.environments.contract.http import JsonClient, JsonReply, RefusedError
from recipes.environments.sandbox.client import SandboxClient
from recipes.environments.sandbox.server import SandboxFailedError
from recipes.environments.scoring.frames import EncodedTask, encode_task
from recipes.environments.scoring.judge import SHORTENED, JudgeClient, JudgeFailedError
from recipes.environments.scoring.pool import Scored, ScoringPool
from recipes.retry import NoReplyError, RetryPolicy, reply_within
from recipes.types import Rollout, RolloutStatus, Row


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


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClient:
    """Scores groups in this process, with the replies of a judge."""

    name: str
    verifier: GroupVerifier
    settings: Any  # as the verifier declares them
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


MAX_METRICS, MAX_NAME, MAX_REASON = 100, 100, 1000  # what is kept of a server's reply: numbers, characters
MAX_REWARD = 1e6  # in size; the squares of much larger ones, which advantages need, are not finite
FAILURE, FAILURE_REASON = "_ng_failure_class", "_ng_failure_judge_error"
MASKED = "mask_sample"  # the reward measures a failure of the environment, and not the answer
OF_A_VERDICT = frozenset({"reward", MASKED, FAILURE, FAILURE_REASON})  # fields of a reply that no row may bring
RETRIES = RetryPolicy(max_retries=2, first_seconds=0.2, jitter=0.25)
ONCE = RetryPolicy(max_retries=0, first_seconds=0.2)
T = TypeVar("T")


class ToolFailedError(Exception):
    """A tool gave no answer, which is the environment's failure and not the model's."""


class Session(Protocol):
    """One rollout's tools and its verdict."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the model is shown of one call; raises `ToolFailedError` when there was no answer."""
        ...

    async def verify(self, response: Response) -> Verdict | NoVerdict:
        """Score the response to the session's row. Never raises for a failed environment."""
        ...

    async def close(self) -> None:
        """Let go of what the tools hold. Who opened a session closes it, however its rollout ended."""
        ...


class VerifierClient(Protocol):
    """What agents, and wrappers such as the benchmark's, know of a verifier."""

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict | Pending:
        """Score one response to one row. Never raises for a failed environment."""
        ...

    async def open(self, row: Row) -> Session | NoVerdict:
        """Begin a session with tools. Never raises for a failed environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessVerifier:
    """Scores in this process when that is cheap, else in a scoring process of the pool."""

    name: str
    verifier: Verifier
    settings: Any  # as the verifier declares them
    pool: ScoringPool
    timeout_seconds: float
    judge: JudgeClient | None = None  # of a verifier that needs one
    sandbox: SandboxClient | None = None  # of a verifier that runs programs

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row; ask the judge or the sandbox as often as the verifier needs."""
        try:
            task = self.verifier.parse_task(row, self.settings)
            if not self.verifier.is_cheap(task):
                task = encode_task(self.verifier, task)
            replies: list[list[Response]] = []
            num_shortened = 0
            while isinstance(scored := await self._advance(task, response, replies), list):
                answers = await self._replies_to(scored)
                if isinstance(answers, NoVerdict):
                    return answers
                replies.append(answers)
                num_shortened += sum("is_shortened" in answer for answer in answers)
            if num_shortened and isinstance(scored, Verdict):
                return replace(scored, metrics={**scored.metrics, SHORTENED: float(num_shortened)})
            return scored
        except (JudgeFailedError, SilentJudgeError) as error:
            return NoVerdict(status=RolloutStatus.JUDGE_FAILED, reason=f"{self.name}: {error}")
        except SandboxFailedError as error:
            return env_failed(f"{self.name}: {error}")
        except Exception as error:  # an environment that fails is a value with a reason, not the end of the run
            return env_failed(f"{self.name}: {type(error).__name__}: {error}")

    async def open(self, row: Row) -> Session | NoVerdict:
        """Begin a session whose tools run in this process."""
        if self.verifier.tools is None:
            return env_failed(f"{self.name}: it has no tools")
        try:
            self.verifier.parse_task(row, self.settings)  # a row that cannot be scored costs no model calls
            state = self.verifier.tools.start(self.settings)
        except ValueError as error:
            return env_failed(f"{self.name}: {error}")
        return LocalSession(client=self, tools=self.verifier.tools, row=row, state=state)

    async def _replies_to(self, requests: Requests) -> list[Response] | NoVerdict:
        questions = [request for request in requests if isinstance(request, JudgeQuestion)]
        executions = [request for request in requests if isinstance(request, Execution)]
        if questions and self.judge is not None:
            return await self.judge.ask(questions)
        if executions and self.sandbox is not None:
            return await self.sandbox.run(executions)
        return env_failed(f"{self.name}: it asks a {'judge' if questions else 'sandbox'}, and none is configured")

    async def _advance(self, task: Any, response: Response, replies: Replies) -> Scored:
        if isinstance(task, EncodedTask):
            return await self.pool.score(self.verifier, task, response, replies=replies, seconds=self.timeout_seconds)
        return advance(self.verifier.score(response, task), replies)


@dataclass(slots=True, kw_only=True)
class LocalSession:
    """A session whose state is in this process, and the variables of its code in a sandbox."""

    client: InProcessVerifier
    tools: Tools
    row: Row
    state: Any
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the sandbox's session: nobody can guess it
    _has_run: bool = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run one tool, and let others of this thread go on."""
        self.state, answer = self.tools.call(self.state, name, arguments)
        if isinstance(answer, Cell):
            reply = await self._run(answer)
            assert self.tools.read is not None
            self.state, answer = self.tools.read(self.state, reply)
        await asyncio.sleep(0)
        return answer

    async def verify(self, response: Response) -> Verdict | NoVerdict:
        """Score the response to the session's row."""
        return await self.client.verify(self.row, response)

    async def close(self) -> None:
        """End the session's part in the sandbox."""
        if self._has_run and self.client.sandbox is not None:
            self._has_run = False
            await self.client.sandbox.end_session(self.name)

    async def _run(self, cell: Cell) -> Response:
        if self.client.sandbox is None:
            raise ToolFailedError(f"{self.client.name}: its tools need a sandbox, and none is configured")
        self._has_run = True
        try:
            return await self.client.sandbox.run_cell(self.name, cell)
        except SandboxFailedError as error:
            raise ToolFailedError(f"{self.client.name}: {error}") from error


@dataclass(slots=True, kw_only=True)
class HttpVerifier:
    """Asks a resources server: `POST /seed_session`, then `POST /verify` with the session's cookies.

    Transport errors and statuses that may pass are tried again, within the deadline; other answers are final. A tool is
    asked once, since it may have done its work before its answer was lost.
    """

    name: str
    url: str
    timeout_seconds: float
    http: JsonClient = field(default_factory=JsonClient)

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        """Score one response to one row on the server, in a session of its own."""

        async def ask() -> Verdict | NoVerdict:
            session = await self._post("seed_session", row)
            return await self.ask_verdict(row, response, session.cookies)

        return await self.with_retries(ask)

    async def open(self, row: Row) -> Session | NoVerdict:
        """Begin a session on the server."""

        async def seed() -> Session:
            reply = await self._post("seed_session", row)
            return HttpSession(client=self, row=row, cookies=reply.cookies)

        return await self.with_retries(seed)

    async def ask_verdict(self, row: Row, response: Response, cookies: Mapping[str, str]) -> Verdict | NoVerdict:
        """Ask once for the verdict on a response; raises what `JsonClient.post` raises.

        What a row calls `reward` stays here: the echo of a server that gives no verdict would be taken for one.
        """
        sent = {**{key: value for key, value in row.items() if key not in OF_A_VERDICT}, "response": response}
        return self._read((await self._post("verify", sent, cookies)).body, sent)

    async def ask_tool(self, name: str, arguments: Mapping[str, Any], cookies: Mapping[str, str]) -> str:
        """Ask once for what a tool answers; raises `ToolFailedError`."""

        async def ask() -> str:
            return await self.http.post_for_text(f"{self._base}/{quote(name, safe='')}", arguments, cookies=cookies)

        try:
            return await reply_within(self.timeout_seconds, ask, ONCE)
        except (NoReplyError, RefusedError, TypeError) as error:
            raise ToolFailedError(f"{self.name}: {name}: {self.url}: {error}") from error

    async def with_retries(self, ask: Callable[[], Awaitable[T]]) -> T | NoVerdict:
        """Ask until there is an answer, within the deadline; return why there is none otherwise."""
        try:
            return await reply_within(self.timeout_seconds, ask, RETRIES)
        except (NoReplyError, RefusedError, ValueError, TypeError) as error:  # TypeError: a row that JSON cannot carry
            return env_failed(f"{self.name}: {self.url}: {error}")

    async def _post(self, path: str, body: Mapping[str, Any], cookies: Mapping[str, str] | None = None) -> JsonReply:
        return await self.http.post(f"{self._base}/{path}", body, cookies=cookies)

    @property
    def _base(self) -> str:
        return self.url.rstrip("/")

    def _read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Verdict | NoVerdict:
        """Return the verdict in a reply: the row and response as sent, `reward`, and the verifier's extras."""
        failure = reply.get(FAILURE)
        if failure is not None:
            status = RolloutStatus.JUDGE_FAILED if failure == "judge_failed" else RolloutStatus.ENV_FAILED
            reason = reply.get(FAILURE_REASON) or "no reason given"
            return NoVerdict(status=status, reason=f"{self.name}: {failure}: {reason}"[:MAX_REASON])
        if reply.get(MASKED) is True:
            reason = reply.get("failure_reason") or reply.get("failure_kind") or "no reason given"
            return env_failed(f"{self.name}: its reward is no measurement: {reason}"[:MAX_REASON])
        reward = reply.get("reward")
        if not is_number(reward) or abs(reward) > MAX_REWARD:
            raise RefusedError(f"/verify answered reward {shown(reward)}, expected a number, at most {MAX_REWARD:g}")
        known = {*sent, *OF_A_VERDICT, "reason"}
        extras = {key: value for key, value in reply.items() if key not in known and len(key) <= MAX_NAME}
        numbers = ((key, float(value)) for key, value in extras.items() if isinstance(value, int | float))
        instance = reply.get("instance_config")
        return Verdict(
            reward=float(reward),
            reason=str(reply.get("reason") or f"rewarded {reward:g} by {self.url}")[:MAX_REASON],
            metrics=dict(itertools.islice(numbers, MAX_METRICS)),
            details={key: value for key, value in extras.items() if value is None or isinstance(value, str)},
            is_flagged=isinstance(instance, Mapping) and bool(instance.get("mask_sample")),
        )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a reply is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSession:
    """A session whose state is on a resources server."""

    client: HttpVerifier
    row: Row
    cookies: Mapping[str, str]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Ask one tool of the server."""
        return await self.client.ask_tool(name, arguments, self.cookies)

    async def verify(self, response: Response) -> Verdict | NoVerdict:
        """Score the response on the server that has the session."""
        return await self.client.with_retries(lambda: self.client.ask_verdict(self.row, response, self.cookies))

    async def close(self) -> None:
        """Do nothing: the server ends a session at its verdict, or when others need its place."""
