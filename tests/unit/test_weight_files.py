"""Weight files: the index decides, and what no reader could agree on is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import CheckpointError
from recipes.weight_files import INDEX, files_of, read_header, read_weights
from tests.weight_headers import safetensors

ONE, TWO, THREE = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2, 3))
BOTH = {"w": ONE, "v": TWO}


def write(path: Path, files: Mapping[str, tuple[str, ...]], index: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    for name, tensors in files.items():
        (path / name).write_bytes(safetensors(dict.fromkeys(tensors, (2,))))
    if index is not None:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
    return path


READ: dict[str, tuple[dict[str, tuple[str, ...]], Any, dict[str, str], list[str]]] = {
    "one file": ({"model.safetensors": ("w",)}, None, {"w": "model.safetensors"}, []),
    "one file of another name": ({"pytorch.safetensors": ("w",)}, None, {"w": "pytorch.safetensors"}, []),
    "shards": ({ONE: ("w",), TWO: ("v",)}, BOTH, BOTH, []),
    "shards without an index": ({ONE: ("w",), TWO: ("v",)}, None, BOTH, []),
    "a whole model beside shards": (
        {ONE: ("w",), TWO: ("v",), "model.safetensors": ("w", "v")}, BOTH, BOTH, ["model.safetensors"],
    ),
    "a shard of an earlier save": ({ONE: ("w",), TWO: ("v",), THREE: ("w",)}, BOTH, BOTH, [THREE]),
    "an adapter beside shards": (
        {ONE: ("w",), TWO: ("v",), "adapter_model.safetensors": ("a",)}, BOTH, BOTH, ["adapter_model.safetensors"],
    ),
    "a consolidated file beside one that the index names": (
        {"model.safetensors": ("w",), "consolidated.safetensors": ("w",)},
        {"w": "model.safetensors"}, {"w": "model.safetensors"}, ["consolidated.safetensors"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_the_index_decides_and_strays_are_named(tmp_path: Path, case: str) -> None:
    files, index, expected, strays = READ[case]
    found = read_weights(write(tmp_path, files, index))
    assert {tensor: file.name for tensor, file in found.file_of.items()} == expected
    assert [file.name for file in found.strays] == strays
    assert set(found.shape_of.values()) == {(2,)}
    assert {file.name for file in files_of(tmp_path)} == set(expected.values())


REFUSED: dict[str, tuple[dict[str, tuple[str, ...]], Any, str]] = {
    "nothing": ({}, None, r"it has no \*\.safetensors file"),
    "a shard is missing": ({ONE: ("w",)}, BOTH, f"{TWO}: the file is missing, which {INDEX} names"),
    "all shards are missing": ({}, BOTH, f"{ONE}: the file is missing"),
    "one in two shards": ({ONE: ("w",), TWO: ("v", "w")}, BOTH, f"tensor w is in {ONE} and in {TWO}"),
    "one in two files, no index": ({ONE: ("w",), TWO: ("w",)}, None, f"tensor w is in {ONE} and in {TWO}"),
    "in another shard than the index says": ({ONE: ("v",), TWO: ("w",)}, BOTH, f"{ONE}: it lacks tensor w"),
    "not in the index": ({ONE: ("w", "u"), TWO: ("v",)}, BOTH, f"{ONE}: tensor u is in no {INDEX}"),
    "in no file": ({ONE: ("w",), TWO: ("v",)}, {**BOTH, "u": ONE}, f"{ONE}: it lacks tensor u"),
    "an adapter beside a whole model": (
        {"model.safetensors": ("w",), "adapter_model.safetensors": ("a",)}, None, "adapter_model.safetensors: it lies",
    ),
    "an index of another kind": ({ONE: ("w",)}, ["w"], f"{INDEX}: it is no index"),
    "an index of nothing": ({ONE: ("w",)}, {}, f"{INDEX}: it is no index"),
    "a file that is no name": ({ONE: ("w",)}, {"w": f"../{ONE}"}, f"{INDEX}: it is no index"),
    "a file that is a number": ({ONE: ("w",)}, {"w": 5}, f"{INDEX}: it is no index"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, case: str) -> None:
    files, index, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read_weights(write(tmp_path, files, index))


@pytest.mark.parametrize("text", ["[]", "null", "5", "{}", "", '{"weight_map"', "\x00"])
def test_an_index_of_another_kind_of_json_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, {ONE: ("w",)})
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="it is no index"):
        read_weights(tmp_path)
    assert [file.name for file in files_of(tmp_path)] == [ONE]


HEADERS = [b"[]", b"null", b'{"w": 5}', b'{"w": {}}', b'{"w": {"shape": [2], "data_offsets": [0]}}', b"\xff"]


@pytest.mark.parametrize("header", [*HEADERS, b'{"w": {"shape": ["2"], "data_offsets": [0, 0]}}'])
def test_a_header_of_another_kind_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"expected a safetensors header|as its header says"):
        read_header(file)


def test_a_file_that_is_cut_or_longer_than_its_header_says_is_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "model.safetensors", safetensors({"w": (3,), "v": ()})
    file.write_bytes(content)
    assert {name: one["shape"] for name, one in read_header(file).items()} == {"w": [3], "v": []}
    for broken in (content[:-1], content + b"x", b"", content[:5], b"\xff" * 40):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: got \d+ bytes"):
            read_header(file)
