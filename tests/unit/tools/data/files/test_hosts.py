"""What a host's failures say, what they must not, and how long they are waited for."""

from __future__ import annotations

import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.errors import DataError
from recipes.retry import RetryPolicy, TransientError
from tools.data.files.hosts import HUB, session_with, wait_or_raise

SECRET = "hf_secret"


def test_a_token_is_in_no_message() -> None:
    headers = {"Authorization": f"Bearer {SECRET}\v"}
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        message = "HF_TOKEN: got a character that no header can hold"
        with pytest.raises(DataError, match=message) as raised, session_with(HUB, "some/data") as session:
            session.get(f"http://127.0.0.1:{server.server_port}/", headers=headers)
        server.shutdown()
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_a_wait_is_told_with_its_length_and_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    policy = RetryPolicy(sleep=slept.append)
    wait_or_raise(TransientError("HTTP 429", retry_after=30.0), 3, policy, "org/rows", HUB)
    assert slept == [30.0]
    assert capsys.readouterr().out == "download: org/rows: HTTP 429; trying again in 30.0 s (3 of 8)\n"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (TransientError("HTTP 503"), r"org/rows: HTTP 503, 9 times in a row; run the same command again"),
        (TransientError("no route", is_reached=False), r"9 times in a row; check the network .* HF_ENDPOINT"),
        (TransientError("HTTP 429", retry_after=7200), r"the hub asks to wait 7200 s; run it again in 7200 s, or set"),
    ],
)
def test_giving_up_says_what_to_do(failure: TransientError, message: str) -> None:
    with pytest.raises(DataError, match=message):
        wait_or_raise(failure, 9, RetryPolicy(), "org/rows", HUB)
