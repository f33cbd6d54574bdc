"""A model and its drafter take the tensors of one push, each those that it knows."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList

from recipes.errors import EngineError
from recipes.generation.drafter import PushedModels, pushed_drafter


class Named(Module):
    """Loads its parameters by their names, drops all others and returns what it has loaded, as vLLM's drafters do."""

    def __init__(self, **parts: Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.taken: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name in own:
                own[name].data.copy_(tensor)
                self.taken.append(name)
        return set(self.taken)


def linear() -> Linear:
    return Linear(2, 2, bias=False)


def made() -> tuple[Named, Named, PushedModels]:
    model = Named(layer=linear(), embedding=linear())
    drafter = Named(heads=ModuleList([linear(), linear()]), embedding=model.embedding)
    return model, drafter, PushedModels(model, drafter)


def weights(*names: str) -> list[tuple[str, Tensor]]:
    return [(f"{name}.weight", torch.full((2, 2), float(number))) for number, name in enumerate(names, start=1)]


def test_both_take_their_tensors_from_every_part_and_what_they_share_is_loaded_once() -> None:
    model, drafter, both = made()
    pushed = weights("layer", "heads.0", "embedding", "heads.1")
    both.load_weights(iter(pushed[:2]))
    with pytest.raises(EngineError, match=r"no value for 1 of 2 parameters of the drafter: heads\.1\.weight;"):
        both.require_drafter()
    both.load_weights(pushed[2:])
    both.require_drafter()
    assert model.taken == ["layer.weight", "embedding.weight"]
    assert drafter.taken == ["heads.0.weight", "heads.1.weight"]
    assert drafter.embedding is model.embedding
    assert [one.data[0, 0] for one in drafter.parameters()] == [2, 4, 3]


def test_all_parts_are_loaded_as_one_model() -> None:
    model, drafter, both = made()
    assert set(both.modules()) == {both, *model.modules(), *drafter.modules()}
    assert len(list(both.parameters())) == 4


def worker(**speculation: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**speculation) if speculation else None,
        model_config=SimpleNamespace(model="/model", model_weights=""),
        get_draft_model=lambda: "drafter",
    )


def test_only_the_models_own_heads_are_pushed() -> None:
    assert pushed_drafter(worker(method="mtp", model="/model")) == "drafter"
    assert pushed_drafter(worker(method="mtp", model="/other")) is None
    assert pushed_drafter(worker(method="eagle3", model="/model")) is None
    assert pushed_drafter(worker()) is None
