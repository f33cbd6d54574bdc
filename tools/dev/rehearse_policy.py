"""What the policy ranks of a stage hold, built at full size and without memory, on torch's meta device.

A rank of each kind is built by the code of a run, in a world of the stage's size whose process groups send nothing: of
each pipeline stage the first and the last rank, and those at the ends of tensor and expert parallelism. What is fused
or needs a CUDA library is built in its plain form, which has the same parameters.

The tensors that an export would have are compared with the headers of the model's own files, or, where it has none,
with the class of transformers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.config.tree import MegatronConfig, PolicyConfig
from recipes.policy import hf, parallel
from recipes.policy.families import gather, mapping
from recipes.policy.layout import check_layout, check_model_fits
from recipes.policy.model import build_heads, build_model, transformer_config
from recipes.weight_files import files_of, read_weights

_Shapes = Mapping[str, tuple[int, ...]]
_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|up_proj|down_proj)")  # of transformers: all experts of a layer


def ranks_to_build(megatron: MegatronConfig, world_size: int) -> list[int]:
    """Return a rank of each kind. Ranks are numbered along tensor parallelism first, pipeline stages last."""
    num_stages = megatron.pipeline_model_parallel_size
    size = world_size // num_stages
    tensor = megatron.tensor_model_parallel_size
    experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    places = {0, tensor - 1, experts - 1, size - 1}
    return sorted(stage * size + place for stage in range(num_stages) for place in places if place < size)


@contextmanager
def _as_rank(rank: int, world_size: int, megatron: MegatronConfig) -> Iterator[None]:
    """Have the groups of one rank of a world, in which nothing is sent."""
    from megatron.core import parallel_state  # after recipes.policy, which makes it run on a CPU

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    parallel.divide_world(megatron, seed=1, create_gloo_process_groups=False)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def plain(cfg: PolicyConfig) -> PolicyConfig:
    """Return the configuration without the kernels that only a GPU has."""
    megatron = replace(
        cfg.megatron_cfg,
        attention_backend="local",
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_permute_fusion=False,
        moe_grouped_gemm=False,
        moe_enable_deepep=False,
        use_fused_weighted_squared_relu=False,
    )
    return replace(cfg, megatron_cfg=megatron)


def build(given: PolicyConfig, model: Path, world_size: int) -> dict[str, Any]:
    """Build a rank of each kind, and return the fields of `rehearse.BuiltPolicy`.

    Raises `ConfigError` where the model cannot be divided.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    check_layout(given, world_size=world_size)
    hf_config, family = hf.read_config(model)
    check_model_fits(family.config(hf_config), hf_config.vocab_size, given.megatron_cfg)
    cfg, ranks, stages = plain(given), [], {}
    for rank in ranks_to_build(cfg.megatron_cfg, world_size):
        with _as_rank(rank, world_size, cfg.megatron_cfg), torch.device("meta"):
            began = time.monotonic()
            config = transformer_config(family, hf_config, cfg)
            trunk = unwrap_model(build_model(family, hf_config, config, cfg))
            heads = build_heads(family, hf_config, config)
            own = family.weights(trunk)
            of_heads = [] if heads is None else family.head_weights(heads)
            _require_inverse(own + of_heads, config)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            ranks.append(
                dict(
                    rank=rank,
                    stage=stage,
                    num_bytes=sum(one.param.numel() * one.param.element_size() for one in own + of_heads),
                    num_tensors=len(own) + len(of_heads),
                    seconds=time.monotonic() - began,
                )
            )
            if stage not in stages:
                names = []
                for expert_rank in range(config.expert_model_parallel_size):
                    parallel_state.set_expert_model_parallel_rank(expert_rank)
                    mappings = family.weights(trunk) + ([] if heads is None else family.head_weights(heads))
                    names.append([one.names for one in mappings])
                parallel_state.set_expert_model_parallel_rank(None)
                stages[stage] = gather.parts_of_stage(own + of_heads, names, stage)
    parts = gather.joined_stages([stages[stage] for stage in sorted(stages)])
    with _as_rank(0, world_size, cfg.megatron_cfg):
        full, pushed = gather.full_shapes(parts, config), gather.pushed_shapes(parts, config)
    shapes = {name: shape for name, _, shape in full}
    reference, num_compared, differences = compared(shapes, model, unread=family.unread_weights(hf_config))
    return dict(
        ranks=tuple(ranks),
        full=_listed(full),
        pushed=_listed(pushed),
        reference=reference,
        num_compared=num_compared,
        differences=differences,
    )


def _require_inverse(mappings: Sequence[mapping.WeightMapping], config: Any) -> None:
    """Cut the full tensors of each parameter again: the shards must have its shape."""
    for one in mappings:
        group = mapping.tensor_group(is_expert=one.is_expert)
        num_shards = 1 if one.sharding is mapping.Sharding.REPLICATED else group.size()
        full = mapping.join(one.sharding, [torch.empty_like(one.param, device="meta")] * num_shards, config)
        mapping.split(one.sharding, full, config, size=group.size(), rank=group.rank()).view_as(one.param)


def _listed(shapes: Sequence[mapping.TensorShape]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in shapes]


def compared(own: _Shapes, model: Path, *, unread: set[str]) -> tuple[str, int, tuple[str, ...]]:
    """Return what was compared with, how many tensors both have, and each that one lacks or has in another shape."""
    has_files = bool(files_of(model))
    reference = read_weights(model).shape_of if has_files else class_shapes(model)
    # A class of transformers has no multi-token heads.
    ours = own if has_files else {name: shape for name, shape in own.items() if not name.startswith("mtp.")}
    differences = [f"{name}: the policy has it, the reference not" for name in sorted(set(ours) - set(reference))]
    differences += [f"{name}: the policy lacks it" for name in sorted(set(reference) - set(ours) - unread)]
    differences += [
        f"{name}: {list(shape)} in the policy, {list(reference[name])} in the reference"
        for name, shape in ours.items()
        if tuple(reference.get(name, shape)) != tuple(shape)
    ]
    what = "the headers of MODEL_PATH" if has_files else "the class of transformers"
    return what, len(set(ours) & set(reference)), tuple(differences)


def class_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the class that transformers builds, by the names that a checkpoint has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    is_hybrid = built.config.model_type == "nemotron_h"
    found: dict[str, tuple[int, ...]] = {}
    for own_name, tensor in built.state_dict().items():
        name = own_name.replace("model.", "backbone.", 1) if is_hybrid and own_name.startswith("model.") else own_name
        if (stacked := _STACKED.fullmatch(name)) is None:
            found[name] = tuple(tensor.shape)
            continue
        prefix, matrix = stacked.groups()
        for number, shape in enumerate([tuple(tensor.shape[1:])] * len(tensor)):
            if matrix == "gate_up_proj":
                half = (shape[0] // 2, *shape[1:])
                found |= {f"{prefix}{number}.{one}.weight": half for one in ("gate_proj", "up_proj")}
            else:
                found[f"{prefix}{number}.{matrix}.weight"] = shape
    if built.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found
