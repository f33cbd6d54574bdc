"""Hugging Face model directories: read weights by name, write a complete directory from a stream of tensors."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from recipes.config.keys.derive import template_kwargs
from recipes.config.keys.native import ARCHITECTURES
from recipes.errors import CheckpointError, ConfigError, PolicyError, Problem
from recipes.files import FileSum, SummedFile
from recipes.policy.families.family import Family, family_of
from recipes.policy.families.mapping import TensorShape
from recipes.weight_files import AGAIN, INDEX, WHOLE, read_weights, require_object

if TYPE_CHECKING:
    from recipes.config.tree import PolicyConfig

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # the hub's customary size of one weight file
_PART = "model-{:05d}-of-{:05d}.safetensors"  # the name that transformers looks for
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_SIDE_FILES = ("*.json", "*.txt", "*.model")  # configuration and tokenizer
_CONFIG = "config.json"
_MODEL_FILES = (_CONFIG, "generation_config.json")  # of which a tokenizer apart from the model has none to give
TEMPLATE_KWARGS = "chat_template_kwargs"  # in an export's tokenizer_config.json
_TOKENIZER_CONFIG, _TEMPLATE, _TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_TOKENIZER_FILES = {
    *(_TOKENIZER_CONFIG, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
}
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)


def model_directory(name: str) -> Path:
    """Return the directory of a model given by path, or by hub name (fetched into the cache)."""
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # only for models that are not local

    return Path(snapshot_download(name))


def chosen_template(cfg: PolicyConfig) -> str | None:
    """Return the chat template that a configuration chooses over the tokenizer's own; None where it chooses none."""
    path = cfg.tokenizer.chat_template
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        where, wrong = "policy.tokenizer.chat_template", f"{path} cannot be read ({error.strerror or error})"
        raise CheckpointError(Problem(where=where, wrong=wrong, fix="restore the file that the run used")) from error


def read_config(directory: Path) -> tuple[Any, Family]:
    """Read a transformers configuration and find its family; raises `ConfigError` for what the policy cannot build."""
    require_object(directory / _CONFIG, fix="name a model directory in Hugging Face format")  # else a traceback
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
        weights = read_weights(directory)
        self._file_of = weights.file_of
        if weights.strays:
            names = ", ".join(file.name for file in weights.strays)
            logger.warning("%s: not read, because %s does not name it: %s", directory, INDEX, names)

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


def side_files(cfg: PolicyConfig) -> dict[str, bytes]:
    """Return what belongs beside the exported weights of a policy, as it is now: see `read_side_files`."""
    return read_side_files(
        model_directory(cfg.model_name),
        model_directory(cfg.tokenizer.name),
        precision=cfg.precision,
        chat_template=chosen_template(cfg),
        template_kwargs=template_kwargs(cfg),
    )


def read_side_files(
    source: Path,
    tokenizer: Path,
    *,
    precision: str,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Return what belongs beside exported weights, by name: configuration, tokenizer, chat templates, code.

    A run reads it once, at its start: what somebody changes there later is not what the run uses. `chat_template` is
    the text of the one that the configuration chose over the tokenizer's own. `template_kwargs` are the arguments with
    which it renders; no reader of exports applies any, so `tokenizer_config.json` says them.
    """
    files = {file.name: file.read_bytes() for file in _used_files(source, tokenizer)}
    config = _without_lost_code(require_object(source / _CONFIG, fix=AGAIN), source, files)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = precision
    path = tokenizer / _TOKENIZER_CONFIG
    given = require_object(path, fix=AGAIN) if path.is_file() else {}
    own = {key: value for key, value in given.items() if key not in ("chat_template", TEMPLATE_KWARGS)}
    settings = _without_lost_code(own, tokenizer, files)
    settings |= {TEMPLATE_KWARGS: dict(template_kwargs)} if template_kwargs else {}
    for name, text in _templates(tokenizer, given.get("chat_template"), chat_template).items():
        files[_TEMPLATE if name == "default" else f"{_TEMPLATES}/{Path(name).name}.jinja"] = text.encode()
    written = {_CONFIG: (config, None), _TOKENIZER_CONFIG: (settings, given)}
    return files | {name: _as_json(content) for name, (content, old) in written.items() if content != old}


def write_side_files(files: Mapping[str, bytes], target: Path) -> None:
    """Write what `read_side_files` returned."""
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def _used_files(source: Path, tokenizer: Path) -> Iterator[Path]:
    """Yield the files of model and tokenizer that a reader of the export needs; of two with one name, the right one."""
    is_apart = source.resolve() != tokenizer.resolve()
    for directory in (source, tokenizer) if is_apart else (source,):
        for pattern in _SIDE_FILES:
            for file in directory.glob(pattern):
                of_tokenizer = file.name in _TOKENIZER_FILES or file.suffix == ".model"
                is_used = not (of_tokenizer if directory == source else file.name in _MODEL_FILES) or not is_apart
                if is_used and not file.name.endswith(".index.json"):
                    yield file


def _templates(tokenizer: Path, entry: Any, chosen: str | None) -> dict[str, str]:
    """Return each chat template by name. An export has each as a file of its own, which every reader takes first.

    A chosen template is used with and without tools, so the tokenizer's own for tools is left out then.
    """
    named: dict[str, str] = {}
    if (tokenizer / _TEMPLATE).is_file():
        named["default"] = (tokenizer / _TEMPLATE).read_text(encoding="utf-8")
    elif isinstance(entry, list):
        given = [one for one in entry if isinstance(one, dict)]
        named |= {str(one["name"]): one["template"] for one in given if isinstance(one.get("template"), str)}
    elif isinstance(entry, str):
        named["default"] = entry
    named |= {file.stem: file.read_text(encoding="utf-8") for file in (tokenizer / _TEMPLATES).glob("*.jinja")}
    if chosen is not None:
        named["default"] = chosen
        named.pop("tool_use", None)
    return named


def _without_lost_code(config: dict[str, Any], directory: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Add the Python files that `auto_map` names to `files`; returns the settings without entries that lack theirs."""
    if not isinstance(entries := config.get("auto_map"), dict):
        return config
    kept = {}
    for kind, entry in entries.items():
        names = [name for name in (entry if isinstance(entry, list) else [entry]) if name and "--" not in name]
        modules = _modules(directory, {name.partition(".")[0] for name in names})
        if all(file.is_file() for file in modules):
            kept[kind] = entry
            files.update({file.name: file.read_bytes() for file in modules})
        else:
            lost = ", ".join(file.name for file in modules if not file.is_file())
            said = "%s: auto_map names %s for %s: it is not there, and left out of exports"
            logger.warning(said, directory, lost, kind)
    others = {key: value for key, value in config.items() if key != "auto_map"}
    return others | ({"auto_map": kept} if kept else {})


def _modules(directory: Path, names: set[str]) -> list[Path]:
    """Return the files of modules, and of those beside them that they import."""
    found: dict[str, Path] = {}
    left = sorted(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name] = directory / f"{name}.py"
            text = found[name].read_text(encoding="utf-8") if found[name].is_file() else ""
            left += _RELATIVE_IMPORT.findall(text)
    return list(found.values())


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_weights(shapes: Sequence[TensorShape], weights: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Write a stream of named tensors as safetensors, a new file every few gigabytes; holds one tensor at a time.

    Args:
        shapes: name, dtype and shape of what `weights` yields, in its order.

    Raises `PolicyError` when it yields something else.
    """
    target.mkdir(parents=True, exist_ok=True)
    stream = as_announced(weights, shapes)
    files = in_files(shapes)
    for number, (name, own) in enumerate(files.items(), start=1):
        size = f"{sum(map(num_bytes, own)) / 1e6:,.1f} MB"
        logger.info("writing file %d of %d: %s, %s", number, len(files), name, size)
        header, begins = _header(own)
        with (target / name).open("wb") as file:
            file.write(header)
            for tensor_name, tensor in itertools.islice(stream, len(own)):
                file.seek(begins[tensor_name])
                file.write(_content(tensor))
    write_index(files, target)


def write_copies(
    files: Mapping[str, Sequence[TensorShape]], copies: Mapping[str, Tensor], target: Path
) -> dict[Path, FileSum]:
    """Write some of the files of `in_files`, flushed to the disk, from tensors in memory; returns their sums."""
    target.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, own in files.items():
        header, begins = _header(own)
        with SummedFile(target / name) as file:
            file.write(header)
            for tensor_name in begins:
                file.write(_content(copies[tensor_name]))
            file.flush()
            os.fsync(file.fileno())
        sums[target / name] = file.sum()
    return sums


def write_index(files: Mapping[str, Sequence[TensorShape]], target: Path) -> None:
    """Write which of several files has which tensor; one file needs no index."""
    if len(files) > 1:
        weight_map = {tensor: name for name, own in files.items() for tensor, *_ in own}
        total = sum(num_bytes(shape) for own in files.values() for shape in own)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def as_announced(weights: Iterable[tuple[str, Tensor]], shapes: Sequence[TensorShape]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as long as they are those of `shapes`; raises `PolicyError` at one that is not."""
    stream = iter(weights)
    for name, dtype, sizes in shapes:
        sent, tensor = next(stream, ("nothing", torch.empty(0)))
        if (sent, tensor.dtype, tuple(tensor.shape)) != (name, dtype, tuple(sizes)):
            raise PolicyError(f"export: the policy yields {sent} {list(tensor.shape)} where {name} was announced")
        yield name, tensor


def in_files(shapes: Sequence[TensorShape]) -> dict[str, list[TensorShape]]:
    """Divide tensors, in their order, among files of a few gigabytes; a larger tensor gets a file of its own."""
    files: list[list[TensorShape]] = [[]]
    size = 0
    for shape in shapes:
        if files[-1] and size + num_bytes(shape) > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(shape)
        size += num_bytes(shape)
    names = [WHOLE if len(files) == 1 else _PART.format(number, len(files)) for number in range(1, len(files) + 1)]
    return dict(zip(names, files, strict=True))


def num_bytes(shape: TensorShape) -> int:
    """Return the size of a tensor."""
    return shape[1].itemsize * torch.Size(shape[2]).numel()


def _header(shapes: Sequence[TensorShape]) -> tuple[bytes, dict[str, int]]:
    """Return what a file of these tensors begins with, and where in the file each tensor begins, in their order there.

    They lie in the order of their item sizes, the largest first, so that each begins at a multiple of its own.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for shape in sorted(shapes, key=lambda shape: -shape[1].itemsize):
        name, dtype, sizes = shape
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(sizes), "data_offsets": [end, end + num_bytes(shape)]}
        begins[name] = end
        end += num_bytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + begin for name, begin in begins.items()}


def _content(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
    return content
