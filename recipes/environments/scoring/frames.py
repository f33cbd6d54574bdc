"""Messages on the pipes between the pool, a loader and its scorer. One is under way at a time.

A message is a list of parts: their number and their lengths (4 bytes each), then the parts.

The JSON in which a task, a response and replies go to a scoring process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from recipes.environments.contract.verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTask:
    """A task as a scoring process reads it, for all the scores that one response takes."""

    kind: str
    json: bytes
    digest: bytes  # of the JSON: a task can have tens of megabytes of tests


def encode_task(verifier: Verifier, task: Any) -> EncodedTask:
    """Return a task's JSON with its digest; raises `TypeError` for a field that JSON cannot carry."""
    text = as_json({field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
    return EncodedTask(kind=verifier.kind_of(task), json=text, digest=hashlib.blake2b(text, digest_size=16).digest())


def as_json(value: Any) -> bytes:
    """Return JSON that `json.loads` reads as `value`, with lists for tuples; raises `TypeError` where there is none.

    orjson is some ten times as fast as json. It refuses lone surrogates, large integers and deep nesting, all of which
    can stand in a row, and writes null for a number that is not finite: json writes these.
    """
    try:
        text = orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()
    return text if _is_finite(value) else json.dumps(value).encode()


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


MAX_REPLY_BYTES = 32 << 20  # of an answer: a verdict is short, questions to a judge repeat the response
MAX_PARTS = 8
_READ_BYTES = 1 << 16


def message(*parts: bytes) -> bytes:
    """Return the bytes of a message."""
    return struct.pack(f"!{1 + len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; raises `BrokenPipeError` when nobody reads."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_message(descriptor: int, *, max_bytes: int | None = None, deadline: float | None = None) -> bytes:
    """Return the bytes of one message.

    Raises `EOFError` when the other end is closed, `TimeoutError` at `deadline` (of the monotonic clock), `ValueError`
    for anything but one message of at most `max_bytes`.
    """
    data = bytearray()
    while (needed := _length(data)) is None or len(data) < needed:
        if max_bytes is not None and (needed or 0) > max_bytes:
            raise ValueError(f"an answer of {needed} bytes, expected at most {max_bytes}")
        if deadline is not None and not is_readable(descriptor, deadline - time.monotonic()):
            raise TimeoutError
        read = os.read(descriptor, max(_READ_BYTES, (needed or 0) - len(data)))
        if not read:
            raise EOFError
        data += read
    if len(data) > needed:
        raise ValueError("more than one answer")
    return bytes(data)


def parts_of(data: bytes) -> Sequence[bytes]:
    """Return the parts of a message."""
    count = struct.unpack_from("!I", data)[0]
    end, parts = 4 + 4 * count, []
    for length in struct.unpack_from(f"!{count}I", data, 4):
        parts.append(data[end : end + length])
        end += length
    return parts


def send(to: int, data: bytes, sources: Sequence[int], deadline: float) -> int:
    """Write all bytes to a non-blocking descriptor, and return the first of `sources` that can be read then or before.

    Raises `TimeoutError` at `deadline` (of the monotonic clock), `BrokenPipeError` when the other end is closed.
    """
    rest = memoryview(data)
    while True:
        waiting = select.poll()
        for source in sources:
            waiting.register(source, select.POLLIN)
        if rest:
            waiting.register(to, select.POLLOUT)
        ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, deadline - time.monotonic()) * 1000.0)}
        if not ready:
            raise TimeoutError
        if rest and to in ready:  # first, so that an early answer does not leave a message half sent
            rest = rest[os.write(to, rest) :]
            continue
        return next(source for source in sources if source in ready)


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether something can be read, or the other end is closed, within `seconds`."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000.0))


def _length(data: bytearray) -> int | None:
    """Return how many bytes a message has, None while that cannot be known; raises `ValueError` for no message."""
    if len(data) < 4:
        return None
    count = struct.unpack_from("!I", data)[0]
    if count > MAX_PARTS:
        raise ValueError(f"a message of {count} parts, expected at most {MAX_PARTS}")
    start = 4 + 4 * count
    return None if len(data) < start else start + sum(struct.unpack_from(f"!{count}I", data, 4))
