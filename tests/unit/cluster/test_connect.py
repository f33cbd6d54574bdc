"""Joining the cluster leaves the process as it was."""

from __future__ import annotations

import signal
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
