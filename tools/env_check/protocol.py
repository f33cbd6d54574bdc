"""What a resources server answers to requests that no client should send: never a reward."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

REQUEST_SECONDS = 30.0
MAX_READ = 1 << 20  # bytes of a reply that are looked at
BODIES: Mapping[str, bytes] = {
    "an empty body": b"",
    "cut JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "bytes that are no text": b"\xff\xfe",
    "deep nesting": b"[" * 100_000,
    "not a number": b'{"reward": NaN}',
}


async def first_problem(url: str, row: Mapping[str, Any]) -> str:
    """Return what a server answered wrongly to a malformed `/verify`, "" when it refused all of them."""
    bodies = {**BODIES, "a row without a response": json.dumps(row).encode()}
    bodies["a response of text"] = json.dumps({**row, "response": "x"}).encode()
    for name, body in bodies.items():
        status, reply = await asyncio.to_thread(_post, f"{url.rstrip('/')}/verify", body)
        if status is None:
            return f"{name}: {reply.decode(errors='replace')}"
        if 200 <= status < 300 and _has_reward(reply):
            return f"{name}: status {status} with a reward"
    return ""


def _post(url: str, body: bytes) -> tuple[int | None, bytes]:
    """Return status and body of a reply, or None and why there was none."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_SECONDS) as reply:
            return reply.status, reply.read(MAX_READ)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, ValueError) as error:
        return None, f"no answer: {getattr(error, 'reason', error)}".encode()


def _has_reward(reply: bytes) -> bool:
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        return False
    failed = isinstance(found, dict) and (found.get("_ng_failure_class") or found.get("mask_sample"))
    return isinstance(found, dict) and not failed and isinstance(found.get("reward"), int | float)
