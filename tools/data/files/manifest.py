"""The manifest beside every output: the inputs, the parameters and the outputs of the step that made it.

It names files relative to itself and holds no time, so the same inputs give the same manifest on every machine. A step
whose manifest still describes its inputs, parameters and outputs has nothing to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.files import read_object, sha256_of, write_atomically

QUESTIONS = "questions"  # key of a fill's manifest: source -> row -> sha256 of the restored question
MAX_DIFFERENCES, MAX_SHOWN = 6, 40  # differences shown per changed entry, characters shown per value

TOOL_VERSION = "1"  # raise it when a tool writes other bytes from the same inputs


def describe(path: Path, **facts: Any) -> dict[str, Any]:
    """Return the manifest entry of one file."""
    return {"file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size, **facts}


def manifest_of(output: Path) -> Path:
    """Return the path of the manifest of one file."""
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest, or None when it is missing or cannot be read."""
    return read_object(path) or None


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest. A step writes it last, so that it vouches for complete outputs."""
    write_atomically(path, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())


def lineage_of(path: Path) -> dict[str, Any] | None:
    """Return the manifest of an input as the next step's manifest includes it: with a hash for the long list."""
    manifest = read_manifest(path)
    if manifest is None or QUESTIONS not in manifest:
        return manifest
    content = json.dumps(manifest[QUESTIONS], sort_keys=True).encode()
    kept = {key: value for key, value in manifest.items() if key != QUESTIONS}
    return kept | {f"{QUESTIONS}_sha256": hashlib.sha256(content).hexdigest()}


def changes(path: Path, expected: Mapping[str, Any]) -> list[str]:
    """Return the reasons to run the step of the manifest at `path` again; empty when nothing changed.

    `expected` holds the entries that are known before the step runs: tool, inputs, parameters. The outputs are checked
    on disk.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return ["no manifest"]
    reasons = [
        f"{key} changed: {'; '.join(differences(manifest.get(key), value))}"
        for key, value in expected.items()
        if manifest.get(key) != value
    ]
    outputs = [(path.parent / output["file"], output) for output in manifest.get("outputs", [])]
    for file, output in outputs:
        if not file.is_file():
            reasons.append(f"{output['file']} is missing")
        elif file.stat().st_size != output["bytes"]:
            reasons.append(f"{output['file']} was edited")
    if reasons:  # one reason is enough: hashing takes long
        return reasons
    return [f"{output['file']} was edited" for file, output in outputs if sha256_of(file) != output["sha256"]]


def differences(old: Any, new: Any) -> list[str]:
    """Return the differences between two values, one text each, at most `MAX_DIFFERENCES`."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    found = []
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            found.append(f"{key} is gone")
        elif key not in before:
            found.append(f"{key} is new")
        elif before[key] != after[key]:
            found.append(f"{key} was {_short(before[key])}, is {_short(after[key])}")
    hidden = len(found) - MAX_DIFFERENCES
    return found[:MAX_DIFFERENCES] + ([f"{hidden} more"] if hidden > 0 else [])


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; in a list of files the file name is the key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and all(isinstance(entry, Mapping) and "file" in entry for entry in value):
        for entry in value:
            yield from _leaves(
                {key: inner for key, inner in entry.items() if key != "file"}, f"{prefix}{entry['file']}"
            )
    else:
        yield prefix or "value", value


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:12]}..."
