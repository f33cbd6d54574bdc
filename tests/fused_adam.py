"""A stand-in for Transformer Engine's FusedAdam on a CPU: its states, its methods and its assertions, in plain torch.

Written after release 2.11.0, the pinned one. Only float32 states are there, as the policy asks for no others.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

_STATES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    """Adam over parameters in 16 bits, with master weights of its own; the step count lies in the group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.store_param_remainders = store_param_remainders

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None

    def _dtype(self, param: Tensor, name: str) -> torch.dtype:
        is_rest = self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16
        return torch.int16 if is_rest else torch.float32

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        assert name in _STATES
        state: Tensor = self.state[param][name]
        assert state.dtype == self._dtype(param, name)
        return state

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype == self._dtype(param, name)
        if name not in self.state[param]:
            self._initialize_state(param, name)
        self.state[param][name].copy_(unscaled)

    def _initialize_state(self, param: Tensor, name: str) -> None:
        assert name in _STATES
        self.state[param][name] = torch.zeros(param.shape, dtype=self._dtype(param, name))

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in _STATES:
            self._initialize_state(param, name)
        if not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(param, name, value.to(self._dtype(param, name)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders and param.dtype == torch.bfloat16)
                if param.decoupled_grad is not None:
                    self._update(group, param, param.decoupled_grad.float())

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        first, second, master = (self.get_unscaled_state(param, name) for name in _STATES)
        if master.dtype == torch.int16:  # the low half of a float32 whose high half is the parameter
            high = param.view(torch.int16).to(torch.int32) << 16
            whole = (high | (master.to(torch.int32) & 0xFFFF)).view(torch.float32)
        else:
            whole = master
        torch._fused_adamw_(
            [whole],
            [grad],
            [first],
            [second],
            [],
            [torch.tensor(float(group["step"]))],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if master.dtype == torch.int16:
            bits = whole.view(torch.int32)
            param.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))
            master.copy_(bits.to(torch.int16))
        else:
            param.copy_(whole)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron take the stand-in for Transformer Engine's optimizer, as long as `patch` lasts."""
    import recipes.policy.step  # noqa: F401  # loads all of Megatron that training needs, before the name exists

    from megatron.core import optimizer as factory  # isort: skip
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    patch.setattr(sys.modules["transformer_engine.pytorch.optimizers"], "FusedAdam", FusedAdam, raising=False)
    for place in (factory, distrib_optimizer):
        patch.setattr(place, "Adam", FusedAdam)
    patch.setattr(factory, "USING_PYTORCH_OPTIMIZER", False)
    patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    for place in (factory, optimizer_config):
        patch.setattr(place, "is_te_min_version", lambda *_, **__: True)
