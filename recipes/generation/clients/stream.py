"""A client's connection to the actor of an engine: messages there, answers back. Imports no Ray."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from recipes.errors import EngineError
from recipes.generation.serving.requests import Answers, ClientMessage
from recipes.generation.serving.stream import (
    HANDSHAKE_SECONDS,
    EngineAddress,
    frame,
    introduce,
    read_frame,
    to_answers,
)

SILENCE_SECONDS = 60.0  # without a message, after which an actor counts as dead; a live one speaks every 2 s
_MAX_LOOKS = 8  # in this time, for a message


class EngineStream:
    """One connection of the client `name`, on one event loop. Only `send` may be called from other threads."""

    def __init__(self, name: str, address: EngineAddress, loop: asyncio.AbstractEventLoop) -> None:
        self._name, self._address, self._loop = name, address, loop
        self._unsent: list[bytes] = []  # messages from before the connection
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._num_looks = 0  # since the last message
        self._look_later: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        """Connect, unless that is done; what has been said so far is sent.

        Raises `EngineError` with the address when the actor cannot be reached or has an engine that is dead.
        """
        if self._writer is not None:
            return
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                self._reader, self._writer = await self._introduced()
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError) and f"no answer within {HANDSHAKE_SECONDS:g} s"
            raise EngineError(
                f"the generation engine at {self._address.host}:{self._address.port} cannot be reached "
                f"({late or error}); if it runs, open the ports policy.generation.port_range_low to port_range_high "
                "between the nodes"
            ) from error
        self._writer.write(b"".join(self._unsent))
        self._unsent.clear()
        self._look()

    async def _introduced(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            await introduce(reader, writer, self._address.key, self._name)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def again(self) -> EngineStream:
        """Return another connection of the same client to the same actor, not made yet."""
        return EngineStream(self._name, self._address, self._loop)

    def send(self, message: ClientMessage) -> None:
        """Send a message. It is lost when the connection breaks, which `answers` then raises."""
        content = frame(message)
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._write(content)
        else:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for an answer any more
                self._loop.call_soon_threadsafe(self._write, content)

    async def answers(self) -> Answers:
        """Return what the engine says next.

        Raises `EngineError` when it says that it is dead, `TimeoutError` when it is silent, `OSError` or `EOFError`
        when the connection breaks.
        """
        assert self._reader is not None
        try:
            told = to_answers(await read_frame(self._reader))
        except (OSError, EOFError) as error:
            if self._num_looks > _MAX_LOOKS:
                raise TimeoutError from error
            raise
        self._num_looks = 0
        if told.failure:
            raise EngineError(told.failure)
        return told

    def close(self) -> None:
        """End the connection; what is sent from now on is lost."""
        if self._look_later is not None:
            self._look_later.cancel()
        if self._writer is not None:
            self._writer.close()

    def _look(self) -> None:
        """Break the connection after many looks without a message. A pause of this process counts as one look."""
        assert self._writer is not None
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            self._writer.transport.abort()
        else:
            self._look_later = self._loop.call_later(SILENCE_SECONDS / _MAX_LOOKS, self._look)

    def _write(self, content: bytes) -> None:
        if self._writer is None:
            self._unsent.append(content)
        elif not self._writer.is_closing():
            self._writer.write(content)
