"""How a model of vLLM takes the experts of a layer in blocks, each one stacked tensor, and not one by one.

Super has 40,960 expert tensors. vLLM's layerwise reload calls a loader of about 0.2 ms twice for each, and it keeps all
that is received of a layer, whole, until the layer is complete. Here a layer's parameters are made when its first block
comes, and a block is copied to its place at once, by vLLM's own loader, which takes a stack of experts in one call.

At the first push all experts are loaded one by one without any data, which shows where each of them goes. A block is
loaded as a stack only where that leads to the very same copies; else its experts are given to the model one by one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors

from recipes.generation.direct_load import Copies
from recipes.types import experts_of

logger = logging.getLogger(__name__)

Shape = tuple[str, torch.dtype, tuple[int, ...]]
_WhereCopied = tuple[tuple[Any, ...], tuple[Any, ...]]  # where to and where from: offset, shape, strides


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertCall:
    """One call of a parameter's loader, and the copies that it makes."""

    layer: Module
    param: str  # name in its layer
    expert: int  # within its block
    place: int  # of the expert in the parameter
    arguments: dict[str, Any]  # the others
    copies: tuple[_WhereCopied, ...]

    @property
    def target(self) -> tuple[int, str, tuple[Any, ...]]:
        """What is the same for all experts of a block."""
        given = {key: value for key, value in self.arguments.items() if key != "expert_id"}
        return id(self.layer), self.param, tuple(sorted(given.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockPlace:
    """Where the experts of one block go that this rank keeps: a row of them, in a row of one parameter."""

    call: _ExpertCall  # of the first of them
    count: int
    size: int  # elements
    name: str  # of the parameter in the model

    def load(self, block: Tensor) -> None:
        """Copy them into the layer, and complete it when it has all."""
        layer, info = self.call.layer, get_layerwise_info(self.call.layer)
        materialize_layer(layer, info)  # the first time
        param = getattr(layer, self.call.param)
        self.run(param, block, _get_original_loader(param))
        info.load_numel += self.size
        if info.load_numel >= get_layer_size(layer):
            _layerwise_process(layer, info)

    def run(self, param: Tensor, block: Tensor, loader: Callable[..., Any]) -> None:
        """Load them into their part of `param`, which has the attributes that the loader reads."""
        part = param.data[self.call.place : self.call.place + self.count]
        part.__class__, part.__dict__ = param.__class__, param.__dict__.copy()
        own = block[self.call.expert : self.call.expert + self.count]
        loader(param=part, loaded_weight=own, **self.call.arguments)


class BlockLoader:
    """Loads one model from the tensors of a push."""

    def __init__(self, model: Module, blocks: Sequence[Shape]) -> None:
        """`blocks` are those of a push; the layers are looked at when the first of them comes."""
        self._model, self._blocks = model, blocks
        self._places: dict[str, _BlockPlace | None] | None = (
            None  # of a block; None: this rank keeps none of its experts
        )

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors, within vLLM's layerwise reload where there are blocks; returns the names of parameters."""
        loaded: set[str] = set()
        others: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            experts = experts_of(name)
            if experts is None:
                others.append((name, tensor))
                continue
            if self._places is None:
                self._places = _places(self._model, self._blocks)
            if name not in self._places:
                others += zip(experts, tensor.unbind(), strict=True)
            elif (place := self._places[name]) is not None:
                place.load(tensor)
                loaded.add(place.name)
        return loaded | set((self._model.load_weights(others) or ()) if others else ())  # type: ignore[operator]


def _places(model: Module, blocks: Sequence[Shape]) -> dict[str, _BlockPlace | None]:
    """Find where the experts of each block go; a block that cannot be loaded as a stack is left out."""
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in blocks}
    block_of = {_storage(probe): name for name, probe in probes.items()}
    calls: dict[str, list[_ExpertCall]] = defaultdict(list)

    def note(layer: Module, name: str, like: Tensor, loader: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments = signature(loader).bind(*args, **kwargs).arguments
        with Copies() as copies:
            result = loader(*args, **kwargs)
        given = arguments.pop("loaded_weight")
        del arguments["param"]
        if copies.found:
            block, each = block_of[_storage(given)], like.stride(0)
            calls[block].append(
                _ExpertCall(
                    layer=layer,
                    param=name,
                    expert=given.storage_offset() // probes[block].stride(0),
                    place=copies.found[0][0].storage_offset() // each,
                    arguments=arguments,
                    copies=tuple((_where(target), _where(source)) for target, source in copies.found),
                )
            )
        return result

    singles = [
        one for name, probe in probes.items() for one in zip(experts_of(name) or (), probe.unbind(), strict=True)
    ]
    loaders = {}
    for layer in model.modules():
        for name, tensor in get_layer_tensors(layer).items():
            if tensor.dim() == 3 and hasattr(tensor, "weight_loader"):
                loaders[id(tensor)] = tensor, tensor.weight_loader
                tensor.weight_loader = partial(note, layer, name, tensor, _get_original_loader(tensor))
    with disable_mtp_completeness_check():
        model.load_weights(singles)  # type: ignore[operator]
    for tensor, loader in loaders.values():
        tensor.weight_loader = loader
    prefixes = {id(layer): f"{prefix}." if prefix else "" for prefix, layer in model.named_modules()}
    found: dict[str, _BlockPlace | None] = {}
    for name, probe in probes.items():
        own = sorted(calls[name], key=lambda call: call.expert)
        if not own:
            found[name] = None
        elif (place := _as_stack(own, probe, prefixes)) is not None:
            found[name] = place
    if len(found) < len(blocks):
        logger.warning("%d of %d blocks of experts are loaded one by one", len(blocks) - len(found), len(blocks))
    return found


def _as_stack(calls: Sequence[_ExpertCall], probe: Tensor, prefixes: dict[int, str]) -> _BlockPlace | None:
    """Return the place of a block, or None where its experts loaded as a stack do not get where each of them gets."""
    first = calls[0]
    in_row = all(
        call.target == first.target and call.expert - first.expert == call.place - first.place == number
        for number, call in enumerate(calls)
    )
    if not in_row:
        return None
    size = sum(prod(target[1]) for call in calls for target, _ in call.copies)
    place = _BlockPlace(call=first, count=len(calls), size=size, name=prefixes[id(first.layer)] + first.param)
    param = getattr(first.layer, first.param)
    with Copies() as copies:
        try:
            place.run(param, probe, _get_original_loader(param))
        except (RuntimeError, ValueError, IndexError):  # a loader that takes no stack
            return None
    if any(target.dim() != 3 or len(target) != len(calls) or source.dim() != 3 for target, source in copies.found):
        return None
    as_stack = [
        (_where(target[number]), _where(source[number]))
        for number in range(len(calls))
        for target, source in copies.found
    ]
    return place if as_stack == [copy for call in calls for copy in call.copies] else None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _where(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
