"""The torch stand-in for Mamba-2's kernels: against the recurrence it computes, and between packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recipes.policy.layers.mamba_cpu import mamba_split_conv1d_scan_combined

HEADS, HEAD_SIZE, GROUPS, STATE, KERNEL = 4, 3, 2, 5, 4
INNER = HEADS * HEAD_SIZE


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    channels = INNER + 2 * GROUPS * STATE
    return {
        "conv": torch.randn(channels, KERNEL, generator=generator, dtype=torch.float64),
        "bias": torch.randn(channels, generator=generator, dtype=torch.float64),
        "dt_bias": torch.randn(HEADS, generator=generator, dtype=torch.float64),
        "a": -torch.rand(HEADS, generator=generator, dtype=torch.float64),
        "d": torch.randn(HEADS, generator=generator, dtype=torch.float64),
    }


def mixed(inputs_BTD: Tensor, *, chunk: int, seq_idx: Tensor | None = None) -> Tensor:
    given = weights()
    return mamba_split_conv1d_scan_combined(
        inputs_BTD,
        given["conv"],
        given["bias"],
        given["dt_bias"],
        given["a"],
        D=given["d"],
        chunk_size=chunk,
        activation="silu",
        headdim=HEAD_SIZE,
        ngroups=GROUPS,
        norm_before_gate=False,
        seq_idx=seq_idx,
    )


def recurrence(inputs_TD: Tensor) -> Tensor:
    """Compute one sequence token by token, as the paper defines it."""
    given, state = weights(), torch.zeros(HEADS, STATE, HEAD_SIZE, dtype=torch.float64)
    z, xbc, dt = inputs_TD[:, :INNER], inputs_TD[:, INNER:-HEADS], inputs_TD[:, -HEADS:]
    padded = functional.pad(xbc, (0, 0, KERNEL - 1, 0))
    outputs = []
    for t in range(len(inputs_TD)):
        convolved = functional.silu((padded[t : t + KERNEL].T * given["conv"]).sum(-1) + given["bias"])
        x = convolved[:INNER].view(HEADS, HEAD_SIZE)
        b, c = (
            part.view(GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 0)
            for part in (convolved[INNER : INNER + GROUPS * STATE], convolved[INNER + GROUPS * STATE :])
        )
        step = functional.softplus(dt[t] + given["dt_bias"])
        state = torch.exp(step * given["a"])[:, None, None] * state + step[:, None, None] * b[..., None] * x[:, None]
        y = (c[..., None] * state).sum(1) + given["d"][:, None] * x
        outputs.append(y.flatten() * functional.silu(z[t]))
    return torch.stack(outputs)


def inputs(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 2 * INNER + 2 * GROUPS * STATE + HEADS, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31])
def test_the_chunked_scan_is_the_recurrence(length: int) -> None:
    given = inputs(length)
    torch.testing.assert_close(mixed(given[None], chunk=8)[0], recurrence(given), atol=2e-5, rtol=2e-5)


def test_packed_sequences_are_the_same_as_alone() -> None:
    parts = [inputs(length, seed=length) for length in (13, 1, 30, 8)]
    seq_idx = torch.cat([torch.full((len(part),), n) for n, part in enumerate(parts)])[None]
    packed = mixed(torch.cat(parts)[None], chunk=8, seq_idx=seq_idx)[0]
    torch.testing.assert_close(packed, torch.cat([recurrence(part) for part in parts]), atol=2e-5, rtol=2e-5)


def test_nothing_of_one_sequence_reaches_another_and_dropping_the_bounds_would_show() -> None:
    row = torch.cat([inputs(13, seed=1), inputs(30, seed=2), inputs(21, seed=3)])[None]
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor([13, 30, 21]))[None]
    other = row.clone()
    other[:, :13] += 1.0
    first, second = mixed(row, chunk=16, seq_idx=seq_idx), mixed(other, chunk=16, seq_idx=seq_idx)
    assert torch.equal(first[:, 13:], second[:, 13:])
    assert not torch.equal(mixed(row, chunk=16)[:, 13:43], mixed(other, chunk=16)[:, 13:43]), "no test of a leak"

    leaf = row.clone().requires_grad_()
    mixed(leaf, chunk=16, seq_idx=seq_idx)[:, 13:43].square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert leaf.grad[:, 13:43].abs().max() > 0.1
    assert leaf.grad[:, :13].abs().max() == 0
    assert leaf.grad[:, 43:].abs().max() == 0
