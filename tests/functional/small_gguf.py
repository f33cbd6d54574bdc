"""Write a small Llama as a GGUF file, as llama.cpp does: small_gguf.py HF_DIRECTORY FILE (float32 or Q8_0 tensors).

Runs in a process of its own, whose PYTHONPATH has the package gguf. The tokenizer is byte-level BPE of all bytes and
two merges, with three special tokens before them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "Ġ he")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of queries or keys: GGUF rotates neighbours, Hugging Face the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def main(source: Path, target: str, kind: str) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    for number, role in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in load_file(source / "model.safetensors").items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        part = name.rpartition("self_attn.")[2][0]
        values = in_pairs(tensor, heads[part]) if "self_attn." in name and part in heads else tensor
        before, _, after = name.removesuffix(".weight").rpartition("layers.")
        number, _, rest = after.partition(".")
        place = f"blk.{number}.{NAMES[rest]}" if before else NAMES[after]
        data = values.contiguous().numpy()
        if kind == "Q8_0" and data.ndim == 2:
            of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{place}.weight", gguf.quants.quantize(data, of), raw_dtype=of)
        else:
            writer.add_tensor(f"{place}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
