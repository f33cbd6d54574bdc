"""The sessions with tools that are open on a resources server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from recipes.environments.scoring.clients import InProcessVerifier, LocalSession

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
