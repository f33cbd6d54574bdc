"""Calls to both sides: the first failure is raised at once, and an engine that came back is connected first."""

import threading
import time
from typing import Any

import pytest

from recipes.errors import EngineError
from recipes.grpo.refit import refit, together
from recipes.types import WeightLayout


def test_the_first_failure_does_not_wait_for_the_slower_side() -> None:
    slow = threading.Event()

    def fail() -> None:
        raise EngineError("engine 1 is dead")

    began = time.monotonic()
    with pytest.raises(EngineError, match="engine 1 is dead"):
        together(lambda: slow.wait(30), fail)
    assert time.monotonic() - began < 5
    slow.set()


def test_results_come_in_the_order_of_the_calls() -> None:
    first_may_end = threading.Event()

    def second() -> str:
        first_may_end.set()
        return "second"

    assert together(lambda: first_may_end.wait(30) and "first", second) == ["first", "second"]


class Sides:
    """Policy and engines at once; remembers what was called."""

    num_ranks = 2
    num_sent = 0

    def __init__(self, path: str, *, needs_weight_content: bool = False, is_verified: bool = False) -> None:
        self.calls: list[str] = []
        self.needs_weight_content = needs_weight_content
        self._is_connected = False
        self._layout = WeightLayout(
            path=path, names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0, is_verified=is_verified
        )

    def needs_connect(self, layout: WeightLayout) -> bool:
        return not self._is_connected

    def weight_layout(self) -> WeightLayout:
        return self._layout

    def make_nccl_id(self) -> bytes:
        return b"id"

    def connect_engines(self, nccl_id: bytes, *, num_engine_ranks: int) -> None:
        self.calls.append(f"connect_engines {num_engine_ranks} by {nccl_id!r}")

    def connect_weights(self, _layout: WeightLayout, *, nccl_id: bytes | None = None) -> None:
        self.calls.append(f"connect_weights by {nccl_id!r}")
        self._is_connected = True

    def send_weights(self) -> None:
        self.num_sent += 5
        self.calls.append("send")

    def give_up_push(self) -> None:
        self.calls.append("give up")

    def weight_content(self) -> str:
        return "content"

    def drain(self) -> None:
        self.calls.append("drain")

    def update_weights(self, version: int, content: Any = None, *, num_before: int | None = None) -> None:
        self.calls.append(f"update {version}")
        self.pushed = (content, num_before)

    def sent_checksums(self) -> dict[str, int]:
        return {"embed": 5}

    def verify_weights(self, sent: dict[str, int]) -> None:
        self.calls.append(f"verify {sent}")


@pytest.mark.parametrize("path", ["/dev/shm/x", ""])
def test_a_push_is_verified_where_the_policy_keeps_checksums(path: str) -> None:
    plain, verified = Sides(path), Sides(path, is_verified=True)
    for sides in (plain, verified):
        refit(sides, sides, version=3)
    assert not any(call.startswith("verify") for call in plain.calls)
    assert verified.calls[-1] == "verify {'embed': 5}"


@pytest.mark.parametrize(
    ("path", "connected"),
    [("/dev/shm/x", ["connect_weights by None"]), ("", ["connect_engines 2 by b'id'", "connect_weights by b'id'"])],
)
def test_engines_are_connected_when_they_have_changed(path: str, connected: list[str]) -> None:
    sides = Sides(path)
    refit(sides, sides, version=3)
    refit(sides, sides, version=4)
    num = len(connected)
    assert sorted(sides.calls[1 : num + 1]) == connected
    assert sides.calls[0] == sides.calls[num + 3] == "drain", "a push begins once running requests may be touched"
    pushes = [sorted(sides.calls[n : n + 2]) for n in (num + 1, num + 4)]
    assert pushes == [["send", "update 3"], ["send", "update 4"]]


@pytest.mark.parametrize("path", ["", "/dev/shm/x"])
@pytest.mark.parametrize("method", ["connect_weights", "update_weights"])
def test_a_policy_that_waits_for_an_engine_that_has_failed_is_freed(
    path: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL it would wait for the whole deadline, and could not save meanwhile."""

    def die(*_args: Any, **_options: Any) -> None:
        raise EngineError("engine 1 is dead")

    sides = Sides(path)
    monkeypatch.setattr(sides, method, die)
    with pytest.raises(EngineError, match="engine 1 is dead"):
        refit(sides, sides, version=3)
    assert ("give up" in sides.calls) is (path == "")


@pytest.mark.parametrize(
    ("path", "needs_weight_content", "pushed"),
    [
        ("/dev/shm/x", False, [(None, 0), (None, 5)]),  # engines begin where the count of the file stands
        ("/dev/shm/x", True, [("content", None), ("content", None)]),
        ("", False, [(None, None), (None, None)]),
    ],
    ids=["file", "other host", "NCCL"],
)
def test_engines_wait_for_tensors_only_where_they_see_the_count(
    path: str, needs_weight_content: bool, pushed: list[Any]
) -> None:
    sides = Sides(path, needs_weight_content=needs_weight_content)
    for version, expected in enumerate(pushed):
        refit(sides, sides, version=version)
        assert sides.pushed == expected
