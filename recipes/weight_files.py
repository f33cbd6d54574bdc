"""Files of a model directory: which safetensors files hold its weights, and what is in them; all without torch.

The index decides, where there is one: files beside those that it names are strays, which nothing reads. Without an
index every file counts. A tensor that two files hold is refused: no reader could know which of them is meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import CheckpointError, InputError, Problem

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers looks for
_MAX_HEADER = 100_000_000  # bytes; what the safetensors library takes
_MAX_PROBLEMS = 20  # of one directory
AGAIN = "copy or export the checkpoint again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a model directory."""

    file_of: Mapping[str, Path]  # by name of the tensor
    shape_of: Mapping[str, tuple[int, ...]]
    strays: tuple[Path, ...]  # safetensors files beside the index's that are not read


def require_object(path: Path, *, fix: str) -> dict[str, Any]:
    """Return the JSON object of a file; raises `InputError` where it cannot be read or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
        wrong = f"this file cannot be read as a JSON object ({why})"
        raise InputError(Problem(where=str(path), wrong=wrong, fix=fix)) from error
    return value


def files_of(directory: Path) -> list[Path]:
    """Return the files that hold weights, as far as they are there; a broken index is that of no file."""
    try:
        named = set(_index(directory / INDEX).values())
    except CheckpointError:
        named = set()
    return [file for file in sorted(directory.glob("*.safetensors")) if not named or file.name in named]


def read_weights(directory: Path) -> Weights:
    """Return what the files hold; raises `CheckpointError` when a file is cut, or when files contradict each other."""
    index = _index(directory / INDEX)
    files = files_of(directory)
    missing = sorted(set(index.values()) - {file.name for file in files})
    problems = [
        Problem(where=str(directory / name), wrong=f"the file is missing, which {INDEX} names", fix=AGAIN)
        for name in missing
    ]
    if not files and not missing:
        wrong, fix = "this is no Hugging Face model directory: it has no *.safetensors file", "take another directory"
        problems.append(Problem(where=str(directory), wrong=wrong, fix=fix))
    if not index and len(files) > 1 and (whole := directory / WHOLE) in files:
        beside = next(file for file in files if file != whole)
        wrong = f"it lies beside {WHOLE}, and there is no {INDEX} to say which of them holds the weights"
        problems.append(Problem(where=str(beside), wrong=wrong, fix="move away the file that does not belong there"))
    if problems:
        raise CheckpointError(problems)
    headers = {file: read_header(file) for file in files}
    file_of = _tensors(directory, index, headers)
    return Weights(
        file_of=file_of,
        shape_of={name: tuple(headers[file][name]["shape"]) for name, file in file_of.items()},
        strays=tuple(file for file in sorted(directory.glob("*.safetensors")) if file not in headers),
    )


def read_header(path: Path) -> dict[str, Any]:
    """Return tensor -> dtype, shape and place; raises `CheckpointError` when the file has not the declared size."""
    size = path.stat().st_size
    with path.open("rb") as content:
        header_size = int.from_bytes(content.read(8), "little")
        header = content.read(header_size) if header_size < min(size, _MAX_HEADER) else b""
    try:
        tensors: dict[str, Any] = {name: one for name, one in json.loads(header).items() if name != "__metadata__"}
        declared = 8 + header_size + max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
        shapes_are_sizes = all(type(size) is int for one in tensors.values() for size in one["shape"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        declared, shapes_are_sizes = -1, False
    if declared != size or not shapes_are_sizes:
        expected = f"{declared} bytes, as its header says" if declared > 0 else "a safetensors header"
        raise CheckpointError(Problem(where=str(path), got=f"{size} bytes", expected=expected, fix=AGAIN))
    return tensors


def _index(path: Path) -> dict[str, str]:
    """Return tensor -> name of its file; nothing without an index."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        named = content["weight_map"]
        is_map = isinstance(named, dict) and bool(named)
    except (ValueError, KeyError, TypeError):
        is_map = False
    if not is_map or not all(isinstance(file, str) and Path(file).name == file for file in named.values()):
        wrong = "it is no index: its `weight_map` gives each tensor the name of a file beside it"
        raise CheckpointError(Problem(where=str(path), wrong=wrong, fix=AGAIN))
    return dict(named)


def _tensors(directory: Path, index: Mapping[str, str], headers: Mapping[Path, Mapping[str, Any]]) -> dict[str, Path]:
    """Return tensor -> file; raises `CheckpointError` unless each tensor is in one file, the one of the index."""
    places: dict[str, list[Path]] = {}
    for file, tensors in headers.items():
        for name in tensors:
            places.setdefault(name, []).append(file)
    problems = [
        Problem(
            where=str(directory),
            wrong=f"tensor {name} is in {' and in '.join(file.name for file in found)}",
            fix=f"remove the file that is older, or {AGAIN}",
        )
        for name, found in places.items()
        if len(found) > 1
    ]
    if index:
        lost = [name for name in index if directory / index[name] not in places.get(name, ())]
        unnamed = [name for name in places if name not in index]
        problems += [
            Problem(
                where=str(directory / index[name]),
                wrong=f"it lacks tensor {name}, which {INDEX} says is in it",
                fix=AGAIN,
            )
            for name in lost
        ]
        problems += [
            Problem(where=str(places[name][0]), wrong=f"tensor {name} is in no {INDEX}", fix=AGAIN) for name in unnamed
        ]
    if problems:
        raise CheckpointError(problems[:_MAX_PROBLEMS])
    return {name: found[0] for name, found in places.items()}
