"""Low-rank adapters: what they learn is what the weights would, in every layout, and what is saved of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_case import (
    exported,
    load_case,
    local_ray,
    policy_logprobs,
    running,
    save_experts,
    save_hybrid,
    save_model,
    showing_gradients,
)
from random_batch import random_batch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from recipes.cluster.token_store import RayTokenStore
from recipes.config.fits import PER_PARAMETER, form_problems, optimizer_keys, weights_identity
from recipes.errors import CheckpointError
from recipes.policy.export import export_checkpoint
from tools import export_hf
from tools.sizing.architecture import read_architecture
from tools.sizing.memory import _adapter_parameters

pytestmark = pytest.mark.functional

_LORA = {"megatron_cfg__peft__enabled": "true", "megatron_cfg__peft__dim": 4, "megatron_cfg__peft__alpha": 8}
_ALL = "[linear_qkv,linear_proj,in_proj,out_proj,linear_fc1,linear_fc2]"
_EXPERTS_TOO = _LORA | {
    "megatron_cfg__peft__exclude_modules": "[]",
    "megatron_cfg__peft__target_modules": _ALL,
}
_TENSOR = {"megatron_cfg__tensor_model_parallel_size": 2}
_SEQUENCE = _TENSOR | {"megatron_cfg__sequence_parallel": "true"}
_STAGES = {"megatron_cfg__pipeline_model_parallel_size": 2}
_EXPERT = {"megatron_cfg__expert_model_parallel_size": 2}
_RECOMPUTED = {"megatron_cfg__activation_checkpointing": "true"}
_ANY_LAYOUT = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}
_MODELS = {"dense": save_model, "experts": save_experts, "hybrid": save_hybrid}
_SCALE = 2.0  # alpha / dim


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: save(directory / name) for name, save in _MODELS.items()}


_trained: dict[str, tuple[dict[str, float], dict[str, Tensor]]] = {}


def _train(model: Path, directory: Path, *, num_ranks: int = 1, **overrides: Any) -> Any:
    """Return the metrics of a second step and the weights after it; between the two the policy is saved and loaded."""
    batches = [random_batch(8, RayTokenStore(), seed=seed) for seed in (1, 2)]
    with running(load_case(model, **{**_LORA, **overrides}), num_ranks=num_ranks) as policy:
        policy.train(batches[0])
        policy.save(directory / "checkpoint")
        policy.load(directory / "checkpoint")
        return policy.train(batches[1]), exported(policy, directory / "export")


def _adapters(export: Path) -> dict[str, Tensor]:
    return load_file(export / "adapter" / "adapter_model.safetensors")


def test_a_first_step_is_that_of_the_weights_seen_through_a(models: dict[str, Path], tmp_path: Path) -> None:
    """Of dL/dB = scale * dL/dW A^T follows what the merged weight moves by: scale^2 * dL/dW A^T A."""
    batch = random_batch(10, RayTokenStore())
    with running(showing_gradients(load_case(models["dense"]))) as policy:
        before, whole = exported(policy, tmp_path / "before"), policy_logprobs(policy, batch)
        policy.train(batch)
        gradients = {name: before[name] - one for name, one in exported(policy, tmp_path / "after").items()}
    with running(showing_gradients(load_case(models["dense"], **_LORA))) as policy:
        assert torch.equal(policy_logprobs(policy, batch), whole), "adapters begin with the model itself"
        start = exported(policy, tmp_path / "start")
        policy.train(batch)
        moved = {name: start[name] - one for name, one in exported(policy, tmp_path / "moved").items()}
    adapters, seen = _adapters(tmp_path / "start"), set()
    for name, gradient in gradients.items():
        of_A = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        if of_A not in adapters:
            assert torch.equal(moved[name], torch.zeros_like(gradient)), f"{name} has no adapter and has moved"
            continue
        expected = _SCALE**2 * gradient @ adapters[of_A].T @ adapters[of_A]
        assert torch.allclose(moved[name], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()), name
        seen.add(name.split(".")[-2])
    assert seen == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", _SEQUENCE | _RECOMPUTED),
        pytest.param("dense", _STAGES, marks=pytest.mark.slow),
        pytest.param("experts", _EXPERTS_TOO | _SEQUENCE, marks=pytest.mark.slow),
        ("hybrid", _EXPERTS_TOO | _SEQUENCE | _EXPERT),
        ("hybrid", _EXPERTS_TOO | _STAGES | _RECOMPUTED),
    ],
    ids=["sequence", "stages", "experts-sequence", "hybrid-sequence", "hybrid-stages"],
)
def test_two_ranks_learn_what_one_does(
    models: dict[str, Path], tmp_path: Path, name: str, layout: dict[str, Any]
) -> None:
    of_one = {key: value for key, value in layout.items() if "peft" in key}
    key = name + json.dumps(of_one)
    if key not in _trained:
        _trained[key] = _train(models[name], tmp_path / "one", **of_one)
    metrics, weights = _trained[key]
    got, found = _train(models[name], tmp_path / "two", num_ranks=2, **layout)
    assert got["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)
    assert got["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    start = load_file(models[name] / "model.safetensors")
    moved = [key for key in start if not torch.equal(start[key], weights[key])]
    assert len(moved) > 5
    for key in moved:
        size = (weights[key] - start[key]).abs().max()
        assert (found[key] - weights[key]).abs().max() < 2e-3 * size, key


def test_a_pipeline_stage_without_adapters_is_saved_loaded_and_exported(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Attention is on the first stage alone."""
    of_attention = {"megatron_cfg__peft__target_modules": "[linear_qkv,linear_proj]"}
    _, weights = _train(models["hybrid"], tmp_path, num_ranks=2, **_STAGES, **of_attention, **_ANY_LAYOUT)
    start = load_file(models["hybrid"] / "model.safetensors")
    moved = {
        name.split(".")[2] for name in start if name.endswith("proj.weight") and not start[name].equal(weights[name])
    }
    assert moved == {"1"}


def test_the_doctor_finds_nothing_to_refuse_in_what_was_saved(models: dict[str, Path]) -> None:
    policy = load_case(models["hybrid"], **_EXPERTS_TOO).policy
    saved = {"form": PER_PARAMETER, "layout": {}, "optimizer_keys": optimizer_keys(policy, has_experts=True)}
    saved |= {"base": weights_identity(models["hybrid"])}
    found = json.loads(json.dumps(saved))
    assert form_problems(policy, found, Path("step"), models["hybrid"], has_experts=True) == []
    ranked = load_case(models["hybrid"], **{**_EXPERTS_TOO, "megatron_cfg__peft__dim": 2}).policy
    (problem,) = form_problems(ranked, found, Path("step"), models["hybrid"], has_experts=True)
    assert str(problem).startswith("policy.megatron_cfg.peft.dim: got 2, expected 4, as when step was saved")
    (problem,) = form_problems(policy, found, Path("step"), models["dense"], has_experts=True)
    assert "other weights" in str(problem)


def test_an_export_by_command_has_the_adapters_of_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    config = load_case(models["dense"], **_EXPERTS_TOO)
    (tmp_path / "resolved.json").write_text(json.dumps({"config": {"policy": asdict(config.policy)}}), encoding="utf-8")
    policy = export_hf._policy(tmp_path / "checkpoints" / "step_000001", models["dense"], models["dense"])
    assert policy.megatron_cfg.peft == config.policy.megatron_cfg.peft


def test_a_checkpoint_has_the_adapters_alone_and_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    first, second = (random_batch(8, RayTokenStore(), seed=seed) for seed in (1, 2))
    model = models["hybrid"]
    with running(load_case(model, **_LORA, **_SEQUENCE, **_ANY_LAYOUT), num_ranks=2) as policy:
        policy.train(first)
        policy.save(tmp_path / "checkpoint")
        saved = exported(policy, tmp_path / "saved")
        metrics = policy.train(second)
        expected = exported(policy, tmp_path / "expected")
    adapters = _adapters(tmp_path / "saved")
    shared = ("k_proj.lora_A.weight", "v_proj.lora_A.weight")  # with that of q_proj
    planned = _adapter_parameters(read_architecture(model), load_case(model, **_LORA).policy.megatron_cfg)
    assert planned == (sum(one.numel() for name, one in adapters.items() if not name.endswith(shared)), 0.0)
    stored = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    of_model = {key for key, one in stored.items() if hasattr(one, "size") and ".lora_" not in key}
    assert of_model == {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (2, 5)}, "no weight of the model"
    config = load_case(model, **_LORA)
    with running(config) as policy:
        policy.load(tmp_path / "checkpoint")
        loaded = exported(policy, tmp_path / "loaded")
        assert policy.train(second) == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        found = exported(policy, tmp_path / "found")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert all(torch.allclose(found[name], tensor, atol=1e-5) for name, tensor in expected.items())
    for name, tensor in adapters.items():
        assert torch.equal(_adapters(tmp_path / "loaded")[name], tensor)
        if ".lora_B." in name:
            key = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight") + ".weight"
            start = load_file(model / "model.safetensors")[key]
            added = _SCALE * tensor @ adapters[name.replace("lora_B", "lora_A")]
            assert torch.allclose(saved[key], start + added, atol=1e-6), key
    described = json.loads((tmp_path / "saved/adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert described["r"] == 4 and described["lora_alpha"] == 8
    assert described["target_modules"] == ["down_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]

    export_checkpoint(tmp_path / "checkpoint", tmp_path / "alone", config.policy)
    alone = load_file(tmp_path / "alone/model.safetensors")
    assert alone.keys() == saved.keys() and all(torch.equal(alone[name], saved[name]) for name in saved)
    assert all(torch.equal(_adapters(tmp_path / "alone")[name], one) for name, one in adapters.items())

    other = save_hybrid(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other weights than those beside which the adapters of .* were trained"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "wrong", load_case(other, **_LORA).policy)

    with (
        running(load_case(model)) as policy,
        pytest.raises(CheckpointError, match=r"peft.enabled: got false, expected true, as when .*: it holds adapters"),
    ):
        policy.load(tmp_path / "checkpoint")
