"""The CPU form of Megatron's source, its guard against another release, and the Adam that goes with it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.policy import cpu


def test_device_literals_and_calls_are_rewritten() -> None:
    source = (
        "x = torch.zeros(2, device='cuda', pin_memory=True)\n"
        "y = x.cuda(non_blocking=True)\n"
        "if p.type() == 'torch.cuda.HalfTensor': torch.cuda.synchronize()\n"
        "from torch.cuda import _lazy_call\n"
    )
    assert cpu.rewrite(source, "anything") == (
        "x = torch.zeros(2, device='cpu', pin_memory=False)\n"
        "y = x.cpu()\n"
        "if p.type() == 'torch.HalfTensor': _cpu_cuda.synchronize()\n"
        "from recipes_cpu_cuda import _lazy_call\n"
    )


def test_another_source_of_a_counted_module_is_refused() -> None:
    with pytest.raises(ImportError, match=r"megatron\.core\.optimizer\.clip_grads.*install megatron-core 0\.16\.1"):
        cpu.rewrite("x = torch.zeros(2, device='cuda')\n", "optimizer.clip_grads")


def test_nothing_is_rewritten_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    (finder,) = [finder for finder in cpu.sys.meta_path if type(finder).__name__ == "_Finder"]
    assert finder.find_spec("megatron.core.jit", megatron.core.__path__) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert finder.find_spec("megatron.core.jit", megatron.core.__path__) is None


def _train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        param.grad = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        optimizer.step()


def test_adam_equals_torch_and_resumes_exactly() -> None:
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.2}
    ours, theirs = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    adam = cpu.Adam([ours], **settings)
    _train(ours, adam, range(3))
    _train(theirs, torch.optim.AdamW([theirs], **settings), range(3))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)

    resumed = torch.nn.Parameter(ours.detach().clone())
    other = cpu.Adam([resumed], **settings)
    other.load_state_dict(copy.deepcopy(adam.state_dict()))
    _train(ours, adam, range(3, 5))
    _train(resumed, other, range(3, 5))
    assert torch.equal(ours, resumed)


def test_the_sums_and_gathers_of_one_rank_touch_nothing() -> None:
    """torch's own would copy all gradients and all weights, at each step."""
    from megatron.core.distributed import param_and_grad_buffer

    assert param_and_grad_buffer.dist_all_gather_func is cpu.gather_in_place
    assert param_and_grad_buffer.dist_reduce_scatter_func is cpu.reduce_in_place
    weights = torch.arange(4.0)
    group: Any = SimpleNamespace(size=lambda: 1)  # any call to it would fail
    cpu.gather_in_place(weights, weights, group=group, async_op=True)
    cpu.reduce_in_place(weights, weights, op=None, group=group, async_op=False)
    assert weights.tolist() == [0.0, 1.0, 2.0, 3.0]
