"""What the tests of one GPU build can be built: their configuration is read here as it is there, by the same code."""

from __future__ import annotations

from pathlib import Path

import pytest
from policy_case import save_model

from recipes.policy import checkpoint, step
from tests import fused_adam
from tests.gpu import gpu_case
from tools.sizing.architecture import read_architecture

pytestmark = pytest.mark.functional


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_a_trainer_of_the_gpu_tests_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    from megatron.core import parallel_state
    from torch import distributed as dist

    if is_fused:
        fused_adam.install(monkeypatch)
    model = save_model(tmp_path / "model", vocab_size=gpu_case.VOCAB)
    config = gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=64, recompute=True, is_fused=is_fused)
    shard = gpu_case.full_shard(tokens=64, width=32)
    try:
        trainer = gpu_case.build_trainer(config)
        assert step.train_steps(trainer, [shard])["skipped_steps"] == 0.0
        (tmp_path / "checkpoint").mkdir()
        checkpoint.save(trainer, tmp_path / "checkpoint")
        straight = step.train_steps(trainer, [shard])
        checkpoint.load(trainer, tmp_path / "checkpoint")
        assert step.train_steps(trainer, [shard]) == straight
    finally:
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
    assert gpu_case.planned_bytes(model, config) > 0
    assert read_architecture(model).active_parameters > 0
