"""An optimizer whose state lies on the CPU trains, skips, saves and resumes as one that is not offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_experts

from recipes.config.tree import Config
from recipes.policy import checkpoint, step
from recipes.policy.offloading.hybrid import OffloadedAdam
from tests import two_devices

pytestmark = pytest.mark.functional

_SETTINGS: dict[str, Any] = {
    "precision": "bfloat16",
    "megatron_cfg__optimizer__bf16": "true",
    "megatron_cfg__distributed_data_parallel_config__grad_reduce_in_fp32": "true",
    "megatron_cfg__optimizer__weight_decay": 0.1,
    "megatron_cfg__scheduler__start_weight_decay": 0.1,
    "megatron_cfg__scheduler__end_weight_decay": 0.1,
}
_FLOAT32 = _SETTINGS | {"precision": "float32", "megatron_cfg__optimizer__bf16": "false"}
_ANY_LAYOUT: dict[str, Any] = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    two_devices.install(monkeypatch)


def offloaded(share: float, *, overlaps: bool = False) -> dict[str, Any]:
    return {
        "megatron_cfg__optimizer__optimizer_cpu_offload": "true",
        "megatron_cfg__optimizer__optimizer_offload_fraction": share,
        "megatron_cfg__optimizer__overlap_cpu_optimizer_d2h_h2d": str(overlaps).lower(),
    }


def weights(trainer: step.Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def trained(config: Config) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], step.Trainer]:
    trainer = trainer_of(config)
    metrics = [step.train_step(trainer, shard_of(seed)) for seed in range(3)]
    return metrics, weights(trainer), trainer


def saved(trainer: step.Trainer, path: Path, *, with_optimizer: bool = True) -> Path:
    path.mkdir()
    checkpoint.save(trainer, path, with_optimizer=with_optimizer)
    return path


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("share", "overlaps"), [(1.0, False), (0.5, False), (0.5, True)])
def test_an_offloaded_optimizer_trains_as_any(model: Path, share: float, overlaps: bool) -> None:
    config = load_case(model, **_SETTINGS, **offloaded(share, overlaps=overlaps))
    with one_rank(config):
        expected, after, _ = trained(load_case(model, **_SETTINGS))
        metrics, found, trainer = trained(config)
    assert metrics == expected
    assert same(found, after)
    for own in (part.optimizer for part in trainer.optimizer.chained_optimizers):
        assert isinstance(own, OffloadedAdam)
        sizes = {False: 0, True: 0}
        for param, inner in own.param_to_inner_param.items():
            sizes[getattr(inner, "is_on_host", False)] += param.numel()
        assert sizes[True] >= share * sum(sizes.values()) and bool(sizes[False]) == (share < 1)
        groups = [group for inner in own.sub_optimizers for group in inner.param_groups]
        assert {group["lr"] for group in groups} == {expected[-1]["lr"]}
        assert {group["weight_decay"] for group in groups} <= {0.0, 0.1}


@pytest.mark.usefixtures("device")
def test_an_offloaded_optimizer_takes_no_step_from_what_is_not_finite(model: Path) -> None:
    config = load_case(model, **_SETTINGS, **offloaded(0.5))
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_step(trainer, shard_of(0))
        before = weights(trainer)
        worthless = torch.full_like(shard_of(1).batch.advantages_B, torch.nan)
        assert step.train_step(trainer, shard_of(1, advantages_B=worthless))["skipped_steps"] == 1
        assert same(before, weights(trainer))
        after = [step.train_step(trainer, shard_of(seed)) for seed in (1, 2)]
        expected, found, _ = trained(config)
        assert after == expected[1:]
        assert same(found, weights(trainer))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("form", [{}, _ANY_LAYOUT], ids=["in-parts", "fully-reshardable"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_checkpoint_of_an_offloaded_optimizer_continues_exactly(
    model: Path, tmp_path: Path, form: dict[str, Any], share: float
) -> None:
    plain = load_case(model, **_SETTINGS, **form)
    config = load_case(model, **_SETTINGS, **form, **offloaded(share))
    with one_rank(config):
        trainer = trainer_of(config)
        unmoved = saved(trainer, tmp_path / "before-any-step")
        straight = [step.train_step(trainer, shard_of(0))]
        path = saved(trainer, tmp_path / "checkpoint")
        straight += [step.train_step(trainer, shard_of(seed)) for seed in (1, 2)]
        after = weights(trainer)
        for again, place, seeds in (
            (trainer, path, (1, 2)),
            (trainer_of(config), path, (1, 2)),
            (trainer_of(config), unmoved, (0, 1, 2)),
            (trainer_of(plain), path, (1, 2)),
        ):
            checkpoint.load(again, place)
            assert copies_of_weights(again) == 0
            assert [step.train_step(again, shard_of(seed)) for seed in seeds] == straight[-len(seeds) :]
            assert same(weights(again), after)
        third = saved(again, tmp_path / "of-the-plain-one")
        resumed = trainer_of(config)
        checkpoint.load(resumed, third)
        twice = saved(resumed, tmp_path / "saved-at-once")
        for other in (resumed, trainer_of(config)):
            checkpoint.load(other, twice)
            assert step.train_step(other, shard_of(3)) == step.train_step(again, shard_of(3))
            checkpoint.load(again, third)


def copies_of_weights(trainer: step.Trainer) -> int:
    """Count the weights of an offloaded state that are not those which its steps change."""
    parts = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    offloaded = [own for own in parts if isinstance(own, OffloadedAdam)]
    return sum(
        state["master_param"] is not own.param_to_inner_param[param]
        for own in offloaded
        for param, state in own.state.items()
    )


def test_parameters_of_the_model_itself_are_not_copied() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    own = OffloadedAdam([{"params": params}], cpu_optimizer_cls=torch.optim.AdamW, gpu_optimizer_cls=torch.optim.Adam)
    assert not hasattr(own, "cpu_optimizers")


@pytest.mark.usefixtures("device")
def test_weights_alone_start_an_offloaded_optimizer_anew(model: Path, tmp_path: Path) -> None:
    config = load_case(model, **_SETTINGS, **offloaded(0.5))
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_step(trainer, shard_of(0))
        path = saved(trainer, tmp_path / "weights", with_optimizer=False)
        plain, again = trainer_of(load_case(model, **_SETTINGS)), trainer_of(config)
        for own in (plain, again, trainer):
            checkpoint.load(own, path)
        expected = [step.train_step(plain, shard_of(seed)) for seed in (1, 2)]
        for own in (again, trainer):
            assert [step.train_step(own, shard_of(seed)) for seed in (1, 2)] == expected
            assert same(weights(own), weights(plain))


def test_without_a_device_nothing_is_offloaded(model: Path) -> None:
    config = load_case(model, **_FLOAT32, **offloaded(0.5, overlaps=True))
    with one_rank(config):
        expected, after, _ = trained(load_case(model, **_FLOAT32))
        metrics, found, trainer = trained(config)
    assert metrics == expected
    assert same(found, after)
    assert not any(isinstance(part.optimizer, OffloadedAdam) for part in trainer.optimizer.chained_optimizers)
