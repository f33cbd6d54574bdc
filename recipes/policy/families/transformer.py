"""Llama and its relatives: grouped queries, SwiGLU, RMS norms, rotary positions without scaling.

Mistral is a Llama without a window. Qwen2 has biases on queries, keys and values; Qwen3 has norms on queries and keys
in their place, and a relative with a mixture of experts in every layer: softmax-routed, without shared experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from recipes.config.keys.native import unbuilt_values
from recipes.policy.families.mapping import (
    Sharding,
    WeightMapping,
    base_parameters,
    sum_experts_apart,
    weight_of_expert,
)
from recipes.policy.layers.attention import core_attention, rotates
from recipes.policy.layers.experts import choose_experts
from recipes.policy.layers.head import LogProbModel, OutputConfig
from recipes.policy.layers.norm import GatedSilu, RMSNorm
from recipes.policy.layers.token_heads import TokenHeads


class Llama:
    """The family of Llama 2 and 3 (without scaled positions) and SmolLM2; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    norms_heads = False  # queries and keys have norms of their own
    has_qkv_bias = False

    def refusals(self, hf: Any) -> list[tuple[str, str, str]]:
        """Refuse what this layer spec does not compute."""
        return unbuilt_values(self.architectures[0], partial(getattr, hf))

    def config(self, hf: Any) -> dict[str, Any]:
        """Return the sizes and the kind of layer."""
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            "ffn_hidden_size": hf.intermediate_size,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "qk_layernorm": self.norms_heads,
            "add_qkv_bias": self.has_qkv_bias,
            "gated_linear_unit": True,
            "activation_func": functional.silu,
            "use_te_activation_func": True,  # that is: the activation module of the layer spec
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def build(self, hf: Any, config: TransformerConfig, output: OutputConfig) -> torch.nn.Module:
        """Build a GPT from the local layer spec."""
        layers = TransformerBlockSubmodules(
            layer_specs=[_layer_spec(config, _rope_theta(hf))] * get_num_layers_to_build(config), layer_norm=RMSNorm
        )
        model: torch.nn.Module = LogProbModel(
            output,
            config=config,
            transformer_layer_spec=layers,
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none" if rotates(config) else "rope",  # none: our attention rotates
            rotary_base=_rope_theta(hf),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            parallel_output=True,
        )
        sum_experts_apart(model)
        return model

    def weights(self, model: Any) -> list[WeightMapping]:
        """List the parameters with their global names: layers are numbered over all pipeline stages."""
        result = []
        for name, param in base_parameters(model):
            if name.startswith("decoder.layers."):
                index, rest = name.removeprefix("decoder.layers.").split(".", 1)
                layer = model.decoder.layers[int(index)].layer_number - 1
                result.append(self.layer_mapping(param, rest, f"model.layers.{layer}.", model.config))
                continue
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                sharding, names = _OTHER_WEIGHTS["embedding.word_embeddings.weight"]  # the last stage's copy of it
            else:
                sharding, names = _OTHER_WEIGHTS[name]
            result.append(WeightMapping(param=param, sharding=sharding, names=names))
        return result

    def layer_mapping(self, param: Tensor, name: str, layer: str, config: TransformerConfig) -> WeightMapping:
        """Map one parameter of a layer; `name` is Megatron's within it, `layer` the prefix of its checkpoint names."""
        del config
        module, _, kind = name.rpartition(".")  # kind: weight or bias
        sharding, parts = _LAYER_WEIGHTS[module]
        return WeightMapping(param=param, sharding=sharding, names=tuple(f"{layer}{part}.{kind}" for part in parts))

    def unread_weights(self, hf: Any) -> set[str]:
        """Name the copy of the embedding that some checkpoints with tied weights carry."""
        return {"lm_head.weight"} if hf.tie_word_embeddings else set()

    def build_heads(self, hf: Any, config: TransformerConfig) -> TokenHeads | None:
        """Return None: no published model of the family has multi-token heads."""
        del hf, config
        return None

    def head_weights(self, heads: TokenHeads) -> list[WeightMapping]:
        """List nothing."""
        del heads
        return []


def _rope_theta(hf: Any) -> int:
    """Return the rotary base; transformers 5 keeps it among the rope parameters."""
    parameters = getattr(hf, "rope_parameters", None)
    return int(parameters["rope_theta"] if parameters else hf.rope_theta)


def _layer_spec(config: TransformerConfig, rotary_base: int) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = core_attention(config, rotary_base=rotary_base)
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else None
    mlp = layer.mlp.submodules
    (mlp.experts.submodules if config.num_moe_experts else mlp).activation_func = GatedSilu
    if config.num_moe_experts:
        choose_experts(layer.mlp, config)
    return spec


class Mistral(Llama):
    """The family of Mistral 7B from v0.2 on; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("MistralForCausalLM",)


class Qwen2(Llama):
    """The family of Qwen2 and Qwen2.5; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("Qwen2ForCausalLM",)
    has_qkv_bias = True


class Qwen3(Llama):
    """The family of Qwen3-0.6B to 32B; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("Qwen3ForCausalLM",)
    norms_heads = True


class Qwen3Moe(Qwen3):
    """The family of Qwen3-30B-A3B and 235B-A22B; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)

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


_LAYER_WEIGHTS: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "input_layernorm": (Sharding.REPLICATED, ("input_layernorm",)),
    "self_attention.linear_qkv": (Sharding.QKV, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attention.q_layernorm": (Sharding.REPLICATED, ("self_attn.q_norm",)),
    "self_attention.k_layernorm": (Sharding.REPLICATED, ("self_attn.k_norm",)),
    "self_attention.linear_proj": (Sharding.COLUMNS, ("self_attn.o_proj",)),
    "pre_mlp_layernorm": (Sharding.REPLICATED, ("post_attention_layernorm",)),
    "mlp.linear_fc1": (Sharding.GATE_UP, ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": (Sharding.COLUMNS, ("mlp.down_proj",)),
}
_OTHER_WEIGHTS: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": (Sharding.ROWS, ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": (Sharding.REPLICATED, ("model.norm.weight",)),
    "output_layer.weight": (Sharding.ROWS, ("lm_head.weight",)),
}
