"""What a host's failures say, what they must not, and how long they are waited for."""

from __future__ import annotations

import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.errors import DataError
from tools.files.hosts import HUB, Patience, TransientError, session_with

SECRET = "hf_secret"


def test_a_token_is_in_no_message() -> None:
    headers = {"Authorization": f"Bearer {SECRET}\v"}
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        message = "HF_TOKEN: got a character that no header can hold"
        with pytest.raises(DataError, match=message) as raised, session_with(HUB, "some/data") as session:
            session.get(f"http://127.0.0.1:{server.server_port}/", headers=headers)
        server.shutdown()
    assert SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(("asked", "seconds"), [(None, 4.0), (0.0, 4.0), (30.0, 30.0)])
def test_a_host_that_asks_for_no_wait_gets_one(asked: float | None, seconds: float) -> None:
    slept: list[float] = []
    Patience(sleep=slept.append).wait(2, TransientError("HTTP 429", asked=asked), "here")
    assert slept == [seconds]
