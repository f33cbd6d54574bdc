"""Joining the cluster leaves the process as it was, and does not wait for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import ray

from recipes.cluster.connect import connect
from recipes.errors import RunError


def handle(_number: int, _frame: FrameType | None) -> None:
    """Stand for the handler that asks the run to stop."""


@pytest.fixture
def installed() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("answers", [True, False])
def test_a_request_to_stop_is_still_heard(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    def init(**_options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does: its own handler ends the process
        if not answers:
            raise ConnectionError("nobody is there")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray, "init", init)
    if answers:
        connect()
    else:
        with pytest.raises(RunError, match=r"no Ray cluster answers at 127\.0\.0\.1:6379: nobody"):
            connect()
    assert signal.getsignal(signal.SIGTERM) is handle


def test_a_cluster_that_takes_the_connection_and_says_nothing_ends_the_process() -> None:
    code = """
import ctypes, logging, ray
from recipes.cluster import connect
logging.basicConfig(level=logging.INFO)
connect.CONNECT_SECONDS = 0.2
ray.init = lambda **_: ctypes.CDLL(None).sleep(60)  # as Ray waits: outside Python, where no signal handler runs
connect.connect()
"""
    env = {"RAY_ADDRESS": "127.0.0.1:6379"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "the Ray node at 127.0.0.1:6379 has not answered for 0.2 s" in done.stderr
