"""What the tiny scale needs is made only where it can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.config.load import load_config
from tools.draft.launch import chosen_stages
from tools.tiny import from_gguf
from tools.tiny.prepare import blends_of, main

OVERLAY = Path(__file__).resolve().parents[4] / "configs" / "tiny" / "smollm2.yaml"


def test_a_machine_without_containers_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data, models = tmp_path / "data", tmp_path / "models"
    assert main(["--data", str(data), "--models", str(models), "--stages", "stage1.1 stage2.2"]) == 2
    assert "no program on this machine can run them" in capsys.readouterr().err
    assert not data.exists() and not models.exists()


def test_a_real_model_has_rows_of_its_own_that_no_row_of_validation_is_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(from_gguf, "main", lambda words: made.append(words) or 0)
    data, models = tmp_path / "data", tmp_path / "models"
    assert main(["--data", str(data), "--models", str(models), "--model", "smollm2"]) == 0
    assert made == [["--out", str(models / "smollm2")]]
    rows = [
        [json.loads(line) for line in (data / "english" / f"{split}-split.jsonl").read_text("utf-8").splitlines()]
        for split in ("train", "val")
    ]
    train, held_out = ({row["responses_create_params"]["input"][-1]["content"] for row in part} for part in rows)
    assert len(train) == 960 and len(held_out) == 60 and not train & held_out
    loaded = load_config(OVERLAY, [f"policy.model_name={models}"])
    assert loaded.repaired is not None
    agents = {row["agent_ref"]["name"] for part in rows for row in part}
    assert agents <= set(loaded.repaired.env.nemo_gym.instances), "the overlay has the environments of the rows"


def test_a_real_model_takes_no_other_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "data"), "--model", "smollm2", "--blend", "wide"]) == 2
    assert "--blend: smollm2 has rows of its own" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("names", "is_wide", "blends"),
    [
        ("", False, ["wide", "tiny"]),  # six stages, and the seventh, whose model has heads
        ("stage1.1 stage1.2", False, ["tiny"]),
        ("stage1.1 stage1.2", True, ["wide"]),
        ("stage1.1 stage2.1 mopd", False, ["wide", "teachers"]),
        ("nano-rl nano-dpo", False, ["tools"]),
    ],
)
def test_a_chain_has_what_its_stages_need_and_no_more(names: str, is_wide: bool, blends: list[str]) -> None:
    assert blends_of(chosen_stages(names.split()), is_wide=is_wide) == blends
