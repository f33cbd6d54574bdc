"""Weights are read only after everything that the optimizer queued has run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.policy import step
from recipes.policy.families import mapping


def test_export_waits_for_the_device_before_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("waited"))

    def export(weights: Any, config: Any) -> Any:
        happened.append("read")
        return iter(weights)

    monkeypatch.setattr(mapping, "export", export)
    trainer: Any = SimpleNamespace(weights=[], model=SimpleNamespace(config=None))
    assert list(step.Trainer.export(trainer)) == []
    assert happened == ["waited", "read"]
