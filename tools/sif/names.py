"""Which file of SIF_DIR is the image of an instance.

How an instance becomes a file name is NeMo Gym's rule: templates with {instance_id}, tried with the id and with the
ways in which the registries write it, one whole name after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

TEMPLATES = (
    "swebench_sweb.eval.x86_64.{instance_id}.sif",
    "swegym_sweb.eval.x86_64.{instance_id}.sif",
    "r2egym_{instance_id}.sif",
)
GOOD_INSTANCES = "good_instances.txt"  # in SIF_DIR: what `make sif-check` found to be good, one id per line


def instance_of(line: bytes) -> str | None:
    """Return the instance id of a row, None where there is none."""
    try:
        metadata: Any = orjson.loads(line)["responses_create_params"].get("metadata")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the check of the data names it
    name = metadata.get("instance_id") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def candidates(instance: str) -> list[str]:
    """Return the ways in which registries write an instance id: a double underscore is not allowed in most."""
    ways = [instance]
    for separator in ("_1776_", "_s_"):
        way = instance.replace("__", separator)
        ways += [way, way.lower()]
    organisation, is_split, rest = instance.partition("__")
    repository, is_numbered, commit = rest.rpartition("-")
    if organisation and is_split and is_numbered:
        ways.append(f"{repository.lower()}_final_{commit}")  # R2E-Gym
    return list(dict.fromkeys(ways))


class Listing:
    """Names in directories, each read once: a stat per candidate would take minutes on a shared file system."""

    def __init__(self) -> None:
        self._names: dict[Path, frozenset[str]] = {}

    def has(self, path: Path) -> bool:
        if path.parent not in self._names:
            names = (entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else ()
            self._names[path.parent] = frozenset(names)
        return path.name in self._names[path.parent]


def find_image(instance: str, templates: Sequence[str], listing: Listing) -> Path | None:
    """Return the image of an instance: the first template that names a file, with the first way to write the id."""
    for template in templates:
        for way in candidates(instance):
            path = Path(template.replace("{instance_id}", way))
            if listing.has(path):
                return path
    return None
