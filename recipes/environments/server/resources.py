"""A verifier as a resources server that speaks NeMo Gym's HTTP protocol.

`GET /` says it is up, `POST /seed_session` opens a session (a signed cookie), `POST /<tool>` calls a tool in it,
`POST /verify` ends it: it takes a row with its `response` and answers both with `reward`, `reason` and the verifier's
extras. `POST /aggregate_metrics` averages such answers, and `GET /reverify_mode` says that a verdict needs the row and
its response alone. A verifier of groups has `POST /compare` instead of `/verify`: all answers to one conversation, of
which each gets its reward, or null with a reason. Each address also answers below `/ng-rollout/<id>`, which names the
rollout that asks.

A body that cannot be read is 422, one that is too large 413; an environment that failed is 500, a judge that failed
200 with `_ng_failure_class`: none carries a number that could be taken for a reward.

The sessions with tools that are open on a resources server.

What `POST /aggregate_metrics` answers: statistics of verdicts, over all of them and per prompt.
"""

from __future__ import annotations

import asyncio
import math
import re
import statistics
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from recipes.environments.contract import NoVerdict, Verdict, require_response, wrong
from recipes.environments.contract.http import JsonClient
from recipes.environments.instances import GROUP_VERIFIERS, VERIFIERS, ServerInstance
from recipes.environments.sandbox.client import client_of
from recipes.environments.sandbox.server import SandboxServer
from recipes.environments.scoring.clients import GroupClient, InProcessVerifier, LocalSession, ToolFailedError
from recipes.environments.scoring.pool import ScoringPool
from recipes.exact_json import dumps, loads
from recipes.types import RolloutStatus

MAX_SESSIONS = 10_000  # open at once; beyond them the one that was used least recently ends


class Sessions:
    """Keeps each session from its seed to its verdict."""

    def __init__(self, client: InProcessVerifier) -> None:
        self._client = client
        self._open: OrderedDict[str, LocalSession] = OrderedDict()
        self._ends: set[asyncio.Task[None]] = set()  # an event loop alone does not keep its tasks alive

    def seed(self, session_id: str) -> None:
        """Begin a session, or begin it anew; raises `ValueError` when its tools cannot start.

        Without tools there is nothing to keep. A session that is given up ends in a task of the running event loop.
        """
        tools = self._client.verifier.tools
        if tools is None:
            return
        state = tools.start(self._client.settings)
        before = self._open.pop(session_id, None)
        given_up = [before] if before is not None else []
        self._open[session_id] = LocalSession(client=self._client, tools=tools, row={}, state=state)
        while len(self._open) > MAX_SESSIONS:
            given_up.append(self._open.popitem(last=False)[1])
        for session in given_up:
            end = asyncio.get_running_loop().create_task(session.close())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def call(self, session_id: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; raises `KeyError` for a session that is not open, `ToolFailedError` for a tool that fails."""
        session = self._open[session_id]
        self._open.move_to_end(session_id)
        return await session.call(name, arguments)

    async def end(self, session_id: str) -> None:
        """End a session; one that is not open is ignored."""
        session = self._open.pop(session_id, None)
        if session is not None:
            await session.close()


TASK = "_ng_task_index"  # one number per prompt, shared by all its rollouts
STATISTICS: Mapping[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
}


def aggregated(body: object) -> dict[str, Any]:
    """Return the answer to a list of verdicts, alone or as `verify_responses`; raises `ValueError` for another body.

    Verdicts that failed do not count. Those without the number of their prompt are in no group.
    """
    replies = body.get("verify_responses") if isinstance(body, Mapping) else body
    if not isinstance(replies, list) or not all(isinstance(reply, Mapping) for reply in replies):
        raise wrong("verify_responses", replies, "a list of objects")
    scored = [reply for reply in replies if "_ng_failure_class" not in reply]
    for reply in scored:
        if isinstance(reply.get("reward"), bool) or not isinstance(reply.get("reward"), int | float):
            raise wrong("verify_responses.reward", reply.get("reward"), "a number, or `_ng_failure_class` of a failure")
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for reply in scored:
        if isinstance(reply.get(TASK), int):
            groups.setdefault(reply[TASK], []).append(reply)
    metrics = described(scored)
    return {
        "agent_metrics": metrics,
        "key_metrics": {"mean/reward": metrics.get("mean/reward")},
        "group_level_metrics": [{TASK: task, **described(groups[task])} for task in sorted(groups)],
    }


def described(replies: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return `<statistic>/<key>` of every numeric key, over the replies that have it; the deviation is the sample's."""
    values: dict[str, list[float]] = {}
    for reply in replies:
        for key, value in reply.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not key.startswith("_ng_"):
                values.setdefault(key, []).append(float(value))
    found: dict[str, float] = {}
    for key, numbers in values.items():
        mean = math.fsum(numbers) / len(numbers)
        found |= {f"{name}/{key}": of(numbers) for name, of in STATISTICS.items()}
        spread = math.fsum((number - mean) ** 2 for number in numbers)
        found[f"std/{key}"] = math.sqrt(spread / (len(numbers) - 1)) if len(numbers) > 1 else 0.0
    return found


# Of an address: which rollout asks. A mark that its tokens are captured concerns model servers alone.
ROLLOUT_PREFIX = re.compile(r"/ng-rollout/[^/]+(?:/training-token-capture)?(?=/)")


def create_app(instance: ServerInstance) -> FastAPI:
    """Return the server of one instance; its scoring workers live as long as the app."""
    if instance.verifier in GROUP_VERIFIERS:
        return _create_group_app(instance)
    verifier = VERIFIERS[instance.verifier]
    pool, sandbox, http = ScoringPool(), SandboxServer(), JsonClient()
    client = InProcessVerifier(
        name=instance.verifier,
        verifier=verifier,
        settings=instance.settings,
        pool=pool,
        timeout_seconds=instance.timeout_seconds,
        judge=instance.judge.client(http) if instance.judge else None,
        sandbox=client_of(instance.settings, sandbox, http) if verifier.needs_sandbox else None,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await http.close()
        pool.close()
        sandbox.close()

    app = FastAPI(title=instance.name, lifespan=lifespan)
    cookie = f"{verifier.class_name}___{instance.name}"
    app.add_middleware(SessionMiddleware, secret_key=cookie, session_cookie=cookie)
    app.add_middleware(WithoutRolloutPrefix)

    sessions = Sessions(client)
    _serve_verdicts(app, client, sessions)
    _serve_common(app)
    if verifier.tools is not None:
        _serve_tools(app, sessions)
    return app


def _create_group_app(instance: ServerInstance) -> FastAPI:
    http = JsonClient()
    client = GroupClient(
        name=instance.name,
        verifier=GROUP_VERIFIERS[instance.verifier],
        settings=instance.settings,
        judge=instance.judge.client(http) if instance.judge else None,
        timeout_seconds=instance.timeout_seconds,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await http.close()

    app = FastAPI(title=instance.name, lifespan=lifespan)
    app.add_middleware(WithoutRolloutPrefix)

    @app.post("/compare")
    async def compare(request: Request) -> Response:
        try:
            body = _object(await request.body())
            history, responses = body.get("conversation_history"), body.get("response_objs")
            if not isinstance(history, list):
                raise wrong("conversation_history", history, "a list of messages")
            if not isinstance(responses, list):
                raise wrong("response_objs", responses, "a list of Responses objects")
            for number, one in enumerate(responses):
                require_response(one, f"response_objs.{number}")
            row = {"responses_create_params": {"input": history}, "principle": body.get("principle")}
            client.verifier.parse_task(row, client.settings)
        except ValueError as error:
            return _json({"detail": str(error)}, status=422)
        verdicts = await client.score(row, responses)
        rewards = [verdict.reward if isinstance(verdict, Verdict) else None for verdict in verdicts]
        return _json({"rewards": rewards, "reasons": [verdict.reason for verdict in verdicts]})

    _serve_common(app)
    return app


def _serve_verdicts(app: FastAPI, client: InProcessVerifier, sessions: Sessions) -> None:
    """Answer the beginning of a session and the verdict that ends it."""

    @app.post("/seed_session")
    async def seed_session(request: Request) -> Response:
        session_id = _session_id(request)
        try:
            _object(await request.body())
        except ValueError as error:
            return _json({"detail": str(error)}, status=422)
        try:
            sessions.seed(session_id)
        except ValueError as error:
            return _json({"detail": str(error)}, status=500)
        return _json({})

    @app.post("/verify")
    async def verify(request: Request) -> Response:
        session_id = _session_id(request)
        try:
            body = _object(await request.body())
            response = require_response(body.get("response"))
            client.verifier.parse_task(body, client.settings)
        except ValueError as error:
            return _json({"detail": str(error)}, status=422)
        verdict = await client.verify(body, response)
        await sessions.end(session_id)
        if isinstance(verdict, NoVerdict):
            return _failure(body, verdict)
        extras = {**verdict.details, **verdict.metrics}
        return _json({**body, **extras, "reward": verdict.reward, "reason": verdict.reason})


def _serve_common(app: FastAPI) -> None:
    """Answer what needs no verifier."""

    @app.exception_handler(ClientDisconnect)
    async def on_cut_off(_request: Request, _error: Exception) -> Response:
        return _json({"detail": "the body was cut off"}, status=400)  # nobody reads it

    @app.get("/")
    async def status() -> Response:
        return _json({"status": "ok"})

    @app.get("/reverify_mode")
    async def reverify_mode() -> Response:
        return _json("stateless")

    @app.post("/aggregate_metrics")
    async def aggregate(request: Request) -> Response:
        try:
            return _json(aggregated(loads(await request.body())))
        except (ValueError, OverflowError) as error:  # numbers whose squares are too large
            return _json({"detail": str(error)}, status=422)


def _serve_tools(app: FastAPI, sessions: Sessions) -> None:
    """Answer `POST /<tool>`; a tool's own complaint is its answer, so that the model can read it."""

    @app.post("/{tool}")
    async def call_tool(tool: str, request: Request) -> Response:
        try:
            arguments = _object(await request.body())
            text = await sessions.call(_session_id(request), tool, arguments)
        except KeyError:
            return _json({"detail": "the session is not open; call seed_session first"}, status=400)
        except ValueError as error:
            return _json({"detail": str(error)}, status=422)
        except ToolFailedError as error:
            return _json({"detail": str(error)}, status=500)
        return Response(content=text, media_type="application/json")


def _session_id(request: Request) -> str:
    """Return the id in the request's cookie, a new one for a request without it."""
    session_id: str = request.session.setdefault("session_id", str(uuid.uuid4()))
    return session_id


class WithoutRolloutPrefix:
    """Answers an address below `/ng-rollout/<id>` as the address itself: a verdict depends on no rollout."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            path = ROLLOUT_PREFIX.sub("", scope["path"], count=1) if scope["path"].startswith("/ng-") else scope["path"]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def _failure(body: Mapping[str, Any], verdict: NoVerdict) -> Response:
    if verdict.status is RolloutStatus.JUDGE_FAILED:
        marks = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": verdict.reason}
        return _json({**body, "reward": 0.0, **marks})  # as NeMo Gym's trainer expects it
    return _json({"detail": verdict.reason}, status=500)


def _object(body: bytes) -> dict[str, Any]:
    value = loads(body)  # its error is a ValueError
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(content=dumps(value), status_code=status, media_type="application/json")
