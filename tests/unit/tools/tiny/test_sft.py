"""The warm-up, with a few steps: the same weights from a seed, a checkpoint that loads, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.files import sha256_of
from tools.tiny.model import build_model
from tools.tiny.sft import SftSettings, make_sft_checkpoint
from tools.tiny.tokenizer import build_tokenizer

FEW = SftSettings(seed=1, steps=3, batch=(1, 1, 1, 1))


def test_the_model_has_about_a_million_parameters_in_shapes_that_the_engine_takes() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6
    assert model.config.head_dim % 32 == 0
    assert len(tokenizer) <= model.config.vocab_size <= 512
    assert model.config.vocab_size % 2 == 0


def test_a_checkpoint_is_made_once_and_again_when_the_recipe_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "tiny-sft"
    make_sft_checkpoint(directory, FEW, frozenset())
    first = sha256_of(directory / "model.safetensors")
    make_sft_checkpoint(directory, FEW, frozenset())
    assert "up to date" in capsys.readouterr().out
    make_sft_checkpoint(tmp_path / "twin", FEW, frozenset())
    assert sha256_of(tmp_path / "twin" / "model.safetensors") == first
    make_sft_checkpoint(directory, SftSettings(seed=2, steps=3, batch=(1, 1, 1, 1)), frozenset())
    assert "seed changed" in capsys.readouterr().out
    assert sha256_of(directory / "model.safetensors") != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-sft", "twin"]


def test_the_checkpoint_loads_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_sft_checkpoint(tmp_path / "model", FEW, frozenset())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.chat_template
    metadata = json.loads((tmp_path / "model" / "tiny_sft.json").read_text())
    assert metadata["recipe"]["seed"] == 1
    assert len(metadata["recipe"]["data_sha256"]) == 64
