"""What travels between a client and an engine's actor: requests there, answers back. Imports no vLLM and no Ray."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from recipes.types import Completion, Sampling, VersionSpan


class AtPush(StrEnum):
    """What becomes of the requests that run on an engine when new weights are pushed to it."""

    KEEP = "keep"
    """They go on with the new weights and the KV cache that they have."""
    RECOMPUTE = "recompute"
    """They go on, and all their KV is computed again with the new weights."""
    DRAIN = "drain"
    """The push waits until they have ended. Those that wait for a place in the batch begin after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to sample."""

    id: int  # unique in its client
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    affinity: int  # number of the prompt, from the caller
    sample: tuple[int, ...]  # rollout and turn: tells it from the caller's other requests for the prompt


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


def request_seed(seed: int, request: Request) -> int:
    """Return the 63-bit seed of a request's random numbers.

    It depends on the run's seed, the prompt and the numbers of the sample only. So the same weights sample the same
    tokens again, whichever engine it is and whatever else it samples.
    """
    prompt = np.asarray(request.prompt_token_ids, dtype=np.int32).tobytes()
    numbers = struct.pack(f"<{2 + len(request.sample)}q", seed, request.affinity, *request.sample)
    return int.from_bytes(hashlib.blake2b(numbers + prompt, digest_size=8).digest(), "little") >> 1


def to_completion(sample: Sample) -> Completion:
    """Unpack a sample."""
    return Completion(
        token_ids=tuple(np.frombuffer(sample.token_ids, dtype=np.int32).tolist()),
        logprobs=tuple(np.frombuffer(sample.logprobs, dtype=np.float32).tolist()),
        versions=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in sample.versions),
        finish_reason=sample.finish_reason,
    )
