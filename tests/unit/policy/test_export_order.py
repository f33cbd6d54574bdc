"""Weights are read only after everything that the optimizer queued has run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.policy import step


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
