"""Safetensors files made by hand: whole ones of small tensors, and headers alone of models that no disk here holds."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any


def safetensors(shapes: Mapping[str, tuple[int, ...]], *, fill: float = 0.0) -> bytes:
    """Return a file of float32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, shape in shapes.items():
        data = struct.pack("<f", fill) * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def header_alone(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return a file whose header names tensors of any size, without their data."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def qwen3_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a dense Qwen3 model."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * size, hidden),
            "self_attn.k_proj": (groups * size, hidden),
            "self_attn.v_proj": (groups * size, hidden),
            "self_attn.o_proj": (hidden, heads * size),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden),
            "mlp.down_proj": (hidden, middle),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
