"""run.lock.json: hashes that change with what they stand for, and the differences between two starts by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools.planning import provenance
from tools.planning.provenance import (
    LaunchRecord,
    data_names,
    differences,
    model_digest,
    record_start_weights,
    recorded_name,
    write_run_lock,
)
from tools.planning.snapshot import CodeVersion


@pytest.fixture
def record(tmp_path: Path) -> LaunchRecord:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "manifest.json").write_text("{}")
    return LaunchRecord(
        code=CodeVersion(commit="c" * 40, diff=""),
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


def test_another_configuration_is_named_by_its_keys(record, tmp_path):
    write_run_lock(tmp_path / "run", record)
    hidden = {"judge": {"api_key": "(hidden)"}}
    resolved = tmp_path / "run" / "resolved.json"  # as the driver of that start has written it
    resolved.write_text(json.dumps({"config": {**record.config, **hidden}}))
    other = replace(record, config={"grpo": {"seed": 42}, "x": (1, 2), "judge": {"api_key": "secret"}})
    assert write_run_lock(tmp_path / "run", other) == ["configuration: x: was 1, is [1, 2]"]
    resolved.write_text("[]")
    assert [line.partition(":")[0] for line in write_run_lock(tmp_path / "run", record)] == ["config.sha256"]


def test_another_image_is_a_difference(record, tmp_path):
    before, after = (f"sha256:{letter * 64}" for letter in "ab")
    write_run_lock(tmp_path / "run", replace(record, images={"CONTAINER": f"r.example/x@{before}"}))
    changed = write_run_lock(tmp_path / "run", replace(record, images={"CONTAINER": f"r.example/x@{after}"}))
    assert f"images.CONTAINER.digest: was {before}, is {after}" in changed


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


def test_weights_that_come_later_are_recorded_when_the_job_finds_them(record, tmp_path):
    run_dir = tmp_path / "run"
    pending = replace(record, model_path=tmp_path / "parent" / "latest" / "hf", is_model_there=False)
    write_run_lock(run_dir, pending)
    lock = json.loads((run_dir / "run.lock.json").read_text())
    assert lock["model"] == {"path": str(tmp_path / "parent" / "latest" / "hf")}
    assert lock["git"] == {"commit": "c" * 40, "diff_sha256": ""}

    assert record_start_weights(run_dir, record.model_path) == []
    found = json.loads((run_dir / "run.lock.json").read_text())["model"]
    assert found == {"path": str(record.model_path), **model_digest(record.model_path)}
    assert write_run_lock(run_dir, pending) == []  # submitted again: what the last job found stays until the next
    assert json.loads((run_dir / "run.lock.json").read_text())["model"] == found

    (record.model_path / "model.safetensors").write_bytes(b"Weights")
    (line,) = record_start_weights(run_dir, record.model_path)
    assert line.startswith("model.weights_sha256: was ")


def test_two_data_files_of_one_name_are_both_recorded(record, tmp_path):
    paths = []
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "data.jsonl")
        paths[-1].write_text(name)
    write_run_lock(tmp_path / "run", replace(record, data_paths=paths))
    lock = json.loads((tmp_path / "run" / "run.lock.json").read_text())
    digests = {name: found["sha256"] for name, found in lock["data"].items()}
    assert digests == {f"{name}/data.jsonl": hashlib.sha256(name.encode()).hexdigest() for name in ("train", "val")}
    assert [recorded_name(path, paths, digests) for path in paths] == ["train/data.jsonl", "val/data.jsonl"]
    assert recorded_name(paths[1], paths[1:], digests) == "val/data.jsonl", "another start may have fewer files"
    assert recorded_name(paths[1], paths, {"data.jsonl"}) is None, "it could be the other one's"
    assert list(data_names([paths[0], paths[0]])) == ["data.jsonl"]
