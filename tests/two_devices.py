"""A device that is none, on a CPU: Megatron's optimizer for two devices takes all that is not marked to lie on it.

Its code is the installed one, but for what asks a tensor for its device, moves it, or pins its memory.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
from torch import Tensor

_RULES = (
    (r"\bparam\.is_cuda\b", "is_on_device(param)", 3),
    (r"\bparam\.detach\(\)\.clone\(\)\.cpu\(\)\.pin_memory\(\)", "to_host(param)", 1),
    (r"\bparam\.detach\(\)\.clone\(\)\.float\(\)", "as_float(param)", 1),
    (r'v\.to\("cuda"\)', 'v.to("cpu")', 1),
    (r"pin_memory=self\.pin_cpu_grads", "pin_memory=False", 1),
)
_METHODS = ("_get_sub_optimizer_param_groups", "_move_new_state_to_right_device", "_set_sub_optimizer_grads")


def is_on_device(tensor: Tensor) -> bool:
    return not getattr(tensor, "is_on_host", False)


def to_host(tensor: Any) -> Any:
    copy = tensor.detach().clone()
    copy.is_on_host = True
    return copy


def as_float(tensor: Any) -> Any:
    copy = tensor.detach().clone().float()
    copy.is_on_host = getattr(tensor, "is_on_host", False)
    return copy


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the policy offload its optimizer from the device that is none, as long as `patch` lasts."""
    from recipes.policy import cpu, optimizer  # which make Megatron run on this machine

    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer  # isort: skip

    source = cpu.rewrite(inspect.getsource(hybrid_optimizer), "optimizer.cpu_offloading.hybrid_optimizer")
    for pattern, replacement, count in _RULES:
        source, found = re.subn(pattern, replacement, source)
        assert found == count, pattern
    names = {"is_on_device": is_on_device, "to_host": to_host, "as_float": as_float}
    names["_cpu_cuda"] = sys.modules["recipes_cpu_cuda"]
    exec(compile(source, hybrid_optimizer.__file__, "exec"), names)
    for method in _METHODS:
        changed = getattr(names["HybridDeviceOptimizer"], method)
        patch.setattr(hybrid_optimizer.HybridDeviceOptimizer, method, changed)
    patch.setattr(optimizer, "_is_offloaded", lambda cfg: cfg.optimizer.optimizer_cpu_offload)
