"""Weights are read after everything that the optimizer queued, and sent as they were announced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.errors import PolicyError
from recipes.policy import step
from recipes.policy.weights import NcclSender, make_layout


def test_export_waits_for_the_device_before_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("waited"))

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        happened.append("read")
        return iter(())

    trainer: Any = SimpleNamespace(weights=SimpleNamespace(export=export))
    assert list(step.Trainer.export(trainer)) == []
    assert happened == ["waited", "read"]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("b", torch.zeros(2)), ("a", torch.zeros(2, dtype=torch.bfloat16)), ("a", torch.zeros(1, 2))],
    ids=["order", "dtype", "shape"],
)
def test_a_broadcast_of_what_was_not_announced_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, tensor: torch.Tensor
) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    sent: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    produce = "packed_nccl_broadcast_producer"
    monkeypatch.setattr(packed_tensor, produce, lambda iterator, **_group: sent.extend(iterator))
    sender = object.__new__(NcclSender)  # joining a group takes a GPU
    sender._layout = make_layout([("a", torch.float32, (2,)), ("b", torch.float32, (2,))], path="")
    sender._has_left = False
    with pytest.raises(PolicyError, match=rf"the policy sends {name} \(.*, the engines expect a \(float32 \[2\]\)"):
        sender.write([(name, tensor)], timeout_s=30.0, is_cancelled=lambda: False)
    assert sent == []
