"""After a step every bucket of parameters is gathered, also one whose gather before the step nobody has waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_model

from recipes.policy import optimizer, step

_REDUCTION = "megatron_cfg__distributed_data_parallel_config__"


def test_every_bucket_is_gathered_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import param_and_grad_buffer  # after recipes.policy

    gathered: list[int] = []
    gather = param_and_grad_buffer.dist_all_gather_func

    def noted(whole: Any, own: Any, **more: Any) -> None:
        gathered.append(whole.data_ptr())
        gather(whole, own, **more)

    monkeypatch.setattr(param_and_grad_buffer, "dist_all_gather_func", noted)
    monkeypatch.setattr(optimizer, "_BUCKET_SIZE", 1)
    overlap: dict[str, Any] = {f"{_REDUCTION}overlap_{what}": "true" for what in ("grad_reduce", "param_gather")}
    config = load_case(save_model(tmp_path / "model"), **overlap)
    with one_rank(config):
        trainer = trainer_of(config)
        take = trainer.optimizer.step

        def take_and_forget() -> Any:
            taken = take()
            gathered.clear()
            return taken

        monkeypatch.setattr(trainer.optimizer, "step", take_and_forget)
        step.train_step(trainer, shard_of(0))
        buckets = [bucket.param_data.data_ptr() for group in trainer.model.bucket_groups for bucket in group.buckets]
    assert len(buckets) > 2 and sorted(gathered) == sorted(buckets)
