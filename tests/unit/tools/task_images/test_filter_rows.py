"""The rows of good instances: copied byte by byte, with a manifest that says from what."""

from __future__ import annotations

import json

import pytest

from recipes.errors import DataError
from tools.task_images.check import require_place, write_good_rows


def row(instance: str | None) -> bytes:
    metadata = {"metadata": {"instance_id": instance}} if instance else {}
    return json.dumps({"responses_create_params": {"input": [], **metadata}}).encode() + b"\n"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "swe2").mkdir()
    (tmp_path / "swe2/train-split.jsonl").write_bytes(row("a") + row("b") + row(None) + row("a").rstrip())
    (tmp_path / "swe2/val-split.jsonl").write_bytes(row("b"))
    (tmp_path / "swe2/manifest.json").write_text('{"tool": "split", "parameters": {"val_rows": 1}}', encoding="utf-8")
    (tmp_path / "good.txt").write_text("a\nother\n", encoding="utf-8")
    return tmp_path


def write(place, *good):
    rows = [place / "swe2/train-split.jsonl", place / "swe2/val-split.jsonl"]
    write_good_rows(rows, set(good), place / "good", good_list=place / "good.txt")


def test_rows_of_good_instances_and_rows_without_one_stay(place, capsys):
    write(place, "a")
    assert (place / "good/train-split.jsonl").read_bytes() == row("a") + row(None) + row("a").rstrip()
    assert (place / "good/val-split.jsonl").read_bytes() == b""
    manifest = json.loads((place / "good/manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"] == {
        "train-split.jsonl": {"rows": 3, "left_out": 1},
        "val-split.jsonl": {"rows": 0, "left_out": 1},
    }
    assert [entry["file"] for entry in manifest["inputs"]] == ["good.txt", "train-split.jsonl", "val-split.jsonl"]
    assert manifest["inputs"][1]["made_by"]["tool"] == "split"
    assert [entry["rows"] for entry in manifest["outputs"]] == [3, 0]
    capsys.readouterr()
    write(place, "a")
    assert capsys.readouterr().out == f"sif-check: {place}/good is up to date\n"
    (place / "good.txt").write_text("a\nb\n", encoding="utf-8")
    write(place, "a", "b")
    assert "inputs changed: good.txt.bytes was 8, is 4" in capsys.readouterr().out
    assert (place / "good/val-split.jsonl").read_bytes() == row("b")


def test_no_copy_takes_the_place_of_its_rows(place):
    rows = place / "swe2/train-split.jsonl"
    require_place([rows], place / "good")
    with pytest.raises(DataError, match=r"--out: the copies would overwrite .*swe2/train-split.jsonl"):
        require_place([rows], place / "good/../swe2")
    with pytest.raises(DataError, match=r"--rows: got train-split.jsonl twice"):
        require_place([rows, place / "train-split.jsonl"], place / "good")
