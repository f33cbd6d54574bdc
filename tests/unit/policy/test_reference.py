"""The start weights take the place of the trained ones, and only for as long as they are asked to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.policy.step import ReferenceWeights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("bias", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x)) + self.bias.float()
        return result


def trained(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(torch.randn(tensor.shape, dtype=tensor.dtype) / 3)


def test_start_weights_are_there_inside_the_block_and_the_trained_ones_after_it() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 3)
    start, places = model(x), [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    reference = ReferenceWeights(model)
    for _ in range(2):
        trained(model)
        before = model(x)
        with reference.in_place():
            assert torch.equal(model(x), start)
        assert torch.equal(model(x), before)
        assert not torch.equal(before, start)
    assert places == [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]


def test_a_pass_that_fails_gives_the_trained_weights_back() -> None:
    model = Tied()
    reference = ReferenceWeights(model)
    trained(model)
    before = model(torch.ones(1, 3))
    with pytest.raises(ValueError, match="in the pass"), reference.in_place():
        raise ValueError("in the pass")
    assert torch.equal(model(torch.ones(1, 3)), before)


def test_a_tensor_that_moves_to_a_buffer_is_still_the_model_s() -> None:
    """Megatron lays parameters into one buffer and changes where their data lies."""
    model = Tied()
    start = model.first.weight.detach().clone()
    reference = ReferenceWeights(model)
    model.first.weight.data = model.first.weight.data.clone() + 1
    with reference.in_place():
        assert torch.equal(model.first.weight, start)
    assert torch.equal(model.first.weight, start + 1)
