"""A push repeats the recorded calls: linear layers pack from the source, everything else is copied to its place.

The model has real linear layers of vLLM's CPU kind in a module of our own, with one loader for each way in which the
parts of a weight may lie in the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear

pytestmark = pytest.mark.functional

NAMES = ("first", "second", "gain")
SIZE = 32


class Merged(Module):
    """A linear layer of two tensors; `order` says which of them has the first rows."""

    def __init__(self, order: tuple[int, int]) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        super().__init__()
        self.order = order
        weight: Any = Parameter(torch.zeros(2 * SIZE, SIZE), requires_grad=False)
        weight.weight_loader = self.load
        self.weight = weight
        self.quant_method = UnquantizedLinearMethod()

    def load(self, param: Tensor, loaded: Tensor, part: int) -> None:
        param.data.narrow(0, self.order[part] * SIZE, SIZE).copy_(loaded)


class Model(Module):
    """The layer, and a weight that is used as it is loaded; `has_gain` says whether that one belongs to this rank."""

    def __init__(self, order: tuple[int, int], *, has_gain: bool = True) -> None:
        super().__init__()
        self.merged = Merged(order)
        gain: Any = Parameter(torch.zeros(SIZE), requires_grad=False)
        if not has_gain:
            gain.weight_loader = lambda param, loaded: False
        self.gain = gain

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, tensor in weights:
            if name == "gain":
                loader: Any = getattr(self.gain, "weight_loader", default_weight_loader)
                loader(self.gain, tensor)
            else:
                self.merged.weight.weight_loader(self.merged.weight, tensor, NAMES.index(name))


def views(source: Tensor) -> list[tuple[str, Tensor]]:
    shapes = [(SIZE, SIZE), (SIZE, SIZE), (SIZE,)]
    parts = torch.split(source.view(torch.float32), [torch.Size(shape).numel() for shape in shapes])  # type: ignore[no-untyped-call]
    return [(name, part.view(shape)) for name, part, shape in zip(NAMES, parts, shapes, strict=True)]


def made(order: tuple[int, int], *, has_gain: bool = True) -> tuple[Model, Tensor]:
    """Return a model as vLLM leaves it after its start, and the bytes that its weights are pushed through."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model(order, has_gain=has_gain)
    record_metadata_for_reloading(model)
    model.merged.quant_method.process_weights_after_loading(model.merged)
    assert model.merged.weight.numel() == 0, "this build of vLLM does not pack"
    return model, torch.zeros(4 * (2 * SIZE * SIZE + SIZE), dtype=torch.uint8)


@pytest.mark.parametrize(("order", "is_one_piece"), [((0, 1), True), ((1, 0), False)], ids=["adjacent", "swapped"])
def test_every_push_reaches_every_weight(order: tuple[int, int], is_one_piece: bool) -> None:
    from recipes.generation.direct_load import record

    model, source = made(order)
    weights = views(source)
    config: Any = SimpleNamespace(dtype=torch.float32)
    direct = record(model, config, weights, source)
    assert direct is not None
    [packed] = [layer.packed for layer in direct._layers if layer.module is model.merged]
    assert (packed is not None) == is_one_piece
    gain = model.gain
    for push in range(3):
        generator = torch.Generator().manual_seed(push)
        source.view(torch.float32).normal_(generator=generator)
        waited: list[int] = []
        direct.load(waited.append)
        assert waited == [1, 2]
        rows = [weights[order.index(place)][1] for place in (0, 1)]
        x = torch.randn(3, SIZE, generator=generator)
        got = model.merged.cpu_linear(x, model.merged.weight, None)  # type: ignore[operator]
        assert torch.allclose(got, linear(x, torch.cat(rows)), atol=1e-5)
        assert model.gain is gain and torch.equal(gain, weights[2][1]), "what else refers to it must see it"


def test_a_tensor_of_another_rank_is_not_waited_for() -> None:
    from recipes.generation.direct_load import record

    model, source = made((0, 1), has_gain=False)
    source.view(torch.float32).fill_(1.0)
    config: Any = SimpleNamespace(dtype=torch.float32)
    direct = record(model, config, views(source), source)
    assert direct is not None
    waited: list[int] = []
    direct.load(waited.append)
    assert waited == [1] and not model.gain.any()


def test_a_push_ends_when_all_is_written_also_what_this_rank_does_not_use() -> None:
    from recipes.generation.weight_transfer import SharedMemoryUpdate, SharedMemoryWeightTransfer

    transfer = object.__new__(SharedMemoryWeightTransfer)
    transfer._is_recorded, transfer._direct = True, SimpleNamespace(load=lambda wait_for: wait_for(0))
    transfer._layout = SimpleNamespace(names=NAMES, count_offset=0)
    transfer._pushed_as = [0, 1, 2]
    transfer._bytes = torch.zeros(8, dtype=torch.uint8)
    transfer._bytes[0] = 1
    with pytest.raises(TimeoutError, match="has written 1 of 3 tensors"):
        transfer.receive_weights(SharedMemoryUpdate(num_before=0, wait_seconds=0.01))
    transfer._bytes[0] = 3
    transfer.receive_weights(SharedMemoryUpdate(num_before=0, wait_seconds=0.01))


def test_a_layer_that_keeps_another_form_of_its_weight_is_left_to_vllm() -> None:
    from recipes.generation.direct_load import record

    model, source = made((0, 1))
    model.gain = Parameter(torch.zeros(SIZE, dtype=torch.float64), requires_grad=False)
    config: Any = SimpleNamespace(dtype=torch.float32)
    assert record(model, config, views(source), source) is None
    assert model.gain.dtype == torch.float64 and not model.gain.is_meta


def test_what_a_bucket_hands_to_the_model_is_noted_and_loaded() -> None:
    from recipes.checksums import checksum
    from recipes.generation.weight_transfer import noted

    model = Model((0, 1))
    bucket = torch.arange(2 * SIZE * SIZE + SIZE, dtype=torch.float32)
    engine: Any = SimpleNamespace(model=model)  # as vLLM's NCCL engine, which calls `model.load_weights` per bucket
    received: dict[str, Tensor] = {}
    with noted(engine, received):
        engine.model.load_weights(iter([("gain", bucket[-SIZE:])]))
        engine.model.load_weights(iter([("first", bucket[: SIZE * SIZE].view(SIZE, SIZE))]))
        bucket.zero_()  # vLLM fills the same memory again
    assert {name: int(value) for name, value in received.items()} == {
        "gain": int(checksum(torch.arange(2 * SIZE * SIZE, 2 * SIZE * SIZE + SIZE, dtype=torch.float32))),
        "first": int(checksum(torch.arange(SIZE * SIZE, dtype=torch.float32))),
    }
    assert model.gain[0] == 2 * SIZE * SIZE and "load_weights" not in vars(model)
