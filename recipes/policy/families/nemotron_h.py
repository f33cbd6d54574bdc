"""Nemotron-H, as in Nemotron 3 Super and Nano: Mamba-2, attention, MLP and latent mixture-of-experts layers.

Megatron's `MambaModel` computes it; the order of layers is `layers_block_type` of config.json. What Megatron builds in
and a checkpoint might say otherwise is refused (`refusals`), since it would be ignored without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from recipes.config.keys.native import unbuilt_values
from recipes.policy.families.mapping import (
    Sharding,
    WeightMapping,
    base_parameters,
    sum_experts_apart,
    weight_of_expert,
)
from recipes.policy.layers import mamba_cpu
from recipes.policy.layers.attention import core_attention
from recipes.policy.layers.experts import choose_experts
from recipes.policy.layers.head import HybridLogProbModel, OutputConfig
from recipes.policy.layers.norm import ReplicatedLinear, RMSNorm
from recipes.policy.layers.recompute import recompute_in_backward
from recipes.policy.layers.token_heads import TokenHeads

mamba_cpu.install()  # before the modules of megatron.core.ssm are imported

from megatron.core.ssm import mamba_block  # noqa: E402
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402

SYMBOLS = {  # of Megatron's layer pattern, by the names of transformers, old and new
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_REPLICATED, _ROWS, _COLUMNS = Sharding.REPLICATED, Sharding.ROWS, Sharding.COLUMNS
_LAYER_WEIGHTS: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "norm.weight": (_REPLICATED, ("norm.weight",)),
    "input_layernorm.weight": (_REPLICATED, ("norm.weight",)),
    "pre_mlp_layernorm.weight": (_REPLICATED, ("norm.weight",)),
    "mixer.in_proj.weight": (Sharding.MAMBA_IN, ("mixer.in_proj.weight",)),
    "mixer.conv1d.weight": (Sharding.MAMBA_CONV, ("mixer.conv1d.weight",)),
    "mixer.conv1d.bias": (Sharding.MAMBA_CONV, ("mixer.conv1d.bias",)),
    "mixer.A_log": (_ROWS, ("mixer.A_log",)),
    "mixer.D": (_ROWS, ("mixer.D",)),
    "mixer.dt_bias": (_ROWS, ("mixer.dt_bias",)),
    "mixer.norm.weight": (_ROWS, ("mixer.norm.weight",)),
    "mixer.out_proj.weight": (_COLUMNS, ("mixer.out_proj.weight",)),
    "self_attention.linear_qkv.weight": (
        Sharding.QKV,
        ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
    ),
    "self_attention.linear_proj.weight": (_COLUMNS, ("mixer.o_proj.weight",)),
    "mlp.linear_fc1.weight": (_ROWS, ("mixer.up_proj.weight",)),
    "mlp.linear_fc2.weight": (_COLUMNS, ("mixer.down_proj.weight",)),
    "mlp.router.weight": (_REPLICATED, ("mixer.gate.weight",)),
    "mlp.router.expert_bias": (_REPLICATED, ("mixer.gate.e_score_correction_bias",)),
    "mlp.fc1_latent_proj.weight": (_REPLICATED, ("mixer.fc1_latent_proj.weight",)),
    "mlp.fc2_latent_proj.weight": (_REPLICATED, ("mixer.fc2_latent_proj.weight",)),
    "mlp.shared_experts.linear_fc1.weight": (_ROWS, ("mixer.shared_experts.up_proj.weight",)),
    "mlp.shared_experts.linear_fc2.weight": (_COLUMNS, ("mixer.shared_experts.down_proj.weight",)),
}
_OTHER_WEIGHTS: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": (_ROWS, ("backbone.embeddings.weight",)),
    "decoder.final_norm.weight": (_REPLICATED, ("backbone.norm_f.weight",)),
    "output_layer.weight": (_ROWS, ("lm_head.weight",)),
}


class NemotronH:
    """The family of Nemotron-H; see `Family` for what each member means."""

    architectures: tuple[str, ...] = ("NemotronHForCausalLM",)

    def refusals(self, hf: Any) -> list[tuple[str, str, str]]:
        """Refuse what `MambaModel` builds in otherwise."""
        quotient = hf.num_experts_per_tok // max(hf.topk_group, 1)
        wrong = {
            "num_experts_per_tok": ("1" if hf.num_experts_per_tok == 1 else "more", "more"),
            "num_nextn_predict_layers": (hf.num_nextn_predict_layers, min(hf.num_nextn_predict_layers, 1)),
            # Groups are ranked by their best two scores there, by the best num_experts_per_tok / topk_group here.
            "num_experts_per_tok / topk_group": (quotient if hf.n_group > 1 else 2, 2),
        }
        if hf.num_nextn_predict_layers:
            wrong["mtp_layers_block_type"] = (_pattern(hf.mtp_layers_block_type), "*E")
        built = unbuilt_values(self.architectures[0], partial(getattr, hf))
        return built + [(key, str(got).lower(), str(want).lower()) for key, (got, want) in wrong.items() if got != want]

    def config(self, hf: Any) -> dict[str, Any]:
        """Return sizes, the mixture of experts and the Mamba state."""
        has_groups = hf.n_group > 1
        return {
            "num_layers": len(hf.layers_block_type),
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.head_dim,
            "ffn_hidden_size": hf.intermediate_size,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "normalization": "RMSNorm",
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "is_hybrid_model": True,
            "use_mamba_mem_eff_path": True,  # the only path that packs sequences
            "mamba_state_dim": hf.ssm_state_size,
            "mamba_head_dim": hf.mamba_head_dim,
            "mamba_num_groups": hf.n_groups,
            "mamba_num_heads": hf.mamba_num_heads,
            "num_moe_experts": hf.n_routed_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_latent_size": hf.moe_latent_size,
            "moe_shared_expert_intermediate_size": hf.moe_shared_expert_intermediate_size * hf.n_shared_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": float(hf.routed_scaling_factor),
            "moe_router_num_groups": hf.n_group if has_groups else None,
            "moe_router_group_topk": hf.topk_group if has_groups else None,
            "moe_router_pre_softmax": False,
        }

    def build(self, hf: Any, config: TransformerConfig, output: OutputConfig) -> torch.nn.Module:
        """Build a `MambaModel` from layers in plain torch where Megatron asks for Transformer Engine."""
        mamba_block.TENorm = RMSNorm  # it takes this name for its last norm
        moe_layer.HAVE_TE, moe_layer.TELinear = True, ReplicatedLinear  # of the latent projections
        model = HybridLogProbModel(
            output,
            config=config,
            mamba_stack_spec=ModuleSpec(module=MambaStack, submodules=_layer_specs(hf, config)),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            hybrid_override_pattern=_pattern(hf.layers_block_type),
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            parallel_output=True,
        )
        sum_experts_apart(model)
        if config.recompute_granularity == "full":
            for layer in model.decoder.layers:
                recompute_in_backward(layer)
        return model

    def weights(self, model: Any) -> list[WeightMapping]:
        """List parameters and the routers' biases, which are buffers, with their global names."""
        biases = [(name, value) for name, value in model.named_buffers() if name.endswith("router.expert_bias")]
        return [_mapping(model, name, tensor) for name, tensor in [*base_parameters(model), *biases]]

    def unread_weights(self, hf: Any) -> set[str]:
        """Name nothing: every tensor is read."""
        del hf
        return set()

    def build_heads(self, hf: Any, config: TransformerConfig) -> TokenHeads | None:
        """Build the heads from an attention layer and a layer of experts like the model's."""
        if not hf.num_nextn_predict_layers:
            return None
        specs = _layer_specs(hf, config)
        heads = TokenHeads(config, attention=specs.attention_layer, experts=specs.moe_layer)
        sum_experts_apart(heads)
        return heads

    def head_weights(self, heads: TokenHeads) -> list[WeightMapping]:
        """List parameters and the router's bias; in the checkpoint attention is layer 0 of the heads, experts are 1."""
        biases = [(name, value) for name, value in heads.named_buffers() if name.endswith("router.expert_bias")]
        return [_head_mapping(heads, name, value) for name, value in [*heads.named_parameters(), *biases]]


def _head_mapping(heads: TokenHeads, name: str, tensor: torch.Tensor) -> WeightMapping:
    part, rest = name.split(".", 1)
    first, last = "mtp.layers.0.", "mtp.layers.1."
    if part in ("attention", "moe"):
        return _layer_mapping(heads.config, first if part == "attention" else last, rest, tensor)
    sharding = _ROWS if part == "eh_proj" else _REPLICATED
    return WeightMapping(
        param=tensor, sharding=sharding, names=((last if part == "final_layernorm" else first) + name,)
    )


def _pattern(kinds: Sequence[str]) -> str:
    return "".join(SYMBOLS[kind] for kind in kinds)


def _mapping(model: Any, name: str, tensor: torch.Tensor) -> WeightMapping:
    if not name.startswith("decoder.layers."):
        sharding, names = _OTHER_WEIGHTS[name]
        return WeightMapping(param=tensor, sharding=sharding, names=names)
    index, rest = name.removeprefix("decoder.layers.").split(".", 1)
    layer = f"backbone.layers.{model.decoder.layers[int(index)].layer_number - 1}."
    return _layer_mapping(model.config, layer, rest, tensor)


def _layer_mapping(config: TransformerConfig, layer: str, rest: str, tensor: torch.Tensor) -> WeightMapping:
    """Map one tensor of a layer; `rest` is Megatron's name in it, `layer` the prefix of its checkpoint names."""
    if (found := weight_of_expert(rest, config)) is not None:
        expert, linear = found
        sharding, part = (_ROWS, "up_proj") if linear == "linear_fc1" else (_COLUMNS, "down_proj")
        name = f"{layer}mixer.experts.{expert}.{part}.weight"
        return WeightMapping(param=tensor, sharding=sharding, names=(name,), is_expert=True)
    sharding, names = _LAYER_WEIGHTS[rest]
    return WeightMapping(param=tensor, sharding=sharding, names=tuple(layer + name for name in names))


def _layer_specs(hf: Any, config: TransformerConfig) -> MambaStackSubmodules:
    moe = get_moe_module_spec(use_te=False, num_experts=hf.n_routed_experts, moe_grouped_gemm=False)
    choose_experts(moe, config)
    mixer = ModuleSpec(
        module=MambaMixer,
        params={"chunk_size": hf.chunk_size, "d_conv": hf.conv_kernel},
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=core_attention(config), linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    add = get_bias_dropout_add
    return MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer, submodules=MambaLayerSubmodules(norm=RMSNorm, mixer=mixer, mamba_bda=add)
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(input_layernorm=RMSNorm, self_attention=attention, self_attn_bda=add),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=add)
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=moe, mlp_bda=add),
        ),
    )
