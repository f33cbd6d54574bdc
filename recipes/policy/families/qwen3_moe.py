"""Qwen3 with a mixture of experts in every layer: softmax-routed, without shared experts."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipes.policy.families.mapping import Sharding, WeightMapping, weight_of_expert
from recipes.policy.families.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """The family of Qwen3-30B-A3B and 235B-A22B; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)

    def refusals(self, hf: Any) -> list[tuple[str, str, str]]:
        """Refuse layers without experts among the others."""
        wrong = {
            "mlp_only_layers": (str(list(hf.mlp_only_layers or [])), "[]"),
            "decoder_sparse_step": (str(hf.decoder_sparse_step), "1"),
        }
        return super().refusals(hf) + [(key, got, want) for key, (got, want) in wrong.items() if got != want]

    def config(self, hf: Any) -> dict[str, Any]:
        """Return the sizes and the kind of layer."""
        return {
            **super().config(hf),
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_score_function": "softmax",
            # Softmax over the chosen scores alone is that over all, divided by the sum of the chosen ones.
            "moe_router_pre_softmax": not hf.norm_topk_prob,
        }

    def layer_mapping(self, param: Tensor, name: str, layer: str, config: TransformerConfig) -> WeightMapping:
        """Map one parameter of a layer, as `Qwen3` does, or of an expert or router."""
        if name == "mlp.router.weight":
            return WeightMapping(param=param, sharding=Sharding.REPLICATED, names=(f"{layer}mlp.gate.weight",))
        found = weight_of_expert(name, config)
        if found is None:
            return super().layer_mapping(param, name, layer, config)
        number, linear = found
        expert = f"{layer}mlp.experts.{number}."
        if linear == "linear_fc1":
            names = (f"{expert}gate_proj.weight", f"{expert}up_proj.weight")
            return WeightMapping(param=param, sharding=Sharding.GATE_UP, names=names, is_expert=True)
        return WeightMapping(
            param=param, sharding=Sharding.COLUMNS, names=(f"{expert}down_proj.weight",), is_expert=True
        )
