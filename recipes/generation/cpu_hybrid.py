"""Models with experts or Mamba layers on CPU, where vLLM 0.32 lacks three parts of what they need.

Experts without a gate, such as down(relu(up x)^2), have no CPU kernel, and vLLM refuses to build the model. Where the
ranks of an engine share the experts, the kernel for experts with a gate takes the number of an expert in the model for
its number on the rank: it reads and writes memory that is not its own. With the prefix cache on, Mamba layers promise a
state inside a prompt that the CPU scan does not return.

Shape legend: T tokens, K experts that each token is sent to, H hidden size, E experts of this rank, I units of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

_ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    MoEActivation.RELU2_NO_MUL: lambda x: functional.relu(x).square_(),
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
}
_REFUSAL = "is_act_and_mul=False"  # of vLLM's message


class UngatedExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts of two matrices each: up [E, I, H] and down [E, H, I], used as they were loaded."""

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def is_supported_config(cls: Any, *args: Any) -> Any:
        """Decide by the two methods above, not as the parent does for its gated kernel."""
        return modular_kernel.FusedMoEExperts.is_supported_config(cls, *args)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack nothing, so that a weight push reaches what is used."""

    def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **options: Any) -> None:
        """Sum over the experts of each token, into `output` [T, H]; vLLM passes `options` by name."""
        assert self.w1_bias is None and self.w2_bias is None, "these experts have no biases"
        assert not options["apply_router_weight_on_input"]
        weights_TK, ids_TK = on_this_rank(options["topk_weights"], options["topk_ids"], options["expert_map"])
        run, num_experts = _ACTIVATIONS[options["activation"]], w1.shape[0]
        order = ids_TK.flatten().argsort(stable=True)
        token = order // ids_TK.shape[1]
        counts = torch.bincount(ids_TK.flatten(), minlength=num_experts).tolist()
        parts = [
            functional.linear(run(functional.linear(own, w1[expert])), w2[expert])
            for expert, own in enumerate(torch.split(hidden_states[token], counts))  # type: ignore[no-untyped-call]
            if len(own)
        ]
        share = weights_TK.flatten()[order, None].to(output.dtype)
        output.zero_().index_add_(0, token, torch.cat(parts) * share)


def on_this_rank(weights_TK: Tensor, ids_TK: Tensor, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers that experts have on this rank; those of other ranks weigh nothing.

    `expert_map` has the number on this rank of each expert of the model, or -1; None: all are on this rank.
    """
    if expert_map is None:
        return weights_TK, ids_TK
    own_TK = expert_map[ids_TK.long()].to(ids_TK.dtype)
    return weights_TK.masked_fill(own_TK < 0, 0.0), own_TK.clamp(min=0)


def install() -> None:
    """Add all parts to vLLM in this process; harmless to repeat."""
    if getattr(FusedMoEConfig, "has_ungated_experts", False):
        return
    FusedMoEConfig.has_ungated_experts = True
    check, kernels = FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls
    cache_spec, gated = MambaMixer2.get_kv_cache_spec, CPUUnquantizedExperts.apply

    def post_init(self: Any) -> None:
        try:
            check(self)
        except NotImplementedError as error:  # its last statement: all fields are set
            if _REFUSAL not in str(error):
                raise

    def backend_to_kernel_cls(backend: Any) -> list[Any]:
        own = [UngatedExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else []
        return [*kernels(backend), *own]

    def apply(self: Any, **options: Any) -> None:
        assert options["expert_map"] is None or not options["apply_router_weight_on_input"]
        weights_TK, ids_TK = on_this_rank(options["topk_weights"], options["topk_ids"], options["expert_map"])
        gated(self, **{**options, "topk_weights": weights_TK, "topk_ids": ids_TK})

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = cache_spec(self, vllm_config)
        if getattr(spec, "num_prefill_checkpoint_blocks", 0):  # without it the scheduler ends a prefill at each state
            return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
        return spec

    FusedMoEConfig.__post_init__ = post_init
    CPUUnquantizedExperts.apply = apply
    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
    unquantized.backend_to_kernel_cls = backend_to_kernel_cls
