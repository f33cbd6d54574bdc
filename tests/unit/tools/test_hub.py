"""Which texts are names on the hub, and which files of a repository are fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import DataError
from tools import hub
from tools.data.files.fetch import model_files, row_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("text", ["lab/model", "lab/model@v1.0", f"lab/model@{COMMIT}", "lab/rows@main:a/b"])
def test_a_name_is_read_and_written_alike(text: str) -> None:
    assert str(hub.hub_name(text)) == text.replace("@main", "")


@pytest.mark.parametrize(
    "text", ["", "model", "/lab/model", "./lab/model", "lab/rows.jsonl", "a/b/c", "here/model", "models/none"]
)
def test_a_path_is_no_name(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.hub_name(text) is None
    assert "taken for a path" in hub.taken_for(text, "MODEL_PATH")[0]


def test_a_model_is_there_once_its_settings_are(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    name = hub.HubName(repository="lab/model")
    snapshot = tmp_path / "models--lab--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert hub.cached_model(name, environ) is None  # nobody has said which commit the branch is
    assert hub.model_path("lab/model", environ) == "lab/model"
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    assert hub.model_path("lab/model", environ) == str(snapshot)
    assert hub.cached_model(hub.HubName(repository="lab/model", revision=COMMIT), environ) == snapshot
    assert hub.origin_of(snapshot / "config.json") == f"lab/model@{COMMIT}"
    (snapshot / "config.json").unlink()
    assert hub.cached_model(name, environ) is None


def test_the_settings_of_a_model_come_last() -> None:
    names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.json", "vocab.txt"]
    assert model_files([*names, "consolidated.safetensors"]) == ["model.safetensors", "vocab.txt", "config.json"]


def test_the_rows_to_train_on_are_found_or_asked_for() -> None:
    name = hub.HubName(repository="lab/rows")
    shards = [f"data/train-0000{n}-of-00002.parquet" for n in range(2)]
    assert row_files([*shards, "data/test-00000-of-00001.parquet", "dataset_infos.json"], name) == shards
    assert row_files(["all.jsonl", "README.md"], name) == ["all.jsonl"]
    two = ["main/train.parquet", "socratic/train.parquet"]
    with pytest.raises(DataError, match=r"give one of them: lab/rows:main/train.parquet, or a directory"):
        row_files(two, name)
    assert row_files(two, hub.HubName(repository="lab/rows", folder="socratic")) == two[1:]
    with pytest.raises(DataError, match=r"several could be the rows: a.csv, b.csv"):
        row_files(["a.csv", "b.csv"], name)
    with pytest.raises(DataError, match="no rows in it"):
        row_files(["README.md"], name)
