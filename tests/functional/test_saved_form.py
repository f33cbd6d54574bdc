"""A saved optimizer that this trainer cannot read is refused by the key that was changed, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_experts

from recipes.config.fits import FORM_FILE, PER_PARAMETER
from recipes.errors import CheckpointError
from recipes.files import read_object
from recipes.policy import checkpoint, optimizer, saving, step
from tests import fused_adam, grouped_linear

pytestmark = pytest.mark.functional

_REDUCTION = "megatron_cfg__distributed_data_parallel_config__"
_PLAIN = {"megatron_cfg__optimizer__use_distributed_optimizer": "false", f"{_REDUCTION}overlap_param_gather": "false"}
_SGD = {"megatron_cfg__optimizer__optimizer": "sgd"}
_BUCKETS = {f"{_REDUCTION}overlap_grad_reduce": "true"}
_GRADIENTS = {f"{_REDUCTION}grad_reduce_in_fp32": "true"}
_ANY_LAYOUT = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}
_GROUPED = {"megatron_cfg__moe_grouped_gemm": "true"}
_FROZEN = {"megatron_cfg__freeze_moe_router": "true"}
_BFLOAT16 = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}
_FUSED = _BFLOAT16 | {"megatron_cfg__optimizer__use_precision_aware_optimizer": "true"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("experts") / "model")


def save(model: Path, path: Path, **overrides: Any) -> Path:
    config = load_case(model, **overrides)
    path.mkdir()
    with one_rank(config):
        checkpoint.save(trainer_of(config), path)
    return path


@pytest.mark.parametrize("precision", [{}, _BFLOAT16], ids=["float32", "bfloat16"])
def test_what_a_save_is_expected_to_write_is_what_it_writes(
    model: Path, tmp_path: Path, precision: dict[str, Any]
) -> None:
    config = load_case(model, **precision)
    with one_rank(config):
        trainer = trainer_of(config)
        for with_optimizer in (True, False):
            path = tmp_path / str(with_optimizer)
            path.mkdir()
            checkpoint.save(trainer, path, with_optimizer=with_optimizer)
            written = sum(file.stat().st_size for file in path.glob("*.distcp"))
            assert 0.5 < saving.saved_bytes(trainer, with_optimizer=with_optimizer) / written < 1.5


def load(model: Path, path: Path, **overrides: Any) -> None:
    config = load_case(model, **overrides)
    with one_rank(config):
        checkpoint.load(trainer_of(config), path)


def without_keys(path: Path) -> Path:
    """Make a checkpoint one of an older version of this recipe."""
    common = torch.load(path / "common.pt", weights_only=False)
    del common["saved"]["optimizer_keys"]
    torch.save(common, path / "common.pt")
    return path


def test_changed_keys_are_named_where_the_optimizer_lies_in_parts(model: Path, tmp_path: Path) -> None:
    path = save(model, tmp_path / "saved")
    for changes in (_PLAIN, _BUCKETS, _GRADIENTS, _FROZEN, _BFLOAT16):
        with pytest.raises(CheckpointError) as refusal:
            load(model, path, **changes)
        key = "policy." + next(iter(changes)).replace("__", ".")
        assert [problem.where for problem in refusal.value.problems] == [key]
    load(model, path)


def test_parts_in_the_order_of_other_experts_are_refused_and_single_parameters_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of an older checkpoint have the order of experts that are computed one after another."""
    grouped_linear.stand_in(monkeypatch.setattr)
    path = save(model, tmp_path / "saved")
    for change in (lambda own: own, without_keys):
        with pytest.raises(CheckpointError, match=r"moe_grouped_gemm: got true, expected false, as when"):
            load(model, change(path), **_GROUPED)
    grouped = save(model, tmp_path / "grouped", **_GROUPED)
    with pytest.raises(CheckpointError, match=r"moe_grouped_gemm: got false, expected true, as when"):
        load(model, grouped)
    load(model, save(model, tmp_path / "each", megatron_cfg__dist_ckpt_optim_fully_reshardable="true"), **_GROUPED)


@pytest.mark.parametrize("precision", [{}, _BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", [_PLAIN, _ANY_LAYOUT], ids=["plain", "distributed"])
def test_a_step_after_a_resumption_with_other_experts_is_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict[str, str], precision: dict[str, str]
) -> None:
    grouped_linear.stand_in(monkeypatch.setattr)
    tmp_path.joinpath("saved").mkdir()
    found: list[dict[str, torch.Tensor]] = []
    for experts in ({}, {}, _GROUPED):
        config = load_case(model, **form, **precision, **experts)
        with one_rank(config):
            trainer = trainer_of(config)
            if not found:
                step.train_step(trainer, shard_of(1))
                checkpoint.save(trainer, tmp_path / "saved")
            else:
                checkpoint.load(trainer, tmp_path / "saved")
                step.train_step(trainer, shard_of(2))
            found.append({name: tensor.clone() for name, tensor in trainer.export()})
    before, plain, other = found
    moved = {name for name in plain if not torch.equal(before[name], plain[name])}
    assert {name.split(".")[-2] for name in moved if ".experts." in name} == {"gate_proj", "up_proj", "down_proj"}
    for name in moved:
        assert torch.allclose(other[name], plain[name], rtol=2e-2 if precision else 1e-4, atol=1e-5), name


def test_the_state_of_one_optimizer_is_not_read_by_another(model: Path, tmp_path: Path) -> None:
    path = save(model, tmp_path / "saved", **_PLAIN)
    with pytest.raises(CheckpointError, match=r"optimizer\.optimizer: got sgd, expected adam, as when"):
        load(model, path, **_PLAIN, **_SGD)


def test_an_optimizer_per_parameter_is_read_with_other_buckets(model: Path, tmp_path: Path) -> None:
    path = save(model, tmp_path / "saved", megatron_cfg__dist_ckpt_optim_fully_reshardable="true")
    load(model, path, **_BUCKETS, **_GRADIENTS)
    for changes in (_PLAIN, _FROZEN):
        with pytest.raises(CheckpointError, match="or start a new run from the export of that step"):
            load(model, path, **changes)


def test_a_checkpoint_of_an_older_version_is_read_unless_it_holds_half_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, without_keys(save(model, tmp_path / "older")))
    fused_adam.install(monkeypatch)
    config_of = optimizer.OptimizerConfig
    with monkeypatch.context() as before:
        before.setattr(optimizer, "OptimizerConfig", lambda **own: config_of(**own | {"store_param_remainders": True}))
        halves = without_keys(save(model, tmp_path / "halves", **_FUSED))
    with pytest.raises(CheckpointError, match="its optimizer holds half of each weight"):
        load(model, halves, **_FUSED)


def test_what_decides_whether_it_can_be_read_is_in_a_file_without_tensors(model: Path, tmp_path: Path) -> None:
    path = save(model, tmp_path / "saved", **_ANY_LAYOUT)
    saved = torch.load(path / "common.pt", weights_only=False)["saved"]
    del saved["rng"]
    assert read_object(path / FORM_FILE) == saved and saved["form"] == PER_PARAMETER
