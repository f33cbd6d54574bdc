"""The JSON in which a task, a response and replies go to a scoring process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
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
