"""Where the actor of an engine takes the connections of its clients. Imports no vLLM and no Ray."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from functools import partial

import msgspec

from recipes.generation.serving.mailboxes import Mailbox, Mailboxes
from recipes.generation.serving.requests import Answers
from recipes.generation.serving.stream import EngineAddress, admit, frame, read_frame, to_client_message

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0  # between two messages to a client at most: they show that the engine lives, and tell its load
_BACKLOG = 1024  # rollout workers that connect at once


class Listener:
    """Takes connections until `close`. It belongs to the event loop on which it was started."""

    def __init__(self, mailboxes: Mailboxes, held: socket.socket) -> None:
        self._mailboxes = mailboxes
        self._server: asyncio.Server
        host, port = held.getsockname()
        self.address = EngineAddress(host=host, port=port, key=secrets.token_bytes(32))

    @classmethod
    async def start(cls, mailboxes: Mailboxes, held: socket.socket) -> Listener:
        """Take connections on a socket that listens already."""
        listener = cls(mailboxes, held)
        listener._server = await asyncio.start_server(listener._serve, sock=held, backlog=_BACKLOG)
        return listener

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the messages of one client until its connection ends. Who is not admitted leaves no trace."""
        try:
            if self._mailboxes.is_dead:
                return
            with suppress(OSError, EOFError, TimeoutError, UnicodeDecodeError):
                name = await admit(reader, writer, self.address.key)
                await self._take_all(name, reader, writer)
        finally:
            writer.close()

    async def _take_all(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        box = self._mailboxes.open(name, partial(_tell, writer))
        beat = asyncio.create_task(self._beat(box, writer))
        try:
            while True:
                self._mailboxes.take(box, to_client_message(await read_frame(reader)))
        except msgspec.MsgspecError as error:  # it is of another version
            logger.warning("the connection of client %s ends, for it sent no message: %s", name, error)
        finally:
            beat.cancel()
            self._mailboxes.close(box)

    async def _beat(self, box: Mailbox, writer: asyncio.StreamWriter) -> None:
        """Tell the client now and then that the engine lives; once it is dead say so and end the connection."""
        died = self._mailboxes.died
        while not self._mailboxes.is_dead:
            self._mailboxes.flush(box)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await died.wait()
        self._mailboxes.flush(box)
        _tell(writer, Answers(failure=self._mailboxes.why_dead()))
        writer.close()


def _tell(writer: asyncio.StreamWriter, answers: Answers) -> None:
    if not writer.is_closing():
        writer.write(frame(answers))
