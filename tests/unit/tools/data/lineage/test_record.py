"""Versions, references and lineage of the artifact store, on disk and in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.errors import DataError
from recipes.files import sha256_of
from tools.data.curriculum import write as make_curriculum
from tools.data.files.manifest import write_manifest
from tools.data.lineage.record import Store, draft, main, model_name, source_datasets
from tools.data.split import split
from tools.draft.provenance import model_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_versions_count_up_and_repeats_add_none(tmp_path: Path, kind: str) -> None:
    store = Store(str(tmp_path / "store") if kind == "directory" else f"memory://{tmp_path.name}")
    assert store.names() == []
    first = draft("super3/rl/rlvr1/data?sample=9", kind="x", path=tmp_path, metadata={"rows": 1})
    assert store.add(first).reference == "super3-rl-rlvr1-data:v1"
    assert store.add(first).version == 1
    second = store.add(replace(first, metadata={"rows": 2}, inputs=[{"uri": "u"}]))
    assert (second.version, second.producer, second.inputs) == (2, "local", [{"uri": "u"}])
    assert store.find("super3/rl/rlvr1/data") == store.find("super3-rl-rlvr1-data:latest") == second
    assert store.find("super3-rl-rlvr1-data:v1").metadata == {"rows": 1}
    data = "super3-rl-rlvr1-data"
    for wrong, there in ((f"{data}:v3", "v1, v2"), (f"{data}:step_1", "v1, v2"), ("other", data)):
        with pytest.raises(DataError, match=f"known: {there}"):
            store.find(wrong)
    if kind == "directory":
        place = tmp_path / "store" / "super3-rl-rlvr1-data"
        assert (place / "latest").read_text(encoding="utf-8") == "v2"
        assert json.loads((place / "v2/metadata.json").read_text(encoding="utf-8")) == {"rows": 2}
        keys = ["name", "version", "type", "path", "created_at", "producer", "metadata", "inputs", "used_artifacts"]
        assert sorted(json.loads((place / "v2/manifest.json").read_text(encoding="utf-8"))) == sorted(keys)


def test_a_version_without_manifest_does_not_count(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    (tmp_path / "a/v1").mkdir(parents=True)
    (tmp_path / "a/v1/metadata.json").write_text("{}", encoding="utf-8")  # as a killed run leaves it
    assert store.names() == []
    assert store.add(draft("a", kind="x", path=tmp_path, metadata={})).version == 1


def make_data(place: Path) -> Path:
    """Split a file that a download and a fill made."""
    download = {
        "tool": "download",
        "parameters": {"dataset": "org/blends", "revision": COMMIT, "file": "rlvr1.jsonl"},
        "outputs": [{"file": "rlvr1.jsonl", "rows": 9, "bytes": 90}],
    }
    source = {"dataset": "org/math", "revision": COMMIT, "split": "train"}
    fill = {
        "tool": "fill",
        "parameters": {"sources": {"math": source}},
        "inputs": [{"file": "rlvr1.jsonl", "made_by": download}, {"file": "x.parquet", "source": "math"}],
    }
    place.mkdir(parents=True)
    (place / "filled.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(9)))
    write_manifest(place / "filled.jsonl.manifest.json", fill)
    split(place / "filled.jsonl", place / "rlvr1", val_rows=2)
    return place / "rlvr1"


def make_run(run_dir: Path, *, stage: str, data: Path, parent: Path) -> Path:
    """Make what a finished run leaves; returns its export."""
    export = run_dir / "checkpoints" / "step_000010" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}", encoding="utf-8")
    (export / "model.safetensors").write_bytes(run_dir.name.encode())
    (export.parent / "COMPLETE").write_text("{}", encoding="utf-8")
    digest = {"sha256": "1", "manifest_sha256": sha256_of(data / "manifest.json")}
    lock = {
        "stage": stage,
        "seed": 1,
        "git": {"commit": COMMIT, "diff_sha256": ""},
        "config": {"path": "c.yaml", "sha256": "0"},
        "data": {"train-split.jsonl": digest, "val-split.jsonl": digest},
        "model": {"path": str(parent), **model_digest(parent)},
    }
    (run_dir / "run.lock.json").write_text(json.dumps(lock), encoding="utf-8")
    return export


def test_a_checkpoint_leads_back_to_commits_of_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "config.json").write_text("{}", encoding="utf-8")
    (sft / "model.safetensors").write_bytes(b"sft")
    first = make_run(tmp_path / "one", stage="stage1.1", data=data, parent=sft)
    make_run(tmp_path / "two", stage="stage2.1", data=data, parent=first)
    root = ["--root", str(tmp_path / "store")]
    assert main(["--data", str(data), *root]) == 0
    assert main(["--run-dir", str(tmp_path / "one"), *root]) == 0
    capsys.readouterr()
    assert main(["--run-dir", str(tmp_path / "two"), *root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        "super3-rl-swe1-model:v1  step 10",
        "  super3-rl-rlvr-model:v1  step 10",
        "    super3-rl-rlvr1-data:v1  7 + 2 rows",
        f"      hf://datasets/org/blends@{COMMIT}/rlvr1.jsonl",
        f"      hf://datasets/org/math@{COMMIT}",
        f"    file:{sft}",
        "  super3-rl-rlvr1-data:v1  7 + 2 rows",
        f"    hf://datasets/org/blends@{COMMIT}/rlvr1.jsonl",
        f"    hf://datasets/org/math@{COMMIT}",
    ]
    assert main(["super3-rl-swe1-model", *root]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["super3-rl-swe2-model", *root]) == 2
    assert main(["--run-dir", str(tmp_path / "nowhere"), *root]) == 2


def test_unrecorded_data_are_named_by_their_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    export = make_run(tmp_path / "zero", stage="", data=data, parent=_weights(tmp_path / "w"))
    make_run(tmp_path / "one", stage="stage3", data=data, parent=export)
    capsys.readouterr()
    assert main(["--run-dir", str(tmp_path / "one"), "--root", str(tmp_path / "s")]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        f"file:{export}",
        "file:train-split.jsonl",
        "file:val-split.jsonl",
    ]


def test_rows_may_have_no_validation_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    row = {"agent_ref": {"name": "a"}, "responses_create_params": {"input": "q"}, "pass_rate": 0.5}
    (data / "train-split.jsonl").write_text(4 * f"{json.dumps(row)}\n", encoding="utf-8")
    (data / "val-split.jsonl").unlink()
    ordered = ["--in", str(data / "train-split.jsonl"), "--out", str(tmp_path / "rlvr1-ordered/train-split.jsonl")]
    assert make_curriculum.main(ordered) == 0
    capsys.readouterr()
    assert main(["--data", str(tmp_path / "rlvr1-ordered"), "--root", str(tmp_path / "s")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("super3-rl-rlvr1-ordered-data:v1  4 + 0 rows")
    assert lines[1].strip() == f"hf://datasets/org/blends@{COMMIT}/rlvr1.jsonl"
    write_manifest(tmp_path / "other/manifest.json", {"tool": "other"})
    assert main(["--data", str(tmp_path / "other"), "--root", str(tmp_path / "s")]) == 2
    assert "other/manifest.json: it describes no train-split.jsonl" in capsys.readouterr().err


def _weights(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    (path / "model.safetensors").write_bytes(b"w")
    return path


def test_wandb_is_asked_for_by_its_project_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(tmp_path / "data")
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    assert main(["--data", str(data), "--root", str(tmp_path / "s")]) == 2
    assert "WANDB_PROJECT: it is set, but the package wandb is not installed" in capsys.readouterr().err
    monkeypatch.delenv("WANDB_PROJECT")
    assert main(["--data", str(data), "--root", str(tmp_path / "s")]) == 0


def test_what_is_logged_to_wandb_says_which_version_it_is(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: nothing tests what is logged there")
    data = make_data(tmp_path / "data")
    make_run(tmp_path / "one", stage="stage1.1", data=data, parent=_weights(tmp_path / "w"))
    assert main(["--data", str(data), "--root", str(tmp_path / "s")]) == 0  # before W&B was asked for
    here = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("DATA", "CACHE", "CONFIG")}
    command = [sys.executable, "-m", "tools.data.lineage.record", "--run-dir", str(tmp_path / "one")]
    result = subprocess.run(
        [*command, "--root", str(tmp_path / "s")],
        cwd=Path(__file__).resolve().parents[5],
        env={**os.environ, **here, "WANDB_DIR": str(tmp_path), "WANDB_PROJECT": "p", "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result
    assert "super3-rl-rlvr-model:v1 is logged without links to super3-rl-rlvr1-data:v1;" in result.stdout
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    export = tmp_path / "one/checkpoints/step_000010/hf"
    for text in ("super3-rl-rlvr-model", "store-v1", "step_000010", export.as_uri(), "manifest.json"):
        assert text.encode() in run.read_bytes()


def test_without_a_login_wandb_is_named_and_the_store_is_written(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: nothing tests what is logged there")
    data = make_data(tmp_path / "data")
    environ = {**os.environ, "WANDB_PROJECT": "p", "WANDB_API_KEY": "wrong", "WANDB_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tools.data.lineage.record", "--data", str(data), "--root", str(tmp_path / "s")],
        cwd=Path(__file__).resolve().parents[5],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert "WANDB_PROJECT: W&B failed (" in result.stderr
    assert "wandb login" in result.stderr
    assert Store(str(tmp_path / "s")).find("super3-rl-rlvr1-data").version == 1


def test_names_and_local_sources() -> None:
    assert [model_name(stage) for stage in ("stage1.3", "stage2.2", "stage3", "")] == ["rlvr", "swe2", "rlhf", "custom"]
    manifest = {"tool": "split", "inputs": [{"file": "a.jsonl", "sha256": "5"}]}
    assert list(source_datasets(manifest)) == [{"uri": "file:a.jsonl", "name": "a.jsonl", "sha256": "5"}]
