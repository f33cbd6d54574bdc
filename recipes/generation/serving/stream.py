"""The connection between a client and an engine: frames over TCP, once each side has shown that it has the key.

An engine makes its key when it starts. The driver gets it through Ray and passes it on to the rollout workers, so who
has it may do what a rollout worker may. A frame is its length in four bytes and one message in MessagePack, which is
checked for its types: a `ClientMessage` to the engine, `Answers` to the client. Imports no vLLM and no Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field

import msgspec

from recipes.generation.serving.requests import Answers, ClientMessage

HANDSHAKE_SECONDS = 60.0  # for the first exchange: what keeps the other side so long would count as its death later
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH_BYTES = 4
_MAX_NAME_BYTES = 200
_MAX_FRAME_BYTES = 1 << 30  # many times the longest prompt

_encode = msgspec.msgpack.Encoder().encode
to_answers = msgspec.msgpack.Decoder(Answers).decode
to_client_message = msgspec.msgpack.Decoder(ClientMessage).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where the actor of an engine takes connections of clients."""

    host: str
    port: int
    key: bytes = field(repr=False)


def frame(message: Answers | ClientMessage) -> bytes:
    """Return a message as it is sent."""
    return _framed(_encode(message))


async def read_frame(reader: asyncio.StreamReader, *, most_bytes: int = _MAX_FRAME_BYTES) -> bytes:
    """Return the content of the next frame; raises `EOFError` at the end, `ConnectionError` when it is too long."""
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if size > most_bytes:
        raise ConnectionError(f"a frame has {size} bytes, at most {most_bytes} are taken")
    return await reader.readexactly(size)


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> str:
    """Do the engine's part of the first exchange and return the client's name.

    Raises `ConnectionError` when the client does not have the key, `TimeoutError` when it is slow, `EOFError` when it
    is gone.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        nonces = nonce + await reader.readexactly(_NONCE_BYTES)
        shown = await reader.readexactly(_PROOF_BYTES)
        name = await read_frame(reader, most_bytes=_MAX_NAME_BYTES)
    if not hmac.compare_digest(shown, _proof(key, b"client", nonces, name)):
        raise ConnectionError("the client does not have the key of the engine")
    writer.write(_proof(key, b"engine", nonces, name))
    return name.decode()


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, name: str) -> None:
    """Do the client's part of the first exchange.

    Raises `ConnectionError` when the other side does not have the key, `EOFError` when it refuses.
    """
    nonces = await reader.readexactly(_NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces += own
    encoded = name.encode()
    writer.write(own + _proof(key, b"client", nonces, encoded) + _framed(encoded))
    shown = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(shown, _proof(key, b"engine", nonces, encoded)):
        raise ConnectionError("the other side does not have the key of the engine")


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def _proof(key: bytes, side: bytes, nonces: bytes, name: bytes) -> bytes:
    return hmac.digest(key, side + nonces + name, "sha256")
