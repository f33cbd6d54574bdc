"""Adam whose state and whose steps are a CPU's for a share of the parameters: Megatron's, with what it lacks.

Megatron builds its own optimizers from names in its modules, so `use_offloading` puts ours there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import optimizer as factory
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor


class OffloadedAdam(HybridDeviceOptimizer):  # type: ignore[misc]
    """Megatron's optimizer for two devices, made sound for what release 0.16.1 gets wrong.

    For parameters in 16 bits alone. What a step changes are float32 copies of them, on the CPU or on the device.
    """

    def _init_sub_optimizers(self) -> None:
        """Copy parameters, unless they are those of the model: Megatron builds this optimizer again for its shards."""
        if not any(isinstance(param, torch.nn.Parameter) for param in self._params()):
            super()._init_sub_optimizers()

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update both shares."""
        self._outer = torch.cuda.current_stream() if torch.cuda.is_available() else None
        super().step(closure)

    def _set_sub_optimizer_grads(self) -> None:
        """Let the device's share wait for its gradients in float32, which are made on the stream of the copies."""
        super()._set_sub_optimizer_grads()
        if self._outer is not None and self.gpu_optimizer is not None:
            self._outer.wait_stream(self._d2h_stream)

    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        """Leave the count of steps to the inner optimizers: a loaded one would come back before each step."""
        for group in self.param_groups:
            group.pop("step", None)
        super()._sync_hdo_param_groups_to_sub_optimizers()

    def make_moments(self) -> None:
        """Give every parameter moments of zero if it has none; Megatron would take a step with random gradients."""
        for inner in self.sub_optimizers:
            for param in (param for group in inner.param_groups for param in group["params"]):
                if not inner.state[param]:
                    inner.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    if isinstance(inner, self.cpu_optimizer_cls):  # the other one counts in its groups
                        inner.state[param]["step"] = torch.zeros(())
        self._sync_sub_optimizers_state_to_hdo()

    def drop_loaded_copies(self) -> None:
        """Let the state name the weights that a step changes, which have its values, and not a copy of them."""
        self._sync_sub_optimizers_state_to_hdo()

    def start_anew(self) -> None:
        """Forget all moments, and how many steps there were."""
        self.state.clear()
        for inner in self.sub_optimizers:
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def use_offloading(adam: type[torch.optim.Optimizer]) -> None:
    """Let Megatron build `OffloadedAdam`, with `adam` for the share that stays on the device.

    It must not be torch's AdamW: Megatron tells the shares apart by their class, and torch's is that of the CPU's.
    """
    modules: tuple[Any, ...] = (factory, distrib_optimizer)
    for module in modules:
        module.HybridDeviceOptimizer = OffloadedAdam
    factory.Adam = adam
