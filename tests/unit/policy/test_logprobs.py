"""Log-probabilities and their gradients against torch's log_softmax; sharding over ranks is a functional test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from recipes.policy.layers.head import label_logprobs


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_size", [None, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_log_softmax(
    group: dist.ProcessGroup, chunk_size: int | None, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=generator).requires_grad_()
    weight = (torch.randn(11, 8, generator=generator) * 3).requires_grad_()
    labels = torch.randint(0, 11, (7,), generator=generator)
    factor = torch.randn(7, generator=generator)

    expected = ((hidden @ weight.T) / temperature).log_softmax(-1)[torch.arange(7), labels]
    grads = torch.autograd.grad((expected * factor).sum(), [hidden, weight])
    got = label_logprobs(hidden, weight, labels, temperature=temperature, chunk_size=chunk_size, group=group)
    got_grads = torch.autograd.grad((got * factor).sum(), [hidden, weight])

    assert torch.allclose(got, expected, atol=1e-5)
    for got_grad, grad in zip(got_grads, grads, strict=True):
        assert torch.allclose(got_grad, grad, atol=1e-5)


def test_large_logits_do_not_overflow(group: dist.ProcessGroup) -> None:
    weight = torch.tensor([[400.0], [0.0]])
    got = label_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), temperature=1.0, chunk_size=None, group=group)
    assert got.tolist() == [0.0, -400.0]


def test_the_temperature_divides_float32_logits(group: dist.ProcessGroup) -> None:
    """Logits of float16 stand for those of bfloat16, which not every CPU multiplies; the rounding is of one kind."""
    generator = torch.Generator().manual_seed(1)
    logits_TV = (torch.randn(64, 32, generator=generator) * 8).half()
    labels_T = torch.randint(0, 32, (64,), generator=generator)
    exact = (logits_TV.double() / 0.7).log_softmax(-1).gather(-1, labels_T[:, None])[:, 0]
    rounded = (logits_TV / 0.7).double().log_softmax(-1).gather(-1, labels_T[:, None])[:, 0]
    got = label_logprobs(logits_TV, torch.eye(32).half(), labels_T, temperature=0.7, chunk_size=None, group=group)
    assert (got - exact).abs().max() < 1e-5
    assert (rounded - exact).abs().max() > 1e-3, "the case must show the error that rounding before the division makes"
