"""The sizes of a model that decide memory and speed: read from a Hugging Face config.json, or as published.

A layer is one of four kinds: attention, Mamba-2, experts (MoE), or MLP. A usual transformer layer counts as two layers:
attention, and experts or an MLP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import InputError, Problem
from recipes.weight_files import require_object

_PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # characters of hybrid_override_pattern
_NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # of transformers 5, in layers_block_type
_GATED = ("silu", "swiglu", "gelu_pytorch_tanh")  # activations of gated MLPs, which have three matrices, not two
_DENSE = ("qwen2", "qwen3", "llama", "mistral")
_SPARSE = ("qwen3_moe", "qwen2_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model. Sizes are numbers of elements; those of kinds of layers that the model lacks are 0."""

    name: str
    hidden: int
    vocab: int
    is_tied: bool  # the output layer shares the weights of the embedding
    attention_layers: int
    query_heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    mlp_layers: int = 0
    mlp_size: int = 0
    is_gated: bool = False
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of one expert
    expert_hidden: int = 0  # input and output size of an expert: the latent size if there is one, else hidden
    shared_size: int = 0  # intermediate size of the shared expert
    mamba_layers: int = 0
    mamba_heads: int = 0
    mamba_head_size: int = 0
    mamba_groups: int = 0
    mamba_state: int = 0
    mamba_kernel: int = 0
    has_pairs: bool = False  # attention and the MLP or experts after it are one layer of Megatron's
    norms_heads: bool = False  # queries and keys have norms of their own
    rotates_heads: bool = False  # queries and keys are rotated by their positions
    has_heads: bool = False  # multi-token heads: one attention and one MoE layer beside the others

    @property
    def num_layers(self) -> int:
        return self.attention_layers + self.mlp_layers + self.moe_layers + self.mamba_layers

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_size

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP: up, down, and a gate if it is gated."""
        return 3 if self.is_gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention layer."""
        return self.hidden * self.head_size * (2 * self.query_heads + 2 * self.kv_heads)

    @property
    def mamba_parameters(self) -> int:
        """Parameters of one Mamba-2 layer: projections in (gate, x, B, C, dt) and out, and the convolution."""
        mixed = self.mamba_inner + 2 * self.mamba_groups * self.mamba_state
        into = self.mamba_inner + mixed + self.mamba_heads
        return self.hidden * (into + self.mamba_inner) + mixed * self.mamba_kernel

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.expert_hidden * self.expert_size

    @property
    def moe_shared_parameters(self) -> int:
        """Parameters of an MoE layer apart from its experts: router, shared expert, latent projections."""
        latent = 2 * self.hidden * self.expert_hidden if self.expert_hidden != self.hidden else 0
        return self.hidden * self.experts + self.matrices * self.hidden * self.shared_size + latent

    @property
    def whole_moe_parameters(self) -> int:
        """Parameters of an MoE layer that every tensor-parallel rank holds whole: router and latent projections."""
        return self.moe_shared_parameters - self.matrices * self.hidden * self.shared_size

    @property
    def dense_parameters(self) -> int:
        """Parameters of all layers but the experts; tensor parallelism splits all of them but the whole ones."""
        return (
            (1 if self.is_tied else 2) * self.vocab * self.hidden
            + self.attention_layers * self.attention_parameters
            + self.mamba_layers * self.mamba_parameters
            + self.mlp_layers * self.matrices * self.hidden * self.mlp_size
            + self.moe_layers * self.moe_shared_parameters
        )

    @property
    def all_expert_parameters(self) -> int:
        """Parameters that expert parallelism splits."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.all_expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with. The embedding does not count: it is a look-up."""
        used = self.moe_layers * self.experts_per_token * self.expert_parameters
        return self.dense_parameters - (0 if self.is_tied else self.vocab * self.hidden) + used

    @property
    def active_head_parameters(self) -> int:
        """Parameters that a token is multiplied with in one multi-token head, the output projection included."""
        own = self.attention_parameters + self.moe_shared_parameters + 2 * self.hidden**2
        return own + self.experts_per_token * self.expert_parameters + self.vocab * self.hidden


def read_architecture(model: Path) -> Architecture:
    """Read a model directory's config.json; raises `InputError` for an unknown kind of model."""
    path = model / "config.json"
    config = require_object(path, fix="check MODEL_PATH")
    kind = str(config.get("model_type"))
    try:
        if kind == "nemotron_h":
            return _hybrid(config, model.name)
        if kind in _DENSE + _SPARSE:
            return _transformer(config, model.name)
    except KeyError as error:
        problem = Problem(where=str(path), wrong=f"a {kind} model needs the key {error}", fix="check the model")
        raise InputError(problem) from error
    known = ", ".join(("nemotron_h", *_DENSE, *_SPARSE))
    raise InputError(
        Problem(
            where=f"{path}: model_type",
            got=kind,
            expected=known,
            fix="choose one of these models: the sizes of others are not known",
        )
    )


def _hybrid(config: Mapping[str, Any], name: str) -> Architecture:
    """Return a Nemotron-H model, whose layer pattern names the kind of each layer."""
    pattern = config.get("hybrid_override_pattern")
    kinds = [_PATTERN[mark] for mark in pattern] if pattern else config["layers_block_type"]
    count = Counter(_NEW_NAMES.get(kind, kind) for kind in kinds)
    hidden = config["hidden_size"]
    return Architecture(
        name=name,
        has_heads=bool(config.get("num_nextn_predict_layers")),
        hidden=hidden,
        vocab=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings")),
        attention_layers=count["attention"],
        query_heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or config["attention_head_dim"],
        mlp_layers=count["mlp"],
        mlp_size=config.get("intermediate_size") or 0,
        is_gated=config.get("mlp_hidden_act", "relu2") in _GATED,
        moe_layers=count["moe"],
        experts=config.get("n_routed_experts") or 0,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        expert_size=config.get("moe_intermediate_size") or 0,
        expert_hidden=config.get("moe_latent_size") or hidden,
        shared_size=config.get("moe_shared_expert_intermediate_size") or 0,
        mamba_layers=count["mamba"],
        mamba_heads=config["mamba_num_heads"],
        mamba_head_size=config["mamba_head_dim"],
        mamba_groups=config["n_groups"],
        mamba_state=config["ssm_state_size"],
        mamba_kernel=config["conv_kernel"],
    )


def _transformer(config: Mapping[str, Any], name: str) -> Architecture:
    """Return a transformer whose layers all have an MLP, or all have experts."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    is_sparse = config["model_type"] in _SPARSE
    experts = (config.get("num_experts") or config["num_local_experts"]) if is_sparse else 0  # old and new name
    return Architecture(
        name=name,
        has_pairs=True,
        norms_heads=config["model_type"].startswith("qwen3"),
        rotates_heads=True,
        hidden=hidden,
        vocab=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings")),
        attention_layers=layers,
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        mlp_layers=0 if is_sparse else layers,
        mlp_size=config["intermediate_size"],
        is_gated=config.get("hidden_act", "silu") in _GATED,
        moe_layers=layers if is_sparse else 0,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if is_sparse else 0,
        expert_size=config["moe_intermediate_size"] if is_sparse else 0,
        expert_hidden=hidden,
        shared_size=config.get("shared_expert_intermediate_size") or 0,
    )


SUPER_CONFIG: Mapping[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    "mtp_hybrid_override_pattern": "*E",
    "num_nextn_predict_layers": 1,
    "hidden_size": 4096,
    "intermediate_size": 2688,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "num_hidden_layers": 88,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 5.0,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}
"""What the published config.json of Nemotron 3 Super says of the model's form."""

NANO_CONFIG: Mapping[str, Any] = {
    **{
        key: value for key, value in SUPER_CONFIG.items() if key.partition("_")[0] != "mtp" and key != "moe_latent_size"
    },
    "hybrid_override_pattern": 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    "num_nextn_predict_layers": 0,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
"""What the published config.json of Nemotron 3 Nano says of the model's form."""


def published_config(stage: str) -> Mapping[str, Any]:
    """Return what the published config.json of the model of a stage says of its form."""
    return NANO_CONFIG if stage.startswith("nano-") else SUPER_CONFIG


def published(stage: str) -> Architecture:
    """Return the published sizes of the model of a stage, by the stage's id."""
    config = published_config(stage)
    return _hybrid(config, f"Nemotron 3 {'Nano' if config is NANO_CONFIG else 'Super'} as published")


SUPER = published("stage1.1")
