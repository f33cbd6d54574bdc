"""What a checkpoint brings back of the optimizer, and what the configuration decides whatever a checkpoint says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_model

from recipes.config.tree import Config
from recipes.policy import checkpoint, step
from tests import fused_adam

pytestmark = pytest.mark.functional

_FUSED = {
    "precision": "bfloat16",
    "megatron_cfg__optimizer__bf16": "true",
    "megatron_cfg__optimizer__use_precision_aware_optimizer": "true",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fused(model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Config]:
    """The published optimizer, in a form of checkpoint that the test may choose."""
    fused_adam.install(monkeypatch)
    reshardable = str(getattr(request, "param", False)).lower()
    config = load_case(model, **_FUSED, megatron_cfg__dist_ckpt_optim_fully_reshardable=reshardable)
    with one_rank(config):
        yield config


def saved(trainer: step.Trainer, path: Path, *, with_optimizer: bool = True) -> Path:
    path.mkdir()
    checkpoint.save(trainer, path, with_optimizer=with_optimizer)
    return path


def weights(trainer: step.Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export()}


@pytest.mark.parametrize("fused", [False, True], ids=["in-parts", "fully-reshardable"], indirect=True)
def test_a_checkpoint_of_the_fused_optimizer_continues_exactly(fused: Config, tmp_path: Path) -> None:
    trainer = trainer_of(fused)
    step.train_steps(trainer, [shard_of(0)])
    path = saved(trainer, tmp_path / "checkpoint")
    straight = [step.train_steps(trainer, [shard_of(seed)]) for seed in (1, 2)]
    after = weights(trainer)
    for again in (trainer, trainer_of(fused)):
        checkpoint.load(again, path)
        assert [step.train_steps(again, [shard_of(seed)]) for seed in (1, 2)] == straight
        assert all(torch.equal(tensor, after[name]) for name, tensor in weights(again).items())


def test_a_checkpoint_holds_whole_weights_which_a_plain_optimizer_reads(
    fused: Config, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(fused)
    step.train_steps(trainer, [shard_of(0)])
    path = saved(trainer, tmp_path / "checkpoint")
    masters = main_weights(trainer)
    assert {master.dtype for master in masters} == {torch.float32}
    monkeypatch.undo()
    values: dict[str, Any] = _FUSED | {"megatron_cfg__optimizer__use_precision_aware_optimizer": "false"}
    plain = trainer_of(load_case(model, **values))
    checkpoint.load(plain, path)
    assert all(torch.equal(*pair) for pair in zip(main_weights(plain), masters, strict=True))


def main_weights(trainer: step.Trainer) -> list[torch.Tensor]:
    (part,) = trainer.optimizer.chained_optimizers
    params = [param for ranges in part.gbuf_ranges for own in ranges.values() for b in own for param in b["param_map"]]
    return [part._get_main_param_and_optimizer_states(param)["param"].clone() for param in params]


def test_a_save_before_any_step_is_a_start(fused: Config, tmp_path: Path) -> None:
    trainer = trainer_of(fused)
    path = saved(trainer, tmp_path / "checkpoint")
    straight = step.train_steps(trainer, [shard_of(0)])
    again = trainer_of(fused)
    checkpoint.load(again, path)
    assert step.train_steps(again, [shard_of(0)]) == straight


@pytest.mark.parametrize("with_optimizer", [True, False], ids=["whole", "weights"])
@pytest.mark.parametrize("is_distributed", ["true", "false"])
def test_the_configuration_decides_rates_and_decay_after_a_resume(
    model: Path, tmp_path: Path, is_distributed: str, with_optimizer: bool
) -> None:
    kind: dict[str, Any] = {
        "megatron_cfg__optimizer__use_distributed_optimizer": is_distributed,
        "megatron_cfg__distributed_data_parallel_config__overlap_param_gather": is_distributed,
    }
    changes: dict[str, Any] = {
        "optimizer__lr": 5e-3,
        "optimizer__min_lr": 1e-3,
        "optimizer__weight_decay": 0.1,
        "scheduler__start_weight_decay": 0.1,
        "scheduler__end_weight_decay": 0.5,
        "scheduler__weight_decay_incr_style": "linear",
        "optimizer__adam_beta2": 0.95,
        "optimizer__adam_eps": 1e-6,
        "scheduler__lr_warmup_init": 2e-4,
        "scheduler__lr_warmup_iters": 4,
        "scheduler__lr_decay_style": "linear",
        "scheduler__lr_decay_iters": 8,
    }
    config = load_case(model, **kind)
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_steps(trainer, [shard_of(0)])
        path = saved(trainer, tmp_path / "checkpoint", with_optimizer=with_optimizer)
        resumed = trainer_of(load_case(model, **kind, **{f"megatron_cfg__{key}": changes[key] for key in changes}))
        checkpoint.load(resumed, path)
        metrics = [step.train_steps(resumed, [shard_of(seed)]) for seed in range(1, 6)]
    assert [(0.1 + 0.05 * number, 1.0) for number in range(1, 6)] == [pytest.approx(own["wd"]) for own in metrics]
    assert [own["lr"] for own in metrics] == pytest.approx(
        [2e-4 + 4.8e-3 * number / 4 for number in range(1, 5)] + [4e-3]
    )
    for group in resumed.optimizer.param_groups:
        assert (group["betas"], group["eps"], group["step"]) == ((0.9, 0.95), 1e-6, 6 if with_optimizer else 5)
        assert (group["max_lr"], group["min_lr"]) == (5e-3, 1e-3)
        assert group["weight_decay"] == pytest.approx(0.4 * group["wd_mult"])


_SGD: dict[str, Any] = {
    "megatron_cfg__optimizer__optimizer": "sgd",
    "megatron_cfg__optimizer__use_distributed_optimizer": "false",
    "megatron_cfg__distributed_data_parallel_config__overlap_param_gather": "false",
    "megatron_cfg__optimizer__lr": 0.5,
    "megatron_cfg__optimizer__weight_decay": 0.1,
    "megatron_cfg__scheduler__start_weight_decay": 0.1,
    "megatron_cfg__scheduler__end_weight_decay": 0.1,
}
_BF16: dict[str, Any] = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_follows_gradient_momentum_and_weight_decay(model: Path, momentum: float) -> None:
    config = load_case(model, **_SGD, megatron_cfg__optimizer__sgd_momentum=momentum)
    with one_rank(config):
        trainer = trainer_of(config)
        params = [param for param in trainer.model.parameters() if param.requires_grad]
        directions = [torch.zeros_like(param) for param in params]
        for seed in range(3):
            before = [param.detach().clone() for param in params]
            measured = step.train_steps(trainer, [shard_of(seed)])
            decays = [0.1 if param.dim() > 1 else 0.0 for param in params]
            for param, old, direction, decay in zip(params, before, directions, decays, strict=True):
                direction.mul_(momentum).add_(param.main_grad + decay * old)  # the gradient as it was clipped
                torch.testing.assert_close(param.detach(), old - measured["lr"] * direction)


@pytest.mark.parametrize("precision", [{}, _BF16], ids=["float32", "bfloat16"])
def test_a_checkpoint_of_sgd_continues_exactly(model: Path, tmp_path: Path, precision: dict[str, Any]) -> None:
    config = load_case(model, **_SGD, **precision)
    with one_rank(config):
        trainer = trainer_of(config)
        unmoved = saved(trainer, tmp_path / "before-any-step")
        straight = [step.train_steps(trainer, [shard_of(0)])]
        path = saved(trainer, tmp_path / "checkpoint")
        straight += [step.train_steps(trainer, [shard_of(seed)]) for seed in (1, 2)]
        after = weights(trainer)
        for place, seeds in ((path, (1, 2)), (unmoved, (0, 1, 2))):
            again = trainer_of(config)
            checkpoint.load(again, place)
            assert [step.train_steps(again, [shard_of(seed)]) for seed in seeds] == straight[-len(seeds) :]
            assert all(torch.equal(tensor, after[name]) for name, tensor in weights(again).items())


def test_a_resume_takes_the_momentum_of_the_configuration(model: Path, tmp_path: Path) -> None:
    config = load_case(model, **_SGD, megatron_cfg__optimizer__sgd_momentum=0.0)
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_steps(trainer, [shard_of(0)])
        path = saved(trainer, tmp_path / "checkpoint")
        resumed = trainer_of(load_case(model, **_SGD, megatron_cfg__optimizer__sgd_momentum=0.5))
        checkpoint.load(resumed, path)
        assert {group["momentum"] for group in resumed.optimizer.param_groups} == {0.5}
        assert (
            step.train_steps(resumed, [shard_of(1)])["grad_norm"]
            == step.train_steps(trainer, [shard_of(1)])["grad_norm"]
        )
