"""The tiny blend: the same bytes from a seed, through fill and split, no validation question in training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.files import sha256_of
from tools.tiny.make_blend import RLVR, make_blend
from tools.tiny.prepare import main, only_one, prepare_data, prompts_of
from tools.tiny.sft import SftSettings, conversations, data_hash

AGENTS = {f"{name}_simple_agent" for name in ("math_with_judge", "mcqa", "reasoning_gym", "structured_outputs")}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data(tmp_path_factory.mktemp("data"), seed=42)


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    hashes = [sha256_of(make_blend(tmp_path / str(n), num_rows=40, seed=seed)) for n, seed in enumerate((1, 1, 2))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_both_splits_have_all_agents_in_turn(data: Path) -> None:
    train, val = read(data / "train-split.jsonl"), read(data / "val-split.jsonl")
    assert (len(train), len(val)) == (RLVR.train_rows, RLVR.val_rows)
    for rows in (train, val):
        counts = Counter(row["agent_ref"]["name"] for row in rows)
        assert counts == dict.fromkeys(AGENTS, len(rows) // 4)
    assert {row["agent_ref"]["name"] for row in train[:4]} == AGENTS


def test_the_math_rows_are_placeholders_that_fill_restores(data: Path) -> None:
    hidden = [row for row in read(data / "raw" / "blend.jsonl") if "_hf_placeholder" in row]
    assert {row["agent_ref"]["name"] for row in hidden} == {"math_with_judge_simple_agent"}
    assert all("question" not in row and "expected_answer" not in row for row in hidden)
    assert {type(row["_hf_placeholder"]["question_template"]) for row in hidden} == {dict, str}
    for row in read(data / "train-split.jsonl") + read(data / "val-split.jsonl"):
        assert "_hf_placeholder" not in row
        if row["agent_ref"]["name"] == "math_with_judge_simple_agent":
            prompt = row["responses_create_params"]["input"][0]["content"]
            terms = prompt.removeprefix("Compute ").split(".")[0]
            assert row["expected_answer"] == str(sum(map(int, terms.split("+"))))
            assert prompt.endswith("Answer in \\boxed{}")


def test_no_question_is_there_twice(data: Path) -> None:
    prompts = [
        row["responses_create_params"]["input"][0]["content"]
        for name in ("train", "val")
        for row in read(data / f"{name}-split.jsonl")
    ]
    assert len(set(prompts)) == RLVR.train_rows + RLVR.val_rows


def test_no_validation_question_is_in_the_warm_up(data: Path) -> None:
    held_out = prompts_of(data / "val-split.jsonl")
    assert len(held_out) == RLVR.val_rows
    seen = {talk.prompt for batch in conversations(SftSettings(seed=42, steps=60), held_out) for talk in batch}
    assert not seen & held_out
    assert data_hash(SftSettings(seed=42, steps=2), held_out) == data_hash(SftSettings(seed=42, steps=2), held_out)
    assert data_hash(SftSettings(seed=42, steps=2), held_out) != data_hash(SftSettings(seed=43, steps=2), held_out)


def test_a_rerun_changes_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()}
    assert main(["--data", str(data.parent)]) == 0
    assert capsys.readouterr().out.count("up to date") == 3
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()} == before


def test_a_second_preparation_at_the_same_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / ".prepare.lock"):
        assert (tmp_path / ".prepare.lock").stat().st_mode & 0o777 == 0o600, "whoever can open it can lock it"
        assert main(["--data", str(tmp_path)]) == 2
    assert "another process holds this lock and is at work here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
