"""Tables of configs/data: what is wrong with a file is one problem that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import DataError
from tools.data.blends import load_blends
from tools.data.files.tables import read_yaml_table
from tools.data.side_files import load_side_files
from tools.data.sources import load_sources
from tools.task_images.instances import load_datasets


def test_entries_by_name(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text("things:\n  one: {a: 1}\n  two: [2]\n", encoding="utf-8")
    assert read_yaml_table(tmp_path / "table.yaml", "things", like="x") == {"one": {"a": 1}, "two": [2]}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "it has no `things:` with one entry per name; name another file, or write it like x"),
        ("things:\n", "it has no `things:`"),
        ("things: {}\n", "it has no `things:`"),
        ("things: {1: {}}\n", "it has no `things:`"),
        ("- things\n", "it has no `things:`"),
        ("things: {a: {}}\nother: 1\n", "beside `things:` it has other; remove the other keys"),
        ("things: [", "it cannot be read as YAML: "),
        ("things: \x00", "it cannot be read as YAML: "),
    ],
)
def test_what_is_no_table_is_one_problem(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_yaml_table(path, "things", like="x")
    assert str(caught.value).startswith(f"{path}: {wrong}")


@pytest.mark.parametrize(
    ("load", "key"),
    [
        (load_blends, "datasets"),
        (load_sources, "sources"),
        (load_side_files, "side_files"),
        (load_datasets, "datasets"),
    ],
)
def test_every_table_is_read_like_this(tmp_path: Path, load, key: str) -> None:
    with pytest.raises(DataError, match="cannot be read as YAML"):
        load(tmp_path / "missing.yaml")
    for entry in ("7", "text", "[1]", "{}", "null"):
        (tmp_path / "table.yaml").write_text(f"{key}: {{one: {entry}}}\n", encoding="utf-8")
        with pytest.raises(DataError, match="one"):
            load(tmp_path / "table.yaml")
