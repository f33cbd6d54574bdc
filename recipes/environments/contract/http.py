"""The HTTP client of environments and judges: JSON out, JSON in, over thousands of kept connections at once.

A failure is one of two kinds. `TransientError`: the server could not be reached, failed on its side or is busy, so
another attempt may succeed. `RefusedError`: the server gave an answer that no further attempt would change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from recipes.exact_json import dumps, loads
from recipes.retry import TransientError, is_transient, retry_after

MAX_REPLY_BYTES = 64 << 20  # a server that sends more is refused, so that it cannot fill this machine's memory
CLOSE_SECONDS = 10.0  # for the connections of one event loop
SHOWN_CHARS = 200  # of a server's error text
AT_A_TICK = 32  # requests that begin before the event loop looks at everything else again


class RefusedError(Exception):
    """No further attempt would change the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReply:
    """A JSON object and the cookies that came with it."""

    body: Mapping[str, Any]
    cookies: Mapping[str, str]


class Turns:
    """Spreads requests that are made at the same moment, so that thousands of them do not stall the event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_A_TICK)

    async def wait(self) -> None:
        """Return at once, unless many others have begun in this tick of the event loop."""
        await self._free.acquire()
        asyncio.get_running_loop().call_soon(self._free.release)


@dataclass(slots=True, kw_only=True)
class JsonClient:
    """Posts JSON objects. One session per event loop, since connections belong to the loop that opened them."""

    connections: int = 1024  # open at the same time
    _sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = field(
        default_factory=WeakKeyDictionary
    )
    _turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = field(default_factory=WeakKeyDictionary)

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
    ) -> JsonReply:
        """Post one object and return the object in the reply; raises `TransientError` or `RefusedError`.

        The caller bounds the time with `asyncio.timeout`. Proxies of the environment are not used and redirects are
        not followed: requests go to the address that the configuration names, and nowhere else.
        """
        reply, content = await self._exchange(url, body, headers, cookies)
        _raise_for_status(reply, content, url)
        try:
            value = loads(content)
        except ValueError as error:
            raise RefusedError(f"{url} answered no JSON: {_shown(content)!r}") from error
        if not isinstance(value, dict):
            raise RefusedError(f"{url} answered {_shown(content)!r}, expected an object")
        return JsonReply(body=value, cookies={name: morsel.value for name, morsel in reply.cookies.items()})

    async def post_for_text(self, url: str, body: Mapping[str, Any], *, cookies: Mapping[str, str]) -> str:
        """Post one object and return the reply as text, that of a refusal too.

        Raises `TransientError`, and `RefusedError` for a redirect, which is no answer.
        """
        reply, content = await self._exchange(url, body, None, cookies)
        if is_transient(reply.status) or 300 <= reply.status < 400:
            _raise_for_status(reply, content, url)
        return content.decode(errors="replace")

    async def _exchange(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None, cookies: Mapping[str, str] | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        loop = asyncio.get_running_loop()
        if loop not in self._turns:
            self._turns[loop] = Turns()
        await self._turns[loop].wait()
        try:
            async with self._session().post(
                url,
                data=dumps(body),
                headers={"content-type": "application/json", **(headers or {})},
                cookies=dict(cookies or {}),
                allow_redirects=False,
            ) as reply:
                return reply, await _read(reply)
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise RefusedError(f"{url}: no address that can be asked: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}", is_reached=False) from error

    async def delete(self, url: str, *, headers: Mapping[str, str]) -> None:
        """Delete what a URL names; raises `TransientError` or `RefusedError`."""
        try:
            async with self._session().delete(url, headers=dict(headers), allow_redirects=False) as reply:
                _raise_for_status(reply, await _read(reply), url)
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise RefusedError(f"{url}: no address that can be asked: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}", is_reached=False) from error

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def close_all(self) -> None:
        """Close the connections of every event loop: one that runs closes its own, another is run until that is done.

        Returns within `CLOSE_SECONDS` per loop. Call it when nothing is asked any more.
        """
        here: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):
            here = asyncio.get_running_loop()
        while self._sessions:
            loop, session = self._sessions.popitem()
            if loop is here:
                loop.create_task(session.close())  # its first step, which closes, needs nobody to keep it
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(session.close(), loop)
            else:  # in a thread, since a thread in which a loop runs can run no other
                closing = threading.Thread(target=_close_on, args=(session, loop), daemon=True)
                closing.start()
                closing.join(CLOSE_SECONDS)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.connections, limit_per_host=0),
                cookie_jar=aiohttp.DummyCookieJar(),  # keeps none: those of a session are sent with its requests
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
            self._sessions[loop] = session
        return session


def _close_on(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():  # its connections are closed: the session only has to learn it
        asyncio.run(session.close())
    else:
        loop.run_until_complete(session.close())


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in reply.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            reply.close()
            raise RefusedError(f"{reply.url} answered more than {MAX_REPLY_BYTES >> 20} MiB")
    return b"".join(parts)


def _raise_for_status(reply: aiohttp.ClientResponse, content: bytes, url: str) -> None:
    if 200 <= reply.status < 300:
        return
    message = f"{url} answered {reply.status}: {_shown(content)}"
    if is_transient(reply.status):
        raise TransientError(message, retry_after=retry_after(reply.headers))
    raise RefusedError(message)


def _shown(content: bytes) -> str:
    return content[: 4 * SHOWN_CHARS].decode(errors="replace")[:SHOWN_CHARS]
