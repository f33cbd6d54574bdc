"""What travels between a client and an engine's actor: requests there, answers back. Imports no vLLM and no Ray.

The connection between a client and an engine: frames over TCP, once each side has shown that it has the key.

An engine makes its key when it starts. The driver gets it through Ray and passes it on to the rollout workers, so who
has it may do what a rollout worker may. A frame is its length in four bytes and one message in MessagePack, which is
checked for its types: a `ClientMessage` to the engine, `Answers` to the client. Imports no vLLM and no Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from recipes.types import Completion, Sampling, VersionSpan

HANDSHAKE_SECONDS = 60.0  # for the first exchange: what keeps the other side so long would count as its death later
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH_BYTES = 4
_MAX_NAME_BYTES = 200
_MAX_FRAME_BYTES = 1 << 30  # many times the longest prompt

_encode = msgspec.msgpack.Encoder().encode


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


ID_BYTES = 4  # of a token on its way
_SEED_TOKENS = 1024  # at the end of a prompt, that its seed depends on: each turn of a long rollout hashes no more


class AtPush(StrEnum):
    """What becomes of the requests that run on an engine when new weights are pushed to it."""

    KEEP = "keep"
    """They go on with the new weights and the KV cache that they have."""
    RECOMPUTE = "recompute"
    """They go on, and all their KV is computed again with the new weights."""
    DRAIN = "drain"
    """The push waits until they have ended. Those that wait for a place in the batch begin after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InSession:
    """The session that a request belongs to. The engine keeps prompt and answer for the next request of the session."""

    number: int  # unique in its client
    after: int | None = None  # id of the request whose prompt and answer it continues; None: it brings its whole prompt
    num_kept: int = 0  # leading tokens of these that belong to its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to sample."""

    id: int  # unique in its client
    token_ids: bytes  # int32 [T], the prompt without its first `session.num_kept` tokens
    num_prompt_tokens: int  # of the whole prompt
    sampling: Sampling
    affinity: int  # number of the prompt, from the caller
    sample: tuple[int, ...]  # rollout and turn: tells it from the caller's other requests for the prompt
    session: InSession | None = None
    routes_from: int = 0  # place in the prompt: of the tokens before it the client has the routes

    @property
    def work(self) -> int:
        """Return how many tokens it may take: prompt and longest answer."""
        return self.num_prompt_tokens + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion on its way to the client. Its arrays are bytes, which cross processes fastest."""

    token_ids: bytes  # int32 [T]
    logprobs: bytes  # float32 [T]
    versions: tuple[tuple[int, int, int], ...]  # version, start, end
    finish_reason: str
    routes: bytes = b""  # see `recipes.routes`


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The sample of a request or, when `sample` is None, why there is none."""

    id: int
    sample: Sample | None = None
    failure: str = ""
    is_session_lost: bool = False  # the engine has not got the tokens that the request continues


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What an engine tells a client at once."""

    answers: tuple[Answer, ...] = ()
    work_of_others: int = 0  # tokens that the unanswered requests of the other clients may still take
    failure: str = ""  # why the engine is dead; nothing follows


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """What a client tells an engine at once."""

    requests: tuple[Request, ...] = ()  # to sample
    deadline_seconds: float = 0.0  # of each of these requests
    aborted: tuple[int, ...] = ()  # ids of requests that nobody waits for
    ended_sessions: tuple[int, ...] = ()  # numbers


def to_bytes(token_ids: Sequence[int]) -> bytes:
    """Return ids as int32; raises `OverflowError` for an id beyond 32 bits."""
    return np.array(token_ids, np.int32).tobytes()


def request_seed(seed: int, request: Request, prompt: bytes | bytearray) -> int:
    """Return the 63-bit seed of a request's random numbers; `prompt` is all of it, as int32.

    It depends on the run's seed, the end of the prompt and the numbers of the sample only. So the same weights sample
    the same tokens again, whichever engine it is and whatever else it samples.
    """
    numbers = struct.pack(f"<{2 + len(request.sample)}q", seed, request.affinity, *request.sample)
    hashed = hashlib.blake2b(numbers, digest_size=8)
    hashed.update(prompt[-_SEED_TOKENS * ID_BYTES :])
    return int.from_bytes(hashed.digest(), "little") >> 1


def to_completion(sample: Sample) -> Completion:
    """Unpack a sample."""
    return Completion(
        token_ids=tuple(np.frombuffer(sample.token_ids, dtype=np.int32).tolist()),
        logprobs=tuple(np.frombuffer(sample.logprobs, dtype=np.float32).tolist()),
        versions=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in sample.versions),
        finish_reason=sample.finish_reason,
        routes=sample.routes,
    )


to_answers = msgspec.msgpack.Decoder(Answers).decode
to_client_message = msgspec.msgpack.Decoder(ClientMessage).decode
