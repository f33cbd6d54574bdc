"""Run as a program: attention of Transformer Engine through Megatron's own wrapper, beside the one for CPUs.

`transformer_engine` is a stand-in here, put in place before Megatron is imported. Its attention checks what the real
one checks of a packed row (release 2.11), computes each sequence apart, and refuses any other argument.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

if TYPE_CHECKING:
    from recipes.config.tree import Config

LENGTHS = [7, 2, 30, 12, 11, 3]
CALLS: list[list[int]] = []  # the lengths of the sequences, for each call of the stand-in


class DotProductAttention(nn.Module):
    """The constructor and the forward pass that Megatron 0.16.1 calls."""

    def __init__(
        self,
        *,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int,
        attention_dropout: float,
        attn_mask_type: str,
        attention_type: str,
        softmax_scale: float | None,
        sequence_parallel: bool,
        tp_size: int,
        tp_group: Any,
        get_rng_state_tracker: Any,
        layer_number: int,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and attention_type == "self"
        self.heads, self.groups, self.size = num_attention_heads // tp_size, num_gqa_groups // tp_size, kv_channels
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: str,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: Tensor,
        cu_seqlens_kv_padded: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
    ) -> Tensor:
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert query.shape[1:] == (self.heads, self.size) and key.shape[1:] == value.shape[1:] == (
            self.groups,
            self.size,
        )
        for bounds in (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(query)
        lengths = cu_seqlens_q.diff().tolist()
        assert type(max_seqlen_q) is type(max_seqlen_kv) is int and max_seqlen_q == max_seqlen_kv == max(lengths)
        CALLS.append(lengths)
        outputs = []
        for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


class Missing(types.ModuleType):
    """A module whose other names are modules like it, or classes, which nothing may use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {}) if name[0].isupper() else Missing(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `transformer_engine` and every module below it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_own = fullname.partition(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_own else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Missing(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "transformer_engine":
            module.__version__ = "2.11.0"
        if module.__name__ == "transformer_engine.pytorch":
            module.DotProductAttention = DotProductAttention
        if module.__name__ == "transformer_engine.pytorch.attention":
            module._SplitAlongDim = types.SimpleNamespace(apply=lambda x, dim, sizes: torch.split(x, sizes, dim))
        if module.__name__ == "transformer_engine.pytorch.cpu_offload":
            module.get_cpu_offload_context = lambda *_, **__: (nullcontext(), None)


def results(case: Config, backend: str) -> list[Tensor]:
    """Return the log-probabilities of a packed row, and the gradients of their weighted sum."""
    from recipes.policy import hf, model
    from recipes.policy.families import mapping
    from recipes.policy.microbatch import pack_microbatch

    cfg = replace(case.policy, megatron_cfg=replace(case.policy.megatron_cfg, attention_backend=backend))
    directory = Path(cfg.model_name)
    hf_config, family = hf.read_config(directory)
    config = model.transformer_config(family, hf_config, cfg)
    built = model.build_model(family, hf_config, config, cfg)
    mapping.load(family.weights(built), config, hf.WeightReader(directory))
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 96, length).astype(np.int32) for length in LENGTHS]
    packed = pack_microbatch(ids, range(len(ids)), multiple=1, row_multiple=8, where=torch.device("cpu"))
    logprobs = model.forward(built, packed.tokens_1T, packed.labels_1T, packed.sequences)
    (logprobs * torch.linspace(-1, 1, logprobs.shape[1])).sum().backward()
    return [logprobs.detach(), *(param.grad for param in built.parameters() if param.grad is not None)]


def main() -> None:
    """Print, for a model of each family, the largest difference between the two and how often the stand-in attended."""
    sys.meta_path.insert(0, Finder())
    from policy_case import load_case, save_hybrid, save_model

    from recipes.policy import parallel

    # Only now, because ours comes before Megatron.
    routers: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    routers.te_general_gemm = None  # a product of Transformer Engine's, in whose place Megatron then takes torch's

    for save in (save_model, save_hybrid):
        with tempfile.TemporaryDirectory() as directory:
            case = load_case(save(Path(directory)))
            if not torch.distributed.is_initialized():
                parallel.join_groups(
                    HashStore(), rank=0, world_size=1, cfg=case.policy.megatron_cfg, seed=1, timeout_s=60
                )
            CALLS.clear()
            own, other = results(case, "local"), results(case, "auto")
            assert len(own) == len(other)
            gap = max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in zip(own, other, strict=True))
            print(save.__name__, len(CALLS), gap)


if __name__ == "__main__":
    main()
