"""A broadcast that an engine does not take: the order of calls, on a fake NCCL group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.errors import EngineError
from recipes.policy import weights as weights_module
from recipes.policy import worker as worker_module
from recipes.policy.weights import NcclSender, make_layout
from recipes.policy.worker import PolicyWorker

NAMES = ("a", "b", "c", "d")


class Group:
    """A communicator: the second broadcast waits for an engine that is dead, until the group is destroyed."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.calls: list[str] = []
        self.is_whole = is_whole
        self._destroyed = threading.Event()

    def broadcast(self, _tensor: torch.Tensor, src: int) -> None:
        assert not self._destroyed.is_set(), "its memory has been freed"
        self.calls.append("broadcast")
        if not self.is_whole and len(self.calls) == 2:
            assert self._destroyed.wait(30)

    def destroy(self) -> None:
        self.calls.append("destroy")
        self._destroyed.set()


def produce(
    iterator: Iterator[tuple[str, torch.Tensor]], *, group: Any, src: int, post_iter_func: Any, **_: Any
) -> None:
    """Stand in for vLLM's producer."""
    for item in iterator:
        group.broadcast(post_iter_func(item), src=src)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace CUDA and vLLM; return the names of the tensors that are made."""
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _self, _stream: None)
    monkeypatch.setattr(packed_tensor, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(weights_module, "_LOOK_SECONDS", 0.01)
    return []


def exported(made: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in NAMES:
        made.append(name)
        yield name, torch.zeros(2)


def sender_of(group: Group) -> NcclSender:
    sender = object.__new__(NcclSender)  # joining a group takes a GPU
    sender._layout = make_layout([(name, torch.float32, (2,)) for name in NAMES], path="")
    sender._group, sender._has_left = group, False
    return sender


@pytest.mark.parametrize(("timeout_s", "is_cancelled"), [(0.05, False), (30.0, True)], ids=["late", "cancelled"])
def test_a_broadcast_that_waits_in_vain_ends_and_every_tensor_is_made(
    made: list[str], timeout_s: float, is_cancelled: bool
) -> None:
    """The other ranks make the tensors together with this one: where it stopped, they would wait for it."""
    group = Group()
    sender = sender_of(group)

    def is_over() -> bool:
        return is_cancelled and len(group.calls) == 2

    with pytest.raises(EngineError, match="given up" if is_cancelled else "not complete within"):
        sender.write(exported(made), timeout_s=timeout_s, is_cancelled=is_over)
    assert group.calls == ["broadcast", "broadcast", "destroy"]
    assert made == list(NAMES)
    sender.close()
    assert group.calls.count("destroy") == 1


def test_a_broadcast_that_the_engines_take_is_whole(made: list[str]) -> None:
    group = Group(is_whole=True)
    sender_of(group).write(exported(made), timeout_s=30.0, is_cancelled=lambda: False)
    assert group.calls == ["broadcast"] * len(NAMES)


def test_a_rank_leaves_its_group_before_it_joins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def join(_layout: Any, *, nccl_id: bytes, world_size: int, **_options: Any) -> Any:
        happened.append(f"join {nccl_id.decode()} of {world_size}")
        return SimpleNamespace(close=lambda: happened.append(f"leave {nccl_id.decode()}"))

    monkeypatch.setattr(weights_module, "NcclSender", join)
    monkeypatch.setattr(worker_module.ray, "get_runtime_context", lambda: SimpleNamespace(is_canceled=None))
    worker = PolicyWorker(0)
    worker._layout = None  # type: ignore[assignment]
    worker.connect_engines(b"first", 8, 30.0)
    worker.connect_engines(b"second", 4, 30.0)
    assert happened == ["join first of 9", "leave first", "join second of 5"]


def test_rank_0_gives_up_when_its_call_is_cancelled(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(is_canceled=lambda: True)
    monkeypatch.setattr(worker_module.ray, "get_runtime_context", lambda: context)
    group = Group()
    worker: Any = PolicyWorker(0)
    worker._coordinates = SimpleNamespace(exports=True)
    worker._trainer = SimpleNamespace(pushed=lambda: exported(made))
    worker._sink = sender_of(group)
    with pytest.raises(EngineError, match="weight push: the broadcast to the engines: given up"):
        worker.send_weights(0, 30.0)
    assert group.calls[-1] == "destroy" and made == list(NAMES)
