"""The optimizer's state gives its memory back for the time of passes for log-probabilities, and is as before then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_experts

from recipes.config.tree import Config
from recipes.policy import checkpoint, step
from recipes.policy.offloading import state as offloading
from tests import fused_adam, two_devices

pytestmark = pytest.mark.functional

_PLAIN: dict[str, Any] = {
    "megatron_cfg__optimizer__use_distributed_optimizer": "false",
    "megatron_cfg__distributed_data_parallel_config__overlap_param_gather": "false",
}
_BFLOAT16: dict[str, Any] = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}
_FUSED = _BFLOAT16 | {"megatron_cfg__optimizer__use_precision_aware_optimizer": "true"}
_OFFLOADED = _BFLOAT16 | {
    "megatron_cfg__optimizer__optimizer_cpu_offload": "true",
    "megatron_cfg__optimizer__optimizer_offload_fraction": 0.5,
}
_KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": _BFLOAT16,
    "not-distributed": _BFLOAT16 | _PLAIN,
    "sgd": _BFLOAT16 | _PLAIN | {"megatron_cfg__optimizer__optimizer": "sgd"},
    "fused": _FUSED,
    "offloaded": _OFFLOADED,
}
# Per parameter, tensors of the state that are no weights of the model.
_TENSORS = {"float32": 2, "bfloat16": 3, "not-distributed": 3, "sgd": 2, "fused": 3, "offloaded": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A kind of optimizer, whose state lies on a device that is none."""
    monkeypatch.setattr(offloading, "_is_on_device", lambda tensor: True)
    if request.param == "fused":
        fused_adam.install(monkeypatch)
    if request.param == "offloaded":
        two_devices.install(monkeypatch)
    return str(request.param)


def config_of(model: Path, kind: str, *, is_aside: bool) -> Config:
    return load_case(model, **_KINDS[kind], offload_optimizer_for_logprob=str(is_aside).lower())


def moved(trainer: step.Trainer) -> list[torch.Tensor]:
    """Return the tensors of the state that have memory of their own, each once."""
    of_model = {param.untyped_storage().data_ptr() for param in trainer.model.parameters()}
    tensors = {id(tensor): tensor for tensor in offloading.state_tensors(trainer.optimizer)}
    return [tensor for tensor in tensors.values() if tensor.untyped_storage().data_ptr() not in of_model]


def sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


@pytest.mark.parametrize("kind", _KINDS, indirect=True)
def test_all_of_the_state_is_aside_and_comes_back(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plain = (config_of(model, kind, is_aside=is_aside) for is_aside in (True, False))
    seen: list[list[int]] = []
    run = step._run

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(sizes(tensors))
        return run(*args, **kwargs)

    def passes(trainer: step.Trainer) -> list[torch.Tensor]:
        with offloading.state_on_host(trainer):  # as around the passes of several parts
            return [*step.logprobs(trainer, shard_of(1)), *step.logprobs(trainer, shard_of(2))]

    with one_rank(config):
        trainer, never = trainer_of(config), trainer_of(plain)
        expected = [step.train_step(own, shard_of(0)) for own in (never, trainer)]
        tensors = moved(trainer)
        before, full = [tensor.clone() for tensor in tensors], sizes(tensors)
        count = sum(param.requires_grad for param in trainer.model.parameters())
        assert len(tensors) >= _TENSORS[kind] * count
        with monkeypatch.context() as patch:
            patch.setattr(step, "_run", watched)
            found = passes(trainer)
        assert all(torch.equal(*pair) for pair in zip(found, passes(never), strict=True))
        assert seen == [[0] * len(tensors)] * 2
        assert sizes(tensors) == full
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))

        path = tmp_path / "saved"
        path.mkdir()
        checkpoint.save(trainer, path)
        again = trainer_of(config)
        checkpoint.load(again, path)
        expected = [step.train_step(own, shard_of(3)) for own in (never, trainer, again)]
        assert expected[1:] == expected[:1] * 2


@pytest.mark.parametrize("kind", ["bfloat16"], indirect=True)
def test_the_state_comes_back_from_a_pass_that_fails(model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert sizes(tensors) == [0] * len(tensors)
        raise MemoryError

    config = config_of(model, kind, is_aside=True)
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_step(trainer, shard_of(0))
        tensors = moved(trainer)
        before = [tensor.clone() for tensor in tensors]
        monkeypatch.setattr(step, "_run", fail)
        with pytest.raises(MemoryError):
            step.logprobs(trainer, shard_of(1))
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_state_in_host_memory_stays_where_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model, "float32", is_aside=True)
    with one_rank(config):
        trainer = trainer_of(config)
        step.train_step(trainer, shard_of(0))
        places = [tensor.data_ptr() for tensor in moved(trainer)]
        with offloading.state_on_host(trainer):
            assert [tensor.data_ptr() for tensor in moved(trainer)] == places
