"""What the tests of one GPU build can be built: their configuration is read here as it is there, by the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from policy_case import save_experts, save_model

from recipes.policy import checkpoint, step
from tests import fused_adam, grouped_linear, two_devices
from tests.gpu import gpu_case
from tools.sizing.architecture import read_architecture

pytestmark = pytest.mark.functional


@contextmanager
def leaving_groups() -> Iterator[None]:
    """Leave Megatron's groups at the end."""
    from megatron.core import parallel_state
    from torch import distributed as dist

    try:
        yield
    finally:
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()


def test_experts_of_the_gpu_tests_are_built_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped_linear.stand_in(monkeypatch.setattr)
    model = save_experts(tmp_path / "model", vocab_size=gpu_case.VOCAB)
    shard = gpu_case.full_shard(tokens=32, width=32, num_microbatches=2)
    norms = []
    for is_grouped in (False, True):
        config = gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=32, recompute=True)
        config.policy.megatron_cfg.moe_grouped_gemm = is_grouped
        config.policy.megatron_cfg.dist_ckpt_optim_fully_reshardable = True
        with leaving_groups():
            norms.append(step.train_steps(gpu_case.build_trainer(config), [shard])["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.03)


@pytest.mark.parametrize("kind", ["plain", "fused", "offloaded"])
def test_a_trainer_of_the_gpu_tests_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    is_fused = kind == "fused"
    if is_fused:
        fused_adam.install(monkeypatch)
    model = save_model(tmp_path / "model", vocab_size=gpu_case.VOCAB)
    config = gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=64, recompute=True, is_fused=is_fused)
    if kind == "offloaded":
        two_devices.install(monkeypatch)
        gpu_case.offload(config, share=0.5)
    shard = gpu_case.full_shard(tokens=64, width=32)
    with leaving_groups():
        trainer = gpu_case.build_trainer(config)
        assert step.train_steps(trainer, [shard])["skipped_steps"] == 0.0
        (tmp_path / "checkpoint").mkdir()
        checkpoint.save(trainer, tmp_path / "checkpoint")
        straight = step.train_steps(trainer, [shard])
        checkpoint.load(trainer, tmp_path / "checkpoint")
        assert step.train_steps(trainer, [shard]) == straight
    assert gpu_case.planned_bytes(model, config) > 0
    assert read_architecture(model).active_parameters > 0
