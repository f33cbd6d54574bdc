"""Which file is the image of an instance.

How an instance becomes a file name is NeMo Gym's rule: templates with {instance_id}, tried with the id and with the
ways in which the registries write it. Whole names come first, over all templates; then names that hold the id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

TEMPLATES = (
    "swebench_sweb.eval.x86_64.{instance_id}.sif",
    "swegym_sweb.eval.x86_64.{instance_id}.sif",
    "r2egym_{instance_id}.sif",
)
SUFFIX = ".sif"


class PartialNames(StrEnum):
    """Which file an instance gets when no file has the name that a template says."""

    WHOLE_ID = "whole_id"  # one whose name ends with the whole id: `any_a__b-1.sif` for `a__b-1`, never `a__b-12.sif`
    SUBSTRING = "substring"  # one whose name has the id anywhere, as in NeMo Gym: `a__b-12.sif` for `a__b-1`, too


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

    def names(self, directory: Path) -> frozenset[str]:
        """Return the names in a directory, none where it cannot be read. A shared file system may be able to later."""
        if directory not in self._names:
            try:
                self._names[directory] = frozenset(entry.name for entry in directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                self._names[directory] = frozenset()
            except OSError:
                return frozenset()
        return self._names[directory]

    def has(self, path: Path) -> bool:
        return path.name in self.names(path.parent)


def find_image(
    instance: str,
    templates: Sequence[str],
    listing: Listing,
    partial: PartialNames = PartialNames.WHOLE_ID,
) -> Path | None:
    """Return the image of an instance, None where there is none.

    It is the first template that names a file, with the first way to write the id. Where no template does, it is a file
    beside them whose name has the id in it: the first by directory, by way to write the id, then by name.
    """
    if not instance or "/" in instance or "\0" in instance:
        return None
    for template in templates:
        for way in candidates(instance):
            path = Path(template.replace("{instance_id}", way))
            if listing.has(path):
                return path
    return next(_partial(instance, templates, listing, partial), None)


def _partial(instance: str, templates: Sequence[str], listing: Listing, partial: PartialNames) -> Iterator[Path]:
    for directory in dict.fromkeys(Path(template).parent for template in templates):
        for way in candidates(instance):
            for name in sorted(listing.names(directory)):
                stem = name.removesuffix(SUFFIX)
                if stem == name or way not in stem:
                    continue
                before = stem.removesuffix(way)
                is_whole = before != stem and (not before or before[-1] in "_.")
                if is_whole or partial is PartialNames.SUBSTRING:
                    yield directory / name
