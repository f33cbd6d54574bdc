"""The table of published blends (configs/data/blends.yaml): the data set, commit, files and rows of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem
from tools.data.files.tables import read_yaml_table

BLENDS_FILE = Path(__file__).resolve().parents[2] / "configs" / "data" / "blends.yaml"
BLEND_KEYS, FILE_KEYS = {"files", "reasoning"}, {"rows"}
REASONING_KEYS = {"strip", "truncate"}
DATASET_KEYS = {"also_called", "revision", "blends"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """One blend on the hub."""

    name: str
    dataset: str
    also_called: tuple[str, ...]
    revision: str | None
    files: Mapping[str, int | None]  # file of the data set -> published number of rows, None when unpublished
    reasoning: Mapping[str, float] = field(default_factory=dict)  # shares of the rows whose reasoning is edited

    def dataset_called(self, name: str | None) -> str:
        """Return the data set to download when the user gave `name`; raises `DataError` for an unrelated name."""
        if name is None or name == self.dataset:
            return self.dataset
        if name not in self.also_called:
            expected = " or ".join([self.dataset, *self.also_called])
            fix = "leave --dataset out, or add the data set to --blends"
            raise DataError(Problem(where="--dataset", got=name, expected=expected, fix=fix))
        print(f"download: {name} is what some of NVIDIA's documents call {self.dataset}; asking for the latter")
        return self.dataset


def load_blends(path: Path) -> dict[str, Blend]:
    """Read the table; raises `DataError` with every wrong entry."""
    problems: list[Problem] = []
    blends: dict[str, Blend] = {}
    for dataset, entry in read_yaml_table(path, "datasets", like="configs/data/blends.yaml").items():
        where = f"datasets.{dataset}"
        entry = _mapping(path, entry, where, DATASET_KEYS, problems)
        for name, blend in _mapping(path, entry.get("blends"), f"{where}.blends", None, problems).items():
            here = f"{where}.blends.{name}"
            blend = _mapping(path, blend, here, BLEND_KEYS, problems)
            files, edits = blend.get("files"), blend.get("reasoning")
            blends[name] = Blend(
                name=name,
                dataset=dataset,
                also_called=tuple(entry.get("also_called") or ()),
                revision=entry.get("revision"),
                files={
                    file: _rows(path, facts, f"{here}.files.{file}", problems)
                    for file, facts in _mapping(path, files, f"{here}.files", None, problems).items()
                },
                reasoning=_mapping(path, edits, f"{here}.reasoning", REASONING_KEYS, problems) if edits else {},
            )
    if problems:
        raise DataError(problems)
    return blends


def _mapping(
    path: Path, value: object, where: str, keys: set[str] | None, problems: list[Problem]
) -> Mapping[str, Any]:
    """Return `value` when it is a mapping whose keys are all in `keys`; otherwise add to `problems`."""
    if not isinstance(value, dict) or not (value or keys):
        problems.append(Problem(where=f"{path}: {where}", got=repr(value), expected="a mapping", fix="correct it"))
        return {}
    for key in value.keys() - (keys if keys is not None else value.keys()):
        expected = "one of " + ", ".join(sorted(keys or ()))
        problems.append(Problem(where=f"{path}: {where}", got=f"key {key!r}", expected=expected, fix="correct it"))
    return value


def _rows(path: Path, facts: object, where: str, problems: list[Problem]) -> int | None:
    rows = _mapping(path, facts, where, FILE_KEYS, problems).get("rows")
    if rows is not None and (type(rows) is not int or rows < 1):
        problems.append(
            Problem(where=f"{path}: {where}.rows", got=repr(rows), expected="a positive number", fix="correct it")
        )
    return rows
