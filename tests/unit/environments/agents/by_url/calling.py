"""A client of the model server without a network, and a policy that answers when a test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from recipes.environments.agents.by_url.server import ModelServer
from recipes.environments.agents.by_url.session import RolloutSession, SessionLimits
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.types import Completion, VersionSpan
from tests.scripted import written_call

PATTERNS = FlagPatterns(invalid_tool_call=("<tool_call>",), thinking_tags=("<think>", "</think>"))
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
END = "<|im_end|>"
WAIT = 30.0  # seconds after which a test that waits has failed


def calling(command: str) -> str:
    """Return an answer that calls the tool."""
    return f"so</think>{written_call('bash', {'command': command})}{END}"


@dataclass
class Policy:
    """Says one text after the other, the last one for ever; a text of None is an engine that fails."""

    codec: ChatCodec
    says: Sequence[str | Exception | None]
    max_model_len: int = 100_000
    finish_reason: str = "stop"
    hold: asyncio.Event | None = None  # answers wait for it
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        said = self.says[min(len(self.prompts), len(self.says) - 1)]
        self.prompts.append(tuple(prompt_token_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
        if isinstance(said, Exception):
            raise said
        if len(prompt_token_ids) >= self.max_model_len or said is None:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        ids = self.codec._tokenize(said)[:max_tokens]
        half = (
            VersionSpan(version=3, start=0, end=len(ids) // 2),
            VersionSpan(version=4, start=len(ids) // 2, end=len(ids)),
        )
        logprobs = tuple(-0.25 * (n + 1) for n in range(len(ids)))
        return Completion(token_ids=ids, logprobs=logprobs, versions=half, finish_reason=self.finish_reason)


@dataclass
class Reply:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    has_ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [orjson.loads(line) for line in lines if line != b"[DONE]"]


class Connection:
    """One request, which can be left before its answer is there."""

    def __init__(self, app: ModelServer, path: str, body: Any, **options: Any) -> None:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = [(name.encode(), value.encode()) for name, value in (options.get("headers") or {}).items()]
        scope = {"type": "http", "method": options.get("method", "POST"), "path": path, "headers": headers}
        self.reply = Reply()
        self.left = asyncio.Event()
        self.written = asyncio.Event()
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.reply.status, self.reply.headers = message["status"], dict(message["headers"])
        else:
            self.reply.parts.append(message["body"])
            self.reply.has_ended = not message.get("more_body", False)
            self.written.set()

    async def leave(self) -> None:
        """Go away, as a client does whose patience has ended."""
        self.left.set()
        await self.done()

    async def done(self) -> Reply:
        await asyncio.wait_for(self.task, WAIT)
        return self.reply


@dataclass
class Rollout:
    """One rollout on a model server."""

    app: ModelServer
    session: RolloutSession
    secret: str
    prefix: str = "/r/"

    def open(self, body: Any, route: str = "chat/completions", **options: Any) -> Connection:
        return Connection(self.app, f"{self.prefix}{self.secret}/v1/{route}", body, **options)

    async def post(self, body: Any, route: str = "chat/completions", **options: Any) -> Reply:
        return await self.open(body, route, **options).done()

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the message that a chat request is answered with."""
        reply = await self.post({"messages": messages, **fields})
        assert reply.status == 200, reply.body
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message

    @property
    def kinds(self) -> str:
        return " ".join(node.kind[0].upper() for node in self.session.forest.nodes)


@asynccontextmanager
async def serving(policy: Policy, *, keepalive: float = 5.0, **settings: Any) -> AsyncIterator[Rollout]:
    """Serve one rollout."""
    limits = SessionLimits(**{"max_tokens": 10_000, **settings.pop("limits", {})})
    app = settings.pop("app", None) or ModelServer(keepalive_seconds=keepalive)
    session = RolloutSession(codec=policy.codec, model=policy, patterns=PATTERNS, limits=limits, **settings)
    async with app.serving(session) as secret:
        yield Rollout(app, session, secret)


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks go on until something holds."""
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(text: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
