"""The policy as a model server: one unguessable path per rollout, the two APIs of OpenAI below it, nothing else.

    http://HOST:PORT/r/SECRET/v1/chat/completions    also without /v1, with it twice, and as /ng-rollout/SECRET/v1/...
    http://HOST:PORT/r/SECRET/v1/responses           or with the secret as API key and no path of a rollout
    http://HOST:PORT/r/SECRET/v1/models

An answer is computed whole and stored before its last byte goes out. While a client waits it gets bytes, so that its
read timeout does not end a long call. Everything else, a wrong secret included, is the same 404.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from recipes.cluster.http_limits import LimitedProtocol
from recipes.cluster.ports import url_of
from recipes.environments.agents.by_url.messages import CHAT, RESPONSES, ApiError, ModelRequest, read_request
from recipes.environments.agents.by_url.session import (
    MODEL,
    RETRY_SECONDS,
    Call,
    RolloutSession,
    error_event,
    last_event,
    over,
    stream_events,
    whole_reply,
)
from recipes.errors import Problem, RunError
from recipes.exact_json import dumps

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 120  # that an idle connection is kept
BACKLOG = 4096
START_SECONDS = 30.0
_PATH = re.compile(r"/(?:(r|ng-rollout)/([^/]+)/)?(?:training-token-capture/)?(?:v1/){0,2}(.+)")
_JSON = (b"content-type", b"application/json")


@dataclass(slots=True, kw_only=True, eq=False)
class ModelServer:
    """An ASGI application: the open rollouts by the digest of their secret."""

    keepalive_seconds: float = 5.0  # between two bytes for a client that waits
    _sessions: dict[bytes, RolloutSession] = field(default_factory=dict)

    @asynccontextmanager
    async def serving(self, session: RolloutSession) -> AsyncIterator[str]:
        """Serve one rollout; yields its secret. Afterwards its calls are cancelled and its path is gone.

        One that has made no call may be served again, under another secret.
        """
        secret = secrets.token_urlsafe(SECRET_BYTES)
        digest = _digest(secret)
        self._sessions[digest] = session
        session.is_over = False
        try:
            yield secret
        finally:
            session.end()
            del self._sessions[digest]

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            session, route, is_gym = self._find(scope)
            if scope["method"] == "GET":
                await _send_json(send, 200, _models(session, route))
                return
            body = await _read_body(receive)
            # A large body takes milliseconds to read: in a thread, so that other rollouts go on.
            request = await asyncio.to_thread(read_request, route, body)
            call = session.start(request, body, num_retries=_num_retries(scope), is_gym=is_gym)
        except ApiError as error:
            await _send_json(send, error.status, error.body())
            return
        await _Reply(session, call, request, receive, send, self.keepalive_seconds).send_all()

    def _find(self, scope: Mapping[str, Any]) -> tuple[RolloutSession, str, bool]:
        """Return the rollout of a request, what is asked of it, and whether one of NeMo Gym's agents asks."""
        found = _PATH.fullmatch(scope["path"])
        kind, secret, rest = found.groups() if found else (None, None, "")
        if secret is None:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ") or headers.get(b"x-api-key", b"")
            secret = given.decode("latin-1")
        session = self._sessions.get(_digest(secret))
        posted = {"chat/completions": CHAT, "responses": RESPONSES}.get(rest) if scope["method"] == "POST" else None
        is_listed = scope["method"] == "GET" and rest in ("models", f"models/{MODEL}")
        if session is None or session.is_over or not (posted or is_listed):
            raise over()
        return session, posted or rest, kind == "ng-rollout"


@dataclass(slots=True)
class _Reply:
    """One connection that waits for a call and writes its answer."""

    session: RolloutSession
    call: Call
    request: ModelRequest
    receive: Any
    send: Any
    keepalive_seconds: float
    has_begun: bool = False  # the head of the answer is out

    async def send_all(self) -> None:
        """Wait for the call and write its answer; a client that goes away leaves the call to a retry."""
        self.session.wait(self.call)
        gone = asyncio.create_task(_disconnected(self.receive))
        is_delivered = False
        try:
            if await self._wait(gone):
                await self._write()
                is_delivered = not gone.done() and not _failed(self.call.task)
        finally:
            gone.cancel()
            self.session.leave(self.call, is_delivered=is_delivered)

    async def _wait(self, gone: asyncio.Task[None]) -> bool:
        """Keep the client waiting until the call has ended; returns False when the client is gone first."""
        while True:
            waiting = {self.call.task, gone}
            await asyncio.wait(waiting, timeout=self.keepalive_seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return False
            if self.call.task.done():
                return True
            await self._begin()
            await self._send(b": keepalive\n" if self.request.is_stream else b"\n")

    async def _write(self) -> None:
        try:
            answer = self.call.task.result().answer
        except asyncio.CancelledError:
            await self._fail(over())
        except ApiError as error:
            await self._fail(error)
        except Exception:
            logger.warning("a call of an agent failed", exc_info=True)
            await self._fail(ApiError(500, "the call failed"))
        else:
            await self._begin()
            if self.request.is_stream:
                for event in stream_events(answer, self.request):
                    await self._send(event)
                await self._send(last_event(answer, self.request), more=False)
            else:
                await self._send(dumps(whole_reply(answer, self.request)), more=False)

    async def _fail(self, error: ApiError) -> None:
        """Write an error. Once the head of a plain answer is out, only a cut connection can tell of it."""
        if not self.has_begun:
            await _send_json(self.send, error.status, error.body())
        elif self.request.is_stream:
            await self._send(error_event(error, self.request), more=False)
        else:
            raise ConnectionAbortedError(str(error))

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            kind = (b"content-type", b"text/event-stream") if self.request.is_stream else _JSON
            await self.send({"type": "http.response.start", "status": 200, "headers": [kind]})

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


async def _read_body(receive: Any) -> bytes:
    """Return a request's body; raises `ApiError` for one that is cut off. `LimitedProtocol` limits size and time."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body was cut off")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _send_json(send: Any, status: int, value: Any) -> None:
    body = dumps(value)
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _models(session: RolloutSession, route: str) -> dict[str, Any]:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}
    model["max_model_len"] = session.model.max_model_len
    return model if route != "models" else {"object": "list", "data": [model]}


def _num_retries(scope: Mapping[str, Any]) -> int:
    """Return the number of earlier attempts that OpenAI's client reports."""
    count = dict(scope["headers"]).get(b"x-stainless-retry-count", b"0")
    return int(count) if count.isdigit() and len(count) < 10 else 0


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=32).digest()


class _Uvicorn(uvicorn.Server):  # type: ignore[misc]
    """Uvicorn beside the program of a run, whose signals are its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ListeningServer:
    """A model server on a port of one event loop."""

    def __init__(self, app: ModelServer, server: uvicorn.Server, held: socket.socket, task: asyncio.Task[None]) -> None:
        self.app = app
        self.address, self.port = held.getsockname()[:2]
        self._server, self._socket, self._task = server, held, task

    @classmethod
    async def start(cls, held: socket.socket) -> ListeningServer:
        """Serve on a socket that is bound; raises `RunError` when the server does not start."""
        app = ModelServer()
        held.listen(BACKLOG)
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            backlog=BACKLOG,
        )
        server = _Uvicorn(config)
        task = asyncio.create_task(server.serve(sockets=[held]))
        try:
            async with asyncio.timeout(START_SECONDS):
                while not server.started and not task.done():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            task.cancel()
        if not server.started:
            raise RunError(str(Problem(where="model server", wrong="it did not start", fix="see the log above")))
        return cls(app, server, held, task)

    @asynccontextmanager
    async def serving(self, session: RolloutSession) -> AsyncIterator[str]:
        """Serve one rollout; yields its base URL."""
        async with self.app.serving(session) as secret:
            yield url_of(self.address, self.port, f"/r/{secret}/v1")

    def stop(self) -> None:
        """Let the server end without waiting for open requests. Its event loop may be another thread's, or be over."""
        self._server.should_exit = self._server.force_exit = True
        if not self._task.get_loop().is_running():
            self._socket.close()
