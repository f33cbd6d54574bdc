"""Multi-token heads with random weights for a tiny Nemotron-H: what stage 4 begins with at scale tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from recipes.files import read_object, sha256_of
from tools.tiny.sft import METADATA, put_in_place


def make_with_heads(directory: Path, sft: Path) -> None:
    """Write the checkpoint `sft` with heads into `directory`, unless that has been made from it and by this code."""
    metadata = read_object(sft / METADATA)
    recipe = {**metadata["recipe"], "heads_sha256": sha256_of(Path(__file__))}
    if read_object(directory / METADATA).get("recipe") == recipe:
        print(f"sft: {directory} is up to date")
        return
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(sft, partial)
    add_heads(partial)
    text = json.dumps({**metadata, "recipe": recipe}, indent=2) + "\n"
    (partial / METADATA).write_text(text, encoding="utf-8")
    put_in_place(partial, directory)
    print(f"sft: {directory} written: {sft.name} with random multi-token heads")


def add_heads(directory: Path) -> Path:
    """Give a Nemotron-H checkpoint random multi-token heads, as the published ones have them."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import NemotronHConfig

    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    hf = NemotronHConfig.from_pretrained(directory)
    hidden, latent, inner = hf.hidden_size, hf.moe_latent_size, hf.moe_intermediate_size
    shared = hf.moe_shared_expert_intermediate_size
    queries, keys = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "0.enorm.weight": (hidden,),
        "0.hnorm.weight": (hidden,),
        "0.eh_proj.weight": (hidden, 2 * hidden),
        "0.norm.weight": (hidden,),
        "0.mixer.q_proj.weight": (queries, hidden),
        "0.mixer.k_proj.weight": (keys, hidden),
        "0.mixer.v_proj.weight": (keys, hidden),
        "0.mixer.o_proj.weight": (hidden, queries),
        "1.norm.weight": (hidden,),
        "1.final_layernorm.weight": (hidden,),
        "1.mixer.gate.weight": (hf.n_routed_experts, hidden),
        "1.mixer.gate.e_score_correction_bias": (hf.n_routed_experts,),
        "1.mixer.fc1_latent_proj.weight": (latent, hidden),
        "1.mixer.fc2_latent_proj.weight": (hidden, latent),
        "1.mixer.shared_experts.up_proj.weight": (shared, hidden),
        "1.mixer.shared_experts.down_proj.weight": (hidden, shared),
    }
    for expert in range(hf.n_routed_experts):
        shapes[f"1.mixer.experts.{expert}.up_proj.weight"] = (inner, latent)
        shapes[f"1.mixer.experts.{expert}.down_proj.weight"] = (latent, inner)
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(directory / "model.safetensors")
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"mtp.layers.{name}"] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
