"""A small HTTP server of JSON on this machine's own address, beside the program that needs it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from recipes.cluster.http_limits import LimitedProtocol

HOST = "127.0.0.1"
KEPT_SECONDS = 600  # that an idle connection is kept
_WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a body that is no question

Answer = Callable[[Any], dict[str, Any]]
"""The answer to the JSON of a request, None for a GET. What it raises for a wrong one is answered with status 400."""


class JsonServer:
    """Answers every path in a thread until `close`. What connects before the thread runs waits."""

    def __init__(self, answer: Answer, port: int = 0, *, is_shared: bool = False) -> None:
        """Listen on `port`, 0 for a free one; several servers may share one. Raises `OSError`."""
        self._answer = answer
        self._socket = socket.create_server((HOST, port), backlog=1024, reuse_port=is_shared)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            self._serve,
            http=LimitedProtocol,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=KEPT_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of its API."""
        return f"http://{HOST}:{self.port}/v1"

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        try:
            status, said = 200, self._answer(json.loads(body) if scope["method"] == "POST" else None)
        except _WRONG as error:
            status, said = 400, {"error": {"message": f"{type(error).__name__}: {error}"[:300]}}
        content = json.dumps(said).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
