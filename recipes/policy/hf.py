"""Hugging Face model directories: read weights by name, write a complete directory from a stream of tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from recipes.config.keys.native import ARCHITECTURES
from recipes.errors import CheckpointError, ConfigError, Problem
from recipes.policy.families.family import Family, family_of

_SHARD_BYTES = 5 * 10**9  # the hub's customary size of one weight file
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


def write_weights(weights: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Write a stream of named tensors as safetensors, a new file every few gigabytes."""
    target.mkdir(parents=True, exist_ok=True)
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        path = target / f"part-{len(files):05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        files.append((path, list(pending)))
        pending.clear()

    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if pending and sum(t.numel() * t.element_size() for t in pending.values()) + size > _SHARD_BYTES:
            flush()
        pending[name] = tensor.to("cpu", copy=True).contiguous()  # the stream may reuse its buffer
        total += size
    flush()
    _name_files(files, target, total)


def _name_files(files: list[tuple[Path, list[str]]], target: Path, total: int) -> None:
    """Give the files the names that transformers looks for, with an index when there are several."""
    if len(files) == 1:
        files[0][0].rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(target / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
