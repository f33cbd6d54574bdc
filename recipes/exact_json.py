"""JSON whose integers stay what they are: orjson makes floats of those beyond 64 bits, or refuses to write them.

Rows, requests and answers are read and written here. orjson does the work wherever it is exact, which is nearly always.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import orjson

_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19  # the digits of the shortest integer beyond 64 bits, each as 0: ten times as fast as a pattern


def loads(text: bytes | str) -> Any:
    """Return the value of JSON text; raises `ValueError` for anything else, deep nesting and endless integers too."""
    value = orjson.loads(text)
    data = text.encode() if isinstance(text, str) else text
    return _loads(data, None) if _LONG in data.translate(_AS_ZERO) else value


def loads_row(line: bytes) -> Any:
    """Return the value of a line whose objects name each key once; raises `ValueError` that names a repeated one."""
    orjson.loads(line)  # which is stricter about what JSON is
    return _loads(line, _named_once)


def _loads(text: bytes, make_object: Any) -> Any:
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (key, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"one object has the key {key[:80]!r} {count} times")
    return made


def dumps(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return JSON without spaces; half a surrogate pair becomes a question mark. Raises `TypeError` without a form."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys)
        except (ValueError, RecursionError) as error:
            raise TypeError(str(error)) from error
    return text.encode(errors="replace")
