"""Optimizer state that waits in host memory while log-probabilities are computed, which do not need it.

The memory of each tensor is given back to the device and taken again; the tensor itself stays, and so does all that
knows it. On a machine without a device nothing is moved: the state lies in host memory anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from recipes.policy.offloading.hybrid import OffloadedAdam

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_state_on_host(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Call a function, whose first argument is the trainer, as `state_on_host` has it."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with state_on_host(args[0]):
            return function(*args, **kwargs)

    return call


@contextmanager
def state_on_host(trainer: Any) -> Iterator[None]:
    """Free the device's memory of the optimizer's state inside the block, if `offload_optimizer_for_logprob` asks.

    Blocks may be nested: the inner one moves nothing. Also when the block fails, the state is back after it.
    """
    if not trainer.cfg.offload_optimizer_for_logprob:
        yield
        return
    models = [trainer.model, *([] if trainer.heads is None else [trainer.heads])]
    of_models = {param.untyped_storage().data_ptr() for model in models for param in model.parameters()}
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in state_tensors(trainer.optimizer)
        if _is_on_device(tensor)
    }
    own = [memory for place, memory in memories.items() if place not in of_models and memory.nbytes() > 0]
    copies = [_on_host(memory) for memory in own]  # all of them before the first is freed: the host may have no room
    for memory in own:
        memory.resize_(0)
    try:
        yield
    finally:
        for memory, copy in zip(own, copies, strict=True):
            memory.resize_(copy.numel())
            _bytes_of(memory).copy_(copy)


def state_tensors(optimizer: Any) -> list[Tensor]:
    """Return what an optimizer steps with: moments and the like, and the parameters that it changes."""
    inner: list[Any] = []
    for own in (part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None):
        inner += own.sub_optimizers if isinstance(own, OffloadedAdam) else [own]
    params = [param for own in inner for group in own.param_groups for param in group["params"]]
    values = [value for own in inner for state in own.state.values() for value in state.values()]
    return [*params, *(value for value in values if isinstance(value, Tensor))]


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _bytes_of(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _on_host(memory: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return copy.copy_(_bytes_of(memory))
