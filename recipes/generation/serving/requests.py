"""What travels between a client and an engine's actor: requests there, answers back. Imports no vLLM and no Ray."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from recipes.types import Completion, Sampling, VersionSpan

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
    )
