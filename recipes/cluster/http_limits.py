"""Limits on the connections of an HTTP server.

Uvicorn has none for a client that is silent before its request is whole, nor for one that does not read its answer.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 10_000  # of one server, and never more than half of the files that its process may open


class LimitedProtocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 on one connection, for `uvicorn.Config(http=...)`: closed when a request does not arrive in time.

    The time counts from the connection for its first request, from the first byte for each later one, and again from
    the end of the head for the body. Bytes that arrive do not prolong it; a program that does not read the body does.
    An answer that waits for its reader for `unread_seconds` ends the connection, too.
    """

    head_seconds = 30.0
    body_seconds = 60.0
    unread_seconds = 300.0
    _awaited: Any = None  # the state of the client in which `_timer` was started
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _was_paused = False  # since `_timer` was started: the program did not read

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._was_paused |= self.flow.read_paused
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # of the next request, which came with this one
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the time of what the client is sending; it goes on where it runs already."""
        state = self.conn.their_state
        if state is self._awaited:
            return
        self._stop_timer()
        self._awaited = state
        seconds = {h11.IDLE: self.head_seconds, h11.SEND_BODY: self.body_seconds}.get(state)
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._on_late, seconds)

    def _on_late(self, seconds: float) -> None:
        if self._was_paused:
            self._was_paused = self.flow.read_paused
            self._timer = self.loop.call_later(seconds, self._on_late, seconds)
        else:
            self.transport.close()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def most_connections() -> int:
    """Return how many connections one server of this process takes at once."""
    return min(MAX_CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1))
