"""The warm-up, with a few steps: the same weights from a seed, a checkpoint that loads, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.files import sha256_of
from tools.tiny import heads
from tools.tiny.model import build_model, build_tokenizer
from tools.tiny.sft import METADATA, SftSettings, make_sft_checkpoint

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
    metadata = json.loads((tmp_path / "model" / "tiny_sft.json").read_text(encoding="utf-8"))
    assert metadata["recipe"]["seed"] == 1
    assert len(metadata["recipe"]["data_sha256"]) == 64


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the directories that were given heads: one file stands for them."""
    given: list[Path] = []

    def add(directory: Path) -> Path:
        given.append(directory)
        (directory / "heads").write_text(str(len(given)), encoding="utf-8")
        return directory

    monkeypatch.setattr(heads, "add_heads", add)
    return given


def write_sft(directory: Path, **recipe: object) -> None:
    """Write a checkpoint without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / METADATA).write_text(json.dumps({"recipe": recipe, "final_loss": 0.5}), encoding="utf-8")


def test_heads_are_made_once_and_again_when_the_checkpoint_or_their_code_changes(
    tmp_path: Path, adds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, sft, code = tmp_path / "models" / "heads", tmp_path / "models" / "sft", tmp_path / "heads.py"
    code.write_text("one", encoding="utf-8")
    monkeypatch.setattr(heads, "__file__", str(code))
    changes = (
        lambda: None,
        lambda: write_sft(sft, seed=2),
        lambda: code.write_text("two", encoding="utf-8"),  # another shape, scale or seed
        lambda: (made / METADATA).unlink(),
        lambda: write_sft(made, seed=2),  # as of a version that did not record its code
        lambda: write_sft(sft, seed=2, steps=3),  # a setting more
        lambda: write_sft(sft, steps=3),  # and one less
    )
    write_sft(sft, seed=1)
    for times, change in enumerate(changes, start=1):
        change()
        for _ in range(2):
            heads.make_with_heads(made, sft)
            assert len(adds) == times
            assert (made / "heads").read_text("utf-8") == str(times)
            assert capsys.readouterr().out.endswith(("up to date\n", "multi-token heads\n"))
    assert {path.name for path in made.parent.iterdir()} == {"heads", "sft"}
    assert json.loads((sft / METADATA).read_text("utf-8"))["recipe"] == {"steps": 3}, "only the copy is written to"


def test_heads_stay_until_others_are_whole(tmp_path: Path, adds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, sft = tmp_path / "heads", tmp_path / "sft"
    write_sft(sft, seed=1)
    heads.make_with_heads(made, sft)
    write_sft(sft, seed=2)

    def fail(_directory: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(heads, "add_heads", fail)
        with pytest.raises(KeyboardInterrupt):
            heads.make_with_heads(made, sft)
    assert (made / "heads").read_text("utf-8") == "1"
    heads.make_with_heads(made, sft)
    assert (made / "heads").read_text("utf-8") == "2"
    assert {path.name for path in tmp_path.iterdir()} == {"heads", "sft"}
