"""The states of sessions that are open on a resources server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from recipes.environments.contract.tools import Tools

MAX_SESSIONS = 10_000  # open at once; beyond them the one that was used least recently ends


class Sessions:
    """Keeps one state per session, from its seed to its verdict."""

    def __init__(self, tools: Tools | None, settings: Mapping[str, Any]) -> None:
        self._tools, self._settings = tools, settings
        self._states: OrderedDict[str, Any] = OrderedDict()

    def seed(self, session_id: str) -> None:
        """Begin a session, or begin it anew; raises `ValueError` when its tools cannot start.

        Without tools there is nothing to keep.
        """
        if self._tools is None:
            return
        self._states[session_id] = self._tools.start(self._settings)
        self._states.move_to_end(session_id)
        while len(self._states) > MAX_SESSIONS:
            self._states.popitem(last=False)

    def call(self, session_id: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; raises `KeyError` for a session that is not open."""
        assert self._tools is not None
        state, text = self._tools.call(self._states[session_id], name, arguments)
        self._states[session_id] = state
        self._states.move_to_end(session_id)
        return text

    def end(self, session_id: str) -> None:
        """Forget a session; one that is not open is ignored."""
        self._states.pop(session_id, None)
