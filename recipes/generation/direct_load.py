"""Load a model again and again from the same memory, on the CPU, with one pass over the weights.

vLLM's own reload takes four passes: it copies each tensor into fresh memory, packs that, and copies the result to where
the layer had it before. And it finds the place of each tensor anew. Here the calls that `load_weights` makes are
recorded at the first push. Later pushes repeat them: a linear layer whose weight lies in one piece in the source is
packed from there, everything else is copied to where the model uses it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_MOST_THREADS = 4
_THREAD_BYTES = 1 << 20  # a smaller layer is packed sooner than a thread has woken up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a tensor's loader."""

    name: str  # of the tensor in its layer
    like: Tensor  # what the loader expects: shape, dtype and attributes
    loader: Callable[..., Any]
    arguments: BoundArguments
    source: int  # number of the tensor that it reads
    copies: tuple[tuple[Tensor, Tensor], ...]  # target within `like`, and what is copied there

    def run(self, target: Tensor) -> None:
        """Load into `target`, which gets the attributes that the loader reads."""
        target.__class__, target.__dict__ = self.like.__class__, self.like.__dict__.copy()
        self.arguments.arguments["param"] = target
        self.loader(*self.arguments.args, **self.arguments.kwargs)


@dataclass(slots=True)
class _Layer:
    """The calls for one layer, in their order."""

    module: Module
    calls: list[_Call] = field(default_factory=list)
    packed: Tensor | None = None  # what its weight is packed from: in the source, or else memory of its own

    @property
    def last_source(self) -> int:
        return max(call.source for call in self.calls)

    @property
    def num_bytes(self) -> int:
        return sum(source.nbytes for call in self.calls for _, source in call.copies)

    @torch.no_grad()
    def load(self) -> None:
        """Copy or pack everything anew; the output head apart, which a tied model shares with its embedding."""
        module, weight = self.module, None
        if _is_packed(module):
            like = next(call.like for call in self.calls if call.name == "weight")
            weight = torch.empty(like.shape, dtype=like.dtype) if self.packed is None else self.packed
        for call in self.calls:
            if weight is None or call.name != "weight":
                call.run(getattr(module, call.name).data)
            elif self.packed is None:
                call.run(weight.data)
        if weight is not None:
            module.weight = Parameter(weight, requires_grad=False)
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            method.process_weights_after_loading(module)


class DirectLoad:
    """The recorded calls of one model."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = sorted(layers, key=lambda layer: layer.last_source)
        self._pool = ThreadPoolExecutor(max_workers=min(_MOST_THREADS, len(os.sched_getaffinity(0))))

    def load(self, wait_for: Callable[[int], None]) -> None:
        """Load all layers; `wait_for` returns once the source has all tensors up to a number.

        Several threads take the large layers: while an engine loads, it and the policy do nothing else.
        """
        jobs = []
        for layer in self._layers:
            wait_for(layer.last_source)
            if layer.num_bytes < _THREAD_BYTES:
                layer.load()
            else:
                jobs.append(self._pool.submit(layer.load))
        for job in jobs:
            job.result()


def record(
    model: Module, config: ModelConfig, tensors: Sequence[tuple[str, Tensor]], source: Tensor
) -> DirectLoad | None:
    """Record how `model` loads `tensors`, views of `source` in the order of their addresses; None where it is special.

    That is where a layer keeps its weights in another form than it loads them (quantization), or loads what is computed
    from a tensor. Nothing has been loaded then.
    """
    starts = [tensor.data_ptr() for _, tensor in tensors]
    layers: dict[int, _Layer] = {}
    is_direct = True

    def run(layer: Module, name: str, like: Tensor, loader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_direct
        arguments = signature(loader).bind(*args, **kwargs)
        arguments.apply_defaults()
        copies = Copies()
        with copies:
            result = loader(*args, **kwargs)
        if result is False:  # an expert of another rank
            return result
        given = [value for key, value in arguments.arguments.items() if isinstance(value, Tensor) and key != "param"]
        if len(given) != 1 or "param" not in arguments.arguments or not _is_within(given[0], source):
            is_direct = False
            return result
        call = _Call(
            name=name,
            like=like,
            loader=loader,
            arguments=arguments,
            source=bisect_right(starts, given[0].data_ptr()) - 1,
            copies=tuple(copies.found),
        )
        layers.setdefault(id(layer), _Layer(layer)).calls.append(call)
        return result

    initialize_layerwise_reload(model)  # tensors without memory, in the form that is loaded
    loaders: dict[int, tuple[Any, Callable[..., Any]]] = {}
    for layer in model.modules():
        for name, tensor in get_layer_tensors(layer).items():
            if id(tensor) in loaders:  # two layers use it, so it is one tensor also while the model runs
                continue
            loader: Any = getattr(tensor, "weight_loader", default_weight_loader)
            while loader.__name__ == "online_process_loader":  # vLLM's wrapper
                loader = loader.__wrapped__
            loaders[id(tensor)] = tensor, loader
            tensor.weight_loader = partial(run, layer, name, tensor, loader)
    model.load_weights(iter(tensors))  # type: ignore[operator]
    for tensor, loader in loaders.values():
        tensor.weight_loader = loader
    finalize_layerwise_reload(model, config)  # the tensors that the model uses are back
    if not (is_direct and all(map(_is_plain, layers.values()))):
        return None
    for found in layers.values():
        if _is_packed(found.module):
            found.packed = _in_one_piece([call for call in found.calls if call.name == "weight"], source)
    return DirectLoad(list(layers.values()))


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the copies that a loader makes: target, source."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.found.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _is_within(tensor: Tensor, source: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _is_packed(layer: Module) -> bool:
    """Whether a linear layer has its weight in packed form only."""
    method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
    return type(method) is UnquantizedLinearMethod and weight is not None and weight.numel() == 0


def _is_plain(layer: _Layer) -> bool:
    """Whether a layer uses each tensor in the form in which it is loaded, a packed weight apart."""
    method = getattr(layer.module, "quant_method", None)
    if method is not None and type(method) not in _PLAIN:
        return False
    for call in layer.calls:
        used = getattr(layer.module, call.name)
        if call.name == "weight" and _is_packed(layer.module):
            continue
        if used.shape != call.like.shape or used.dtype != call.like.dtype:
            return False
    return True


def _in_one_piece(calls: Sequence[_Call], source: Tensor) -> Tensor | None:
    """Return the part of `source` that is the whole weight of these calls; None where there is no such part."""
    like = calls[0].like
    copies = [copy for call in calls for copy in call.copies]
    spans = sorted((target.storage_offset(), target.numel()) for target, _ in copies)
    ends = [start + size for start, size in spans]
    starts = {read.data_ptr() - target.storage_offset() * like.itemsize for target, read in copies}
    is_whole = [start for start, _ in spans] == [0, *ends[:-1]] and ends[-1] == like.numel()
    is_plain = all(
        target.is_contiguous() and read.is_contiguous() and read.dtype == like.dtype and _is_within(read, source)
        for target, read in copies
    )
    if not (is_whole and is_plain and len(starts) == 1):
        return None
    start = starts.pop() - source.data_ptr()
    return source[start : start + like.nbytes].view(like.dtype).view(like.shape)
