"""Speculative decoding on CPU, where three functions of vLLM 0.32 lead to wrong tokens without an error.

After a rejected draft a Mamba layer must go on from its state before that draft. The CPU forms of the convolution and
of the scan do not look at how many tokens were accepted. And the CPU form of the function that repeats a request's
temperature, top-k and top-p for each of its drafts writes into a copy, so drafts are judged at values from memory that
nothing has written. The functions here are plain torch, one request after the other: right, but slow.

Shape legend: T tokens of all requests, N requests, D convolution channels, W width of the convolution, h heads, d head
size, s state size, g groups of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.sample import rejection_sampler


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of one request, and how many tokens of its last call were accepted."""

    number: int  # of the request
    slot: int  # where its state lies; `NULL_BLOCK_ID`: it has none
    accepted: int
    begin: int
    end: int


def new_tokens(slots_N: Tensor, accepted_N: Tensor, bounds: Tensor) -> list[NewTokens]:
    """List the requests that have a state and new tokens, which lie between their two `bounds`."""
    ends = bounds.tolist()
    rows = zip(slots_N.tolist(), accepted_N.tolist(), ends[:-1], ends[1:], strict=True)
    found = [NewTokens(number, *row) for number, row in enumerate(rows)]
    return [one for one in found if one.slot != NULL_BLOCK_ID and one.begin < one.end]


def convolve(
    x_TD: Tensor, states: Tensor, weight_DW: Tensor, bias_D: Tensor | None, requests: Sequence[NewTokens], *, silu: bool
) -> Tensor:
    """Return the causal convolution of each request's new tokens, [T, D], and move its state on.

    A state [D, W - 1 + drafts] begins with the W - 1 inputs before the first token of the last call and goes on with
    the tokens of that call: those that count now end with the last accepted one.
    """
    before = weight_DW.shape[1] - 1
    result = torch.zeros_like(x_TD)
    for one in requests:
        state, own = states[one.slot], slice(one.begin, one.end)
        earlier = state[:, one.accepted - 1 : one.accepted - 1 + before]
        inputs = torch.cat([earlier, x_TD[own].T.to(state.dtype)], dim=1)
        value = functional.conv1d(inputs[None].to(weight_DW.dtype), weight_DW[:, None], bias_D, groups=len(weight_DW))
        result[own] = (functional.silu(value) if silu else value)[0].T.to(result.dtype)
        state[:, : inputs.shape[1] - 1] = inputs[:, 1:]
    return result


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a Mamba-2 layer computes for its new tokens: h = exp(dt A) h + dt B x and y = C h + D x.

    dt = softplus(dt_Thd + dt_bias). Source: https://arxiv.org/abs/2405.21060.
    """

    x_Thd: Tensor
    dt_Thd: Tensor
    A_hds: Tensor
    B_Tgs: Tensor
    C_Tgs: Tensor
    D_hd: Tensor
    dt_bias_hd: Tensor

    def step(self, state_hds: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Return the state after a token, and its output [h, d]."""
        repeats = self.x_Thd.shape[1] // self.B_Tgs.shape[1]
        b_hs, c_hs = (x[token].repeat_interleave(repeats, dim=0).float() for x in (self.B_Tgs, self.C_Tgs))
        x_hd, step_hd = self.x_Thd[token].float(), functional.softplus(self.dt_Thd[token].float() + self.dt_bias_hd)
        state_hds = state_hds * torch.exp(step_hd[..., None] * self.A_hds) + (step_hd * x_hd)[..., None] * b_hs[:, None]
        return state_hds, (state_hds * c_hs[:, None]).sum(-1) + self.D_hd * x_hd


def scan(
    states: Tensor, layer: Recurrence, requests: Sequence[NewTokens], *, write_NK: Tensor, out_Thd: Tensor
) -> None:
    """Write the output of each new token to `out_Thd`, and the state after new token k of request n to `write_NK`."""
    for one in requests:
        state_hds = states[one.slot].float()
        for token in range(one.begin, one.end):
            state_hds, out_hd = layer.step(state_hds, token)
            out_Thd[token] = out_hd.to(out_Thd.dtype)
            place = int(write_NK[one.number, token - one.begin])
            if place != NULL_BLOCK_ID:
                states[place] = state_hds.to(states.dtype)


def repeat_for_tokens(
    x_N: Tensor, ends_N: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return entry n of `x_N` for each token of request n, [T]; `replace_from` becomes `replace_to`."""
    replaced_N = torch.where(x_N == replace_from, torch.as_tensor(replace_to, dtype=x_N.dtype), x_N)
    counts_N = ends_N.diff(prepend=ends_N.new_zeros(1)).to(torch.int64)
    return replaced_N.repeat_interleave(counts_N, output_size=num_tokens)


def install() -> None:
    """Replace the three in this process, the two of Mamba layers only where drafts are judged; harmless to repeat."""
    if rejection_sampler.expand_batch_to_tokens is repeat_for_tokens:
        return
    rejection_sampler.expand_batch_to_tokens = repeat_for_tokens
    plain_convolution, plain_scan = mamba_mixer2.causal_conv1d_update, mamba_mixer2.selective_state_update

    def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        accepted_N = kwargs.get("num_accepted_tokens")
        if accepted_N is None:
            result: Tensor = plain_convolution(x, conv_state, weight, *args, **kwargs)
            return result
        bias, activation = args
        slots = kwargs["conv_state_indices"]
        requests = new_tokens(slots[:, 0] if slots.dim() == 2 else slots, accepted_N, kwargs["query_start_loc"])
        return convolve(x, conv_state, weight, bias, requests, silu=activation in ("silu", "swish", True))

    def selective_state_update(states: Tensor, *args: Any, **kwargs: Any) -> None:
        accepted_N = kwargs.get("num_accepted_tokens")
        if accepted_N is None:
            plain_scan(states, *args, **kwargs)
            return
        # The state after token k of the last call lies in slot k of the request.
        slots_N = kwargs["state_batch_indices"].gather(1, (accepted_N.to(torch.int64) - 1)[:, None])[:, 0]
        requests = new_tokens(slots_N, accepted_N, kwargs["cu_seqlens"])
        places = kwargs["dst_state_batch_indices"]
        scan(states, Recurrence(*args), requests, write_NK=places, out_Thd=kwargs["out"])

    mamba_mixer2.causal_conv1d_update = causal_conv1d_update
    mamba_mixer2.selective_state_update = selective_state_update
