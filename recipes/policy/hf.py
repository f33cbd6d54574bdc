"""Hugging Face model directories: read weights by name, write a complete directory from a stream of tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from recipes.config.keys.native import ARCHITECTURES
from recipes.errors import CheckpointError, ConfigError, PolicyError, Problem
from recipes.policy.families.family import Family, family_of

TensorShape = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

SHARD_BYTES = 5 * 10**9  # the hub's customary size of one weight file
_WHOLE, _PART = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors"  # the names that transformers looks for
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_INDEX = "model.safetensors.index.json"
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration, tokenizer, chat template


def model_directory(name: str) -> Path:
    """Return the directory of a model given by path, or by hub name (fetched into the cache)."""
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # only for models that are not local

    return Path(snapshot_download(name))


def read_config(directory: Path) -> tuple[Any, Family]:
    """Read a transformers configuration and find its family; raises `ConfigError` for what the policy cannot build."""
    config = AutoConfig.from_pretrained(directory)
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    family = family_of(architecture)
    if family is None:
        problems = [("architectures", architecture, "one of " + ", ".join(ARCHITECTURES))]
    else:
        problems = family.refusals(config)
    if family is None or problems:
        where = directory / "config.json"
        raise ConfigError(
            [
                Problem(where=f"{where}: {key}", got=got, expected=expected, fix="train a model that the policy builds")
                for key, got, expected in problems
            ]
        )
    return config, family


class WeightReader:
    """Reads full tensors of a directory of safetensors files by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of: dict[str, Path] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)
        if not self._file_of:
            raise CheckpointError(
                Problem(
                    where=str(directory),
                    wrong="this is no Hugging Face model directory: it has no *.safetensors file",
                    fix="set policy.model_name to one",
                )
            )

    def has(self, name: str) -> bool:
        """Whether the directory has a tensor of this name."""
        return name in self._file_of

    def __call__(self, name: str) -> Tensor:
        """Return one full tensor."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(
                Problem(
                    where=str(self._directory),
                    wrong=f"tensor {name} is missing, which config.json implies",
                    fix="check that weights and config.json belong together",
                )
            )
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def check_all_used(self, names: set[str]) -> None:
        """Refuse a directory with other weights than `names`: training would lose them."""
        left = set(self._file_of) - names
        if left:
            raise CheckpointError(
                Problem(
                    where=str(self._directory),
                    wrong=f"the model of config.json has no place for {len(left)} tensors, for example {min(left)}",
                    fix="check that weights and config.json belong together",
                )
            )


def copy_side_files(source: Path, tokenizer: Path, target: Path, *, dtype: torch.dtype) -> None:
    """Copy configuration and tokenizer files, and note the dtype of the exported weights."""
    target.mkdir(parents=True, exist_ok=True)
    for directory in (source, tokenizer):  # the tokenizer's own files win
        for pattern in _SIDE_FILES:
            for file in directory.glob(pattern):
                if not file.name.endswith(".index.json") and (directory == source or file.name != "config.json"):
                    shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_weights(shapes: Sequence[TensorShape], weights: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Write a stream of named tensors as safetensors, a new file every few gigabytes; holds one tensor at a time.

    Args:
        shapes: name, dtype and shape of what `weights` yields, in its order.

    Raises `PolicyError` when it yields something else.
    """
    target.mkdir(parents=True, exist_ok=True)
    stream = iter(weights)
    files = in_files(shapes)
    names = [_WHOLE if len(files) == 1 else _PART.format(number, len(files)) for number in range(1, len(files) + 1)]
    for name, own in zip(names, files, strict=True):
        _write_file(target / name, own, stream)
    if len(files) > 1:
        weight_map = {tensor: name for name, own in zip(names, files, strict=True) for tensor, *_ in own}
        index = {"metadata": {"total_size": sum(map(num_bytes, shapes))}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def in_files(shapes: Sequence[TensorShape]) -> list[list[TensorShape]]:
    """Divide tensors, in their order, among files of a few gigabytes; a larger tensor gets a file of its own."""
    files: list[list[TensorShape]] = [[]]
    size = 0
    for shape in shapes:
        if files[-1] and size + num_bytes(shape) > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(shape)
        size += num_bytes(shape)
    return files


def num_bytes(shape: TensorShape) -> int:
    """Return the size of a tensor."""
    return shape[1].itemsize * torch.Size(shape[2]).numel()


def _write_file(path: Path, shapes: Sequence[TensorShape], stream: Iterator[tuple[str, Tensor]]) -> None:
    """Write the next tensors of `stream` into one file: the length of the header, the header, the tensors.

    They lie in the order of their item sizes, the largest first, so that each begins at a multiple of its own.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for shape in sorted(shapes, key=lambda shape: -shape[1].itemsize):
        name, dtype, sizes = shape
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(sizes), "data_offsets": [end, end + num_bytes(shape)]}
        end += num_bytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, dtype, sizes in shapes:
            sent, tensor = next(stream, ("nothing", torch.empty(0)))
            if (sent, tensor.dtype, tuple(tensor.shape)) != (name, dtype, tuple(sizes)):
                raise PolicyError(f"export: the policy yields {sent} {list(tensor.shape)} where {name} was announced")
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)
