"""`python -m tools.bench.push_cost`: the Python seconds in which an engine loads a push of Super, and bytes on the way.

vLLM's own model and layerwise reload, with the layers, experts and tensors of Super and tiny widths: what is left is
Python. The tensors come in buckets as a broadcast brings them, once with the experts in blocks and once one by one.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.generation.engine_args import CPU_ENV, ENV
from recipes.types import WeightLayout, experts_of

LIMIT_SECONDS = 2.0
NUM_ENGINES = 144
_PATTERN = ["mamba", "moe"] * 32 + ["attention", "mamba", "moe"] * 8
_HIDDEN, _INNER, _LATENT, _EXPERTS, _VOCAB = 64, 128, 32, 512, 256
_BLOCK = 32  # experts of one rank of the policy at stage 1.1
_NUM_BUCKETS = 230  # of a push of 247 GB in more than 1 GiB each; the smaller ones of today hold fewer tensors


def measured() -> dict[str, Any]:
    """Return what a process of its own measures, in which vLLM has its environment from the start."""
    argv = [sys.executable, "-m", "tools.bench.push_cost"]
    env = {**os.environ, **ENV, **CPU_ENV}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def is_kept(found: dict[str, Any]) -> bool:
    """Whether a push costs no more than the limit."""
    return bool(found["seconds"] <= LIMIT_SECONDS)


def sentence(found: dict[str, Any]) -> str:
    """Say what was measured beside the limit."""
    verdict = "within" if is_kept(found) else "OVER"
    return (
        f"an engine loads a push of Super, {found['num_experts_tensors']:,} expert tensors and {found['num_others']:,} "
        f"others, in {found['seconds']:.2f} s of Python, {verdict} the limit of {LIMIT_SECONDS:g} s "
        f"({found['num_tensors']:,} tensors on the way; the first push {found['first_seconds']:.1f} s; one by one "
        f"{found['one_by_one_seconds']:.1f} s); the driver stores {found['connect_bytes']:,} bytes of names once and "
        f"sends {found['push_bytes']:,} bytes a push to each of {NUM_ENGINES} engines"
    )


def _tensors(block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, with `block` experts in a tensor; 1: one by one."""
    mixed = _INNER + 2 * 2 * 16
    mamba: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("A_log", "D", "dt_bias"), (8,)),
        "in_proj.weight": (_INNER + mixed + 8, _HIDDEN),
        "conv1d.weight": (mixed, 1, 4),
        "conv1d.bias": (mixed,),
        "norm.weight": (_INNER,),
        "out_proj.weight": (_HIDDEN, _INNER),
    }
    attention: dict[str, tuple[int, ...]] = dict.fromkeys(("q_proj.weight", "o_proj.weight"), (64, 64))
    attention |= dict.fromkeys(("k_proj.weight", "v_proj.weight"), (32, 64))
    moe: dict[str, tuple[int, ...]] = {
        "gate.weight": (_EXPERTS, _HIDDEN),
        "gate.e_score_correction_bias": (_EXPERTS,),
        "shared_experts.up_proj.weight": (32, _HIDDEN),
        "shared_experts.down_proj.weight": (_HIDDEN, 32),
        "fc1_latent_proj.weight": (_LATENT, _HIDDEN),
        "fc2_latent_proj.weight": (_HIDDEN, _LATENT),
    }
    for matrix in ("up_proj", "down_proj"):
        for first in range(0, _EXPERTS, block):
            which = f"{first}-{first + block - 1}" if block > 1 else f"{first}"
            moe[f"experts.{which}.{matrix}.weight"] = (block, 32, 32) if block > 1 else (32, 32)
    kinds: dict[str, dict[str, tuple[int, ...]]] = {"mamba": mamba, "attention": attention, "moe": moe}
    yield "backbone.embeddings.weight", (_VOCAB, _HIDDEN)
    for number, kind in enumerate(_PATTERN):
        yield f"backbone.layers.{number}.norm.weight", (_HIDDEN,)
        for name, shape in kinds[kind].items():
            yield f"backbone.layers.{number}.mixer.{name}", shape
    yield "backbone.norm_f.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _layout(block: int) -> WeightLayout:
    import torch

    from recipes.policy.weights import make_layout

    return make_layout(((name, torch.bfloat16, shape) for name, shape in _tensors(block)), path="")


def _write_config(path: Path) -> None:
    from transformers import NemotronHConfig

    config = NemotronHConfig(
        architectures=["NemotronHForCausalLM"],
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        layers_block_type=_PATTERN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
        conv_kernel=4,
        n_routed_experts=_EXPERTS,
        num_experts_per_tok=22,
        n_shared_experts=1,
        moe_intermediate_size=32,
        moe_latent_size=_LATENT,
        moe_shared_expert_intermediate_size=32,
        tie_word_embeddings=False,
    )
    config.save_pretrained(path)


def _push_seconds(model: Any, config: Any, block: int, num_pushes: int) -> list[float]:
    """Return the CPU seconds of pushes, one after the other."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from recipes.generation.drafter import PushedModels

    tensors = [(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in _tensors(block)]
    blocks = [(name, one.dtype, tuple(one.shape)) for name, one in tensors if experts_of(name) is not None]
    models, size = PushedModels(model, blocks=blocks), -(-len(tensors) // _NUM_BUCKETS)
    seconds = []
    for _ in range(num_pushes):
        began = time.process_time()
        initialize_layerwise_reload(models)
        for first in range(0, len(tensors), size):
            models.load_weights(tensors[first : first + size])
        finalize_layerwise_reload(models, config)
        seconds.append(time.process_time() - began)
    return seconds


def main() -> None:
    """Measure, and print JSON."""
    os.environ.update({**ENV, **CPU_ENV})  # before vLLM is imported
    from vllm import LLM

    from recipes.generation.generation import nccl_update

    with tempfile.TemporaryDirectory(prefix="bench-push-") as directory:
        _write_config(Path(directory))
        llm = LLM(
            model=directory,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            load_format="dummy",
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            worker_extension_cls="recipes.generation.weight_transfer.WorkerExtension",
            weight_transfer_config={"backend": "shm"},
        )
    worker: Any = llm.llm_engine.model_executor.driver_worker.worker
    first, *later = _push_seconds(worker.get_model(), worker.model_config, _BLOCK, 4)
    [one_by_one] = _push_seconds(worker.get_model(), worker.model_config, 1, 1)
    layout, singles = _layout(_BLOCK), _layout(1)
    num_experts = sum(".experts." in name for name in singles.names)
    found = {
        "seconds": min(later),
        "first_seconds": first,
        "one_by_one_seconds": one_by_one,
        "num_tensors": len(layout.names),
        "num_experts_tensors": num_experts,
        "num_others": len(singles.names) - num_experts,
        "connect_bytes": len(pickle.dumps((layout.digest, nccl_update(layout)))),
        "push_bytes": len(pickle.dumps((1, layout.digest, {}, None))),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
