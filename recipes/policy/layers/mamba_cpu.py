"""What Megatron's Mamba layers take from `mamba_ssm`, in plain torch, for machines without CUDA.

`install()` gives `megatron.core.ssm` what it imports; on a machine with CUDA it does nothing, and the kernels of
`mamba_ssm` are used. The state-space scan is the chunked form of Mamba-2 (Dao and Gu, arXiv 2405.21060, listing 1), in
float32. A row may hold several sequences (`seq_idx`): nothing of one reaches another, neither through the convolution
nor through the state, and the gradient between them is exactly 0.

Shape legend: B rows, T tokens, H heads, P head size, G groups, N state size, K kernel size of the convolution,
C chunks, L tokens of a chunk.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recipes.policy.layers.context import held_positions

_TRITON_ONLY = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def install() -> None:
    """Make `megatron.core.ssm` importable and complete without CUDA; harmless to repeat."""
    if torch.cuda.is_available() or "megatron.core.ssm.mamba_mixer" in sys.modules:
        return
    inference = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")  # imported without a guard
    stand_ins: dict[str, dict[str, Any]] = {
        _TRITON_ONLY: dict.fromkeys(inference),
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,  # of a path that is not taken
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    }
    for name, members in stand_ins.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        sys.modules[name] = module
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    mamba_context_parallel.tex = types.SimpleNamespace(thd_get_partitioned_indices=_partitioned_indices)
    mamba_context_parallel.is_te_min_version = lambda *_: True
    for name in stand_ins:  # transformers and vLLM must not take them for the real package
        if name.startswith("mamba_ssm"):
            del sys.modules[name]


def _partitioned_indices(bounds: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Do what Transformer Engine's function of this name does: positions of a context-parallel rank, int32."""
    assert int(bounds[-1]) == total, "sequences fill the row"
    return held_positions(bounds, rank=rank, size=size).int()


def mamba_split_conv1d_scan_combined(
    zxbcdt_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor, dt_bias_H: Tensor, a_H: Tensor, **options: Any
) -> Tensor:
    """Convolve, scan and gate the output [B, T, z + x + B + C + dt] of `in_proj`; returns [B, T, H * P].

    Per head: h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t, y_t = (c_t h_t + D x_t) * silu(z_t). `options` are those that
    Megatron passes by name: D [H], chunk_size, headdim, ngroups, seq_idx [B, T] or None.
    """
    assert options["activation"] == "silu" and not options["norm_before_gate"], "Megatron's mixer asks for nothing else"
    heads, head_size, seq_idx = dt_bias_H.shape[0], options["headdim"], options["seq_idx"]
    inner, state = heads * head_size, (weight_DK.shape[0] - heads * head_size) // 2
    z_BTD, xbc_BTD, dt_BTH = zxbcdt_BTD[..., :inner], zxbcdt_BTD[..., inner:-heads], zxbcdt_BTD[..., -heads:]
    xbc_BTD = causal_conv(xbc_BTD, weight_DK, bias_D, seq_idx).float()
    x_BTHP = _heads(xbc_BTD[..., :inner], heads)
    b_BTHN, c_BTHN = (
        _heads(part, options["ngroups"]).repeat_interleave(heads // options["ngroups"], dim=2)
        for part in (xbc_BTD[..., inner : inner + state], xbc_BTD[..., inner + state :])
    )
    dt_BTH = functional.softplus(dt_BTH.float() + dt_bias_H.float())
    decay_BTH = dt_BTH * a_H.float()
    if seq_idx is not None:  # a sequence starts from nothing: the decay into its first token is exp(-inf) = 0
        is_first = functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        decay_BTH = decay_BTH.masked_fill(is_first[..., None], -torch.inf)
    y_BTHP = _scan(x_BTHP * dt_BTH[..., None], decay_BTH, b_BTHN, c_BTHN, options["chunk_size"])
    y_BTHP = y_BTHP[:, : x_BTHP.shape[1]] + x_BTHP * options["D"].float()[:, None]
    gated_BTD: Tensor = y_BTHP.flatten(-2) * functional.silu(z_BTD.float())
    return gated_BTD.to(zxbcdt_BTD.dtype)


def causal_conv(x_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Return silu of the causal depthwise convolution, [B, T, D]; a token sees its own sequence only."""
    out = bias_D + weight_DK[:, -1] * x_BTD
    for back in range(1, min(weight_DK.shape[1], x_BTD.shape[1])):
        earlier = functional.pad(x_BTD[:, :-back], (0, 0, back, 0))
        if seq_idx is not None:
            is_same = functional.pad(seq_idx[:, back:] == seq_idx[:, :-back], (back, 0))
            earlier = earlier * is_same[..., None]
        out = out + weight_DK[:, -1 - back] * earlier
    return functional.silu(out)


def _scan(x_BTHP: Tensor, decay_BTH: Tensor, b_BTHN: Tensor, c_BTHN: Tensor, chunk: int) -> Tensor:
    """Return c_t h_t [B, T padded to whole chunks, H, P], within chunks by attention, between them by their states."""
    pad = -x_BTHP.shape[1] % chunk
    x, b, c = (_chunks(functional.pad(part, (0, 0, 0, 0, 0, pad)), chunk) for part in (x_BTHP, b_BTHN, c_BTHN))
    decay_BHCL = _chunks(functional.pad(decay_BTH, (0, 0, 0, pad)), chunk).permute(0, 3, 1, 2)
    between_BHCLL = torch.exp(_sums_between(decay_BHCL))
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, between_BHCLL, x)
    # The state that each chunk adds, then the state that each chunk starts from.
    added = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, between_BHCLL[..., -1, :], x)
    whole_BHC = torch.exp(_sums_between(functional.pad(decay_BHCL.sum(-1), (1, 0))))
    added = torch.cat([torch.zeros_like(added[:, :1]), added], dim=1)
    start = torch.einsum("bhzc,bchpn->bzhpn", whole_BHC, added)[:, :-1]
    from_start = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, start, torch.exp(decay_BHCL.cumsum(-1)))
    return (within + from_start).flatten(1, 2)


def _heads(x_BTD: Tensor, num: int) -> Tensor:
    return x_BTD.reshape(*x_BTD.shape[:2], num, -1)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _sums_between(decay: Tensor) -> Tensor:
    """Return [..., i, j] = sum of decay over (j, i], -inf above the diagonal; [..., L] in.

    It sums masked copies. A difference of two running sums would lose precision, and is NaN where both are -inf.
    """
    length = decay.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=decay.device).tril(-1)
    sums = decay[..., None].expand(*decay.shape, length).masked_fill(~below, 0.0).cumsum(-2)
    return sums.masked_fill(~below.logical_or(torch.eye(length, dtype=torch.bool, device=decay.device)), -torch.inf)


class GatedRMSNorm(torch.nn.Module):
    """RMS norm over groups of the last dimension, after gating by silu(z)."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **options: Any) -> None:
        super().__init__()
        assert not options.get("norm_before_gate", False)
        self._eps = eps
        self._group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=options.get("dtype")))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize [..., hidden_size]."""
        gated = x.float() if z is None else x.float() * functional.silu(z.float())
        groups = gated.reshape(*gated.shape[:-1], -1, self._group_size)
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self._eps)
        scaled: Tensor = normed.flatten(-2) * self.weight
        return scaled.to(x.dtype)
