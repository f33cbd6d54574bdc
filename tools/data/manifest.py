"""The manifest beside every output: what was read, with which parameters, and what was written.

It names files relative to itself and holds no time, so the same inputs give the same manifest on every machine.
A step whose manifest still holds has nothing to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.data.files import sha256_of, write_atomically

TOOL_VERSION = "1"  # raise it when a tool would write other bytes from the same inputs


def describe(path: Path, **facts: Any) -> dict[str, Any]:
    """Return a manifest entry of one file."""
    return {"file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size, **facts}


def manifest_of(output: Path) -> Path:
    """Return where the manifest of one file lies: where the next step looks for it."""
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest; it is the last thing a step writes."""
    write_atomically(path, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())


def changes(path: Path, expected: Mapping[str, Any]) -> list[str]:
    """Return why the step that wrote the manifest at `path` has to run again; empty when nothing changed.

    `expected` holds the entries known before the step runs: tool, inputs, parameters. Outputs are checked on disk.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return ["no manifest"]
    reasons = [f"{key} changed" for key, value in expected.items() if manifest.get(key) != value]
    outputs = [(path.parent / output["file"], output) for output in manifest.get("outputs", [])]
    for file, output in outputs:
        if not file.is_file():
            reasons.append(f"{output['file']} is missing")
        elif file.stat().st_size != output["bytes"]:
            reasons.append(f"{output['file']} was edited")
    if reasons:  # enough to know; hashing takes long
        return reasons
    return [f"{output['file']} was edited" for file, output in outputs if sha256_of(file) != output["sha256"]]
