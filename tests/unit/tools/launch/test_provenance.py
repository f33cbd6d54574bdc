"""run.lock.json: hashes that change with what they stand for, and the differences between two starts by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tools.launch import provenance
from tools.launch.provenance import LaunchRecord, differences, model_digest, write_run_lock


@pytest.fixture
def record(tmp_path: Path) -> LaunchRecord:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "manifest.json").write_text("{}")
    return LaunchRecord(
        root=tmp_path,
        stage="stage1.1",
        config_path=Path("stage.yaml"),
        config={"grpo": {"seed": 42}, "x": 1},
        data_paths=[tmp_path / "train.jsonl"],
        model_path=model,
    )


def test_lock_holds_the_hashes(record, tmp_path):
    assert write_run_lock(tmp_path / "run", record) == []
    lock = json.loads((tmp_path / "run" / "run.lock.json").read_text())
    assert lock["seed"] == 42
    assert lock["stage"] == "stage1.1"
    assert lock["data"]["train.jsonl"]["sha256"] == hashlib.sha256(b"{}\n").hexdigest()
    assert lock["data"]["train.jsonl"]["manifest_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert lock["packages"]["ray"] == "2.60.0"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock.json"]


def test_every_difference_to_the_last_start_is_named(record, tmp_path):
    write_run_lock(tmp_path / "run", record)
    (record.model_path / "model.safetensors").write_bytes(b"Weights")
    (tmp_path / "train.jsonl").write_text("{} \n")
    changed = write_run_lock(tmp_path / "run", record)
    assert [line.split(":")[0] for line in changed] == ["data.train.jsonl.sha256", "model.weights_sha256"]
    assert write_run_lock(tmp_path / "run", record) == []


def test_differences_name_what_came_and_went():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 3}}) == [
        "b.c: was 2, is absent",
        "b.d: was absent, is 3",
    ]
    assert differences({"started": 1}, {"started": 2}) == []


def test_large_weights_are_hashed_by_their_ends(record, monkeypatch):
    whole = model_digest(record.model_path)
    monkeypatch.setattr(provenance, "_FULL_HASH_BYTES", 1)
    monkeypatch.setattr(provenance, "_END_BYTES", 2)
    ends = model_digest(record.model_path)
    assert (whole["weights_hash_of"], ends["weights_hash_of"]) == ("everything", "ends")
    (record.model_path / "model.safetensors").write_bytes(b"weXghts")  # same ends, same size
    assert model_digest(record.model_path) == ends
    (record.model_path / "model.safetensors").write_bytes(b"weighXs")
    assert model_digest(record.model_path) != ends
