"""The OpenAI-compatible HTTP server of an engine, for agents that speak HTTP.

It is vLLM's own web application on the engine's `AsyncLLM`: its requests are sampled from the same weights, and a
weight push pauses and resumes them like all others. Others on the network reach it: it answers nobody without the key,
and only the paths that an agent needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import uvicorn
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from recipes.cluster.http_limits import LimitedProtocol
from recipes.cluster.ports import hold_in_range, url_of
from recipes.errors import EngineError
from recipes.generation.engine_args import SERVED_MODEL_NAME

if TYPE_CHECKING:
    from recipes.config.tree import GenerationConfig, ServingChatConfig

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
Count = Callable[[int], AbstractContextManager[None]]

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"})


class HttpServer:
    """A running server. It belongs to the event loop on which it was started."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], base_url: str, api_key: str) -> None:
        self._server = server
        self._task = task
        self.base_url = base_url
        self.api_key = api_key

    @classmethod
    async def start(cls, llm: Any, cfg: GenerationConfig, *, host: str, count: Count) -> HttpServer:
        """Serve the policy's `llm` on the first free port of the configured range; `count` wraps each request.

        The key is VLLM_API_KEY where it is set, as for `vllm serve`, else a random one.
        """
        api_key = os.environ.get("VLLM_API_KEY") or secrets.token_hex(32)
        held = hold_in_range(cfg.port_range_low, cfg.port_range_high, host=host)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            command_line(llm.model_config.model, cfg.vllm_cfg.http_server_serving_chat_kwargs)
        )
        return await cls.serve(llm, args, held=held, api_key=api_key, count=count)

    @classmethod
    async def serve(cls, llm: Any, args: Any, *, held: socket.socket, api_key: str, count: Count) -> HttpServer:
        """Serve `llm` as `vllm serve` would with these arguments, on a socket that listens already."""
        args.structured_outputs_config = llm.vllm_config.structured_outputs_config  # names the reasoning parser
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        app = guarded(counted(app, count), api_key)
        config = uvicorn.Config(app, http=LimitedProtocol, log_level="warning", access_log=False, timeout_keep_alive=60)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[held]))
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.01)
        host, port = held.getsockname()[:2]
        return cls(server, task, url_of(host, port, "/v1"), api_key)

    async def stop(self) -> None:
        """Close the server without waiting for open requests."""
        self._server.should_exit = self._server.force_exit = True
        await self._task


def command_line(model_path: str, chat: ServingChatConfig) -> list[str]:
    """Return the arguments of `vllm serve` that follow from the configuration."""
    args = ["--model", model_path, "--served-model-name", SERVED_MODEL_NAME, "--return-tokens-as-token-ids"]
    if chat.enable_auto_tools:
        args.append("--enable-auto-tool-choice")
    if chat.tool_parser is not None:
        args += ["--tool-call-parser", chat.tool_parser]
    if chat.default_chat_template_kwargs:
        args += ["--default-chat-template-kwargs", json.dumps(dict(chat.default_chat_template_kwargs))]
    return args


def counted(app: Asgi, count: Count) -> Asgi:
    """Return `app` with each request to its API counted as one sequence in flight, and refused when `count` raises."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                with count(1):
                    await app(scope, receive, send)
            except EngineError as error:
                await refuse(send, 503, str(error))
        else:
            await app(scope, receive, send)

    return wrapped


def guarded(app: Asgi, api_key: str) -> Asgi:
    """Return `app` for requests with the key (`Authorization: Bearer KEY`) to the known paths.

    Without the key a request gets 401, to another path 404. `LimitedProtocol` takes no websocket.
    """
    expected = f"Bearer {api_key}".encode()

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif not secrets.compare_digest(given, expected):
            await refuse(send, 401, "give the server's key as Authorization: Bearer KEY")
        elif scope["path"] not in PATHS:
            await refuse(send, 404, f"the paths are {', '.join(sorted(PATHS))}")
        else:
            await app(scope, receive, send)

    return wrapped


async def refuse(send: Any, status: int, message: str) -> None:
    """Answer with an error in the form of the OpenAI API."""
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
