"""Hugging Face directories: several weight files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.errors import CheckpointError, ConfigError, PolicyError
from recipes.policy import hf


def test_weights_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 40)
    tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("abcde")}  # 16 bytes each
    hf.write_weights(_shapes(tensors), iter(tensors.items()), tmp_path)

    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 80
    assert index["weight_map"]["c"] == files[1]
    reader = hf.WeightReader(tmp_path)
    assert all(torch.equal(reader(name), tensor) for name, tensor in tensors.items())


def test_tensors_of_two_types_are_read_back_by_safetensors(tmp_path: Path) -> None:
    """A tensor of an odd number of 16-bit values comes before one of 32 bits."""
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2, 2), "c": torch.randn(5, 2).bfloat16().t()}
    hf.write_weights(_shapes(tensors), iter(tensors.items()), tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == tensor.dtype and torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("sent", [[], [("b", torch.zeros(2))], [("a", torch.zeros(3))]], ids=["none", "name", "shape"])
def test_a_stream_of_other_tensors_is_refused(tmp_path: Path, sent: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(PolicyError, match="where a was announced"):
        hf.write_weights([("a", torch.float32, (2,))], iter(sent), tmp_path)


def _shapes(tensors: dict[str, torch.Tensor]) -> list[hf.TensorShape]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(1), "model.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    reader = hf.WeightReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        reader("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"no place for 1 tensors, for example model\.extra"):
        reader.check_all_used({"lm_head.weight"})


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no \*\.safetensors file"):
        hf.WeightReader(tmp_path)


def test_what_the_policy_cannot_build_is_refused_with_all_reasons(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "hidden_act": "relu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        hf.read_config(tmp_path)
    assert [problem.where.split(": ")[1] for problem in refused.value.problems] == ["attention_bias", "hidden_act"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OtherModel"]}))
    known = "NemotronHForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    with pytest.raises(ConfigError, match=f"architectures: got OtherModel, expected one of {known}"):
        hf.read_config(tmp_path)


def test_the_tokenizer_replaces_files_of_the_model_but_not_its_configuration(tmp_path: Path) -> None:
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    for directory, text in ((model, "model"), (tokenizer, "tokenizer")):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"from": text, "dtype": "bfloat16"}))
        (directory / "tokenizer.json").write_text(text)
    (model / "model.safetensors.index.json").write_text("{}")
    hf.copy_side_files(model, tokenizer, target, dtype=torch.float32)
    assert json.loads((target / "config.json").read_text()) == {"from": "model", "dtype": "float32"}
    assert (target / "tokenizer.json").read_text() == "tokenizer"
    assert not (target / "model.safetensors.index.json").exists()
