"""Limits on the connections of an HTTP server: the one place that has them, for all servers of the recipe.

Uvicorn has none for a client that is silent before its request is whole, for the size of a body, or for a client that
does not read its answer.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

MAX_CONNECTIONS = 10_000  # of one server, and never more than half of the files that its process may open
MAX_BODY_BYTES = 64 << 20  # of one request: the rows and answers of a large group
MAX_ARRIVING_BYTES = 1 << 30  # of all bodies of one server that are not whole yet
_MIB = 1 << 20


class LimitedProtocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 on one connection, for `uvicorn.Config(http=...)`: closed when a request does not arrive in time.

    The time counts from the connection for its first request, from the first byte for each later one, and again from
    the end of the head for the body. Bytes that arrive do not prolong it; it stands still while the program does not
    read. An answer that waits for its reader for `unread_seconds` ends the connection, too.

    A body that is too large is refused with status 413, at once where its length is declared. Too many connections, or
    too much that arrives on all of them, ends those that have kept the server waiting longest, or that have sent most:
    a right request is small and comes at once, so nobody keeps it out.
    """

    conn: Any  # uvicorn's connection of h11
    head_seconds = 30.0
    body_seconds = 60.0
    unread_seconds = 300.0
    _awaited: Any = None  # the state of the client in which `_timer` was started
    _since = 0.0  # second of the event loop in which that was
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, self.conn._max_incomplete_event_size)

    @property
    def is_awaited(self) -> bool:
        """Whether the next step is the client's: it has not sent a whole request."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = _TimedFlow(transport)
        if len(self.connections) > most_connections() and not self._made_place():
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        before = self.conn.body_bytes // _MIB
        super().data_received(data)
        if self.conn.body_bytes // _MIB > before:
            self._make_room()
        self._watch()

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer with an error, where no answer has begun, and end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"detail": text, "error": {"message": text, "code": status}}).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what uvicorn takes for no request, and what is too large."""
        if self.conn.body_bytes > MAX_BODY_BYTES:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY_BYTES // _MIB} MiB")
        else:
            self.refuse(HTTPStatus.BAD_REQUEST, msg)

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

    def _should_upgrade(self) -> bool:
        """Take no websocket: no server has one, and this class would not limit it."""
        return False

    def _made_place(self) -> bool:
        """End the half of the awaited connections that has been awaited longest; returns whether there was one."""
        awaited = sorted(
            (one for one in self.connections if one.is_awaited and one is not self), key=lambda one: one._since
        )
        ended = awaited[: (len(awaited) + 1) // 2]
        for one in ended:
            self.connections.discard(one)
            one.transport.abort()
        return bool(ended)

    def _make_room(self) -> None:
        """Refuse the largest of the bodies that arrive until all of them together are allowed."""
        sizes = {one: one.conn.body_bytes for one in self.connections if one.conn.their_state is h11.SEND_BODY}
        while sum(sizes.values()) > MAX_ARRIVING_BYTES:
            largest = max(sizes, key=lambda one: sizes[one])
            del sizes[largest]
            largest.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too much arrives at once; send it again later")

    def _watch(self) -> None:
        """Start the time of what the client is sending; it goes on where it runs already."""
        state = self.conn.their_state
        if state is self._awaited:
            return
        self._stop_timer()
        self._awaited, self._since = state, self.loop.time()
        seconds = {h11.IDLE: self.head_seconds, h11.SEND_BODY: self.body_seconds}.get(state)
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._on_late, self.flow.paused_seconds())

    def _on_late(self, paused_before: float) -> None:
        """End the connection, later by as long as the program did not read since `paused_before`."""
        paused = self.flow.paused_seconds()
        if paused > paused_before:
            self._timer = self.loop.call_later(paused - paused_before, self._on_late, paused)
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


class _Connection(h11.Connection):
    """What a client sends, read; `body_bytes` are those of its latest request, as declared or as they came."""

    body_bytes = 0

    def next_event(self) -> Any:
        """Return the next event; raises `RemoteProtocolError` for a body that is too large."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            declared = dict(event.headers).get(b"content-length", b"0")  # digits, as h11 has checked
            self.body_bytes = int(declared) if int(declared) > MAX_BODY_BYTES else 0
        elif isinstance(event, h11.Data):
            self.body_bytes += len(event.data)
        if self.body_bytes > MAX_BODY_BYTES:
            raise h11.RemoteProtocolError("the body is too large", error_status_hint=413)
        return event


class _TimedFlow(FlowControl):  # type: ignore[misc]
    """Pauses the reading of one connection, and knows for how long in all."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._now = asyncio.get_running_loop().time
        self._ended_pauses = 0.0  # seconds
        self._began = 0.0

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._began = self._now()
        super().pause_reading()

    def resume_reading(self) -> None:
        self._ended_pauses = self.paused_seconds()
        super().resume_reading()

    def paused_seconds(self) -> float:
        return self._ended_pauses + (self._now() - self._began if self.read_paused else 0.0)


def most_connections() -> int:
    """Return how many connections one server of this process takes at once."""
    return min(MAX_CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1))
