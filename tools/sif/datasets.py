"""All instances of the published SWE data sets, for `--all`: far more than the rows of a blend need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem
from tools.data.sources import download_split, pinned_commit
from tools.files.tables import read_yaml_table
from tools.sif.instances import Instance, instance_from

DATASETS_FILE = Path(__file__).resolve().parents[2] / "configs" / "data" / "swe_datasets.yaml"
KEYS = {"revision", "split", "instances"}
COLUMNS = ("instance_id", "docker_image", "base_commit")  # read where the data set has them


def instances_of_datasets(table: Path, directory: Path, *, allow_moving: bool) -> list[Instance]:
    """Return the instances of all data sets of a table, each at its commit; writes their files to `directory`."""
    instances: dict[str, Instance] = {}
    for dataset, entry in load_datasets(table).items():
        where = f"{table}: datasets.{dataset}"
        commit = pinned_commit(dataset, entry["revision"], f"{where}.revision", allow_moving=allow_moving)
        files = download_split(dataset, commit, entry["split"], directory)
        found = [instance for path in files for instance in instances_of_table(read_table(path), dataset)]
        expected = entry.get("instances", len(found))
        if len(found) != expected:
            fix = "correct the number or the commit"
            got = f"{len(found)} at {commit[:12]}"
            raise DataError(Problem(where=f"{where}.instances", got=got, expected=str(expected), fix=fix))
        instances |= {instance.id: instance for instance in found}
        print(f"sif: {dataset}@{commit}: {len(instances)} instances so far")
    return list(instances.values())


def load_datasets(path: Path) -> dict[str, dict[str, Any]]:
    """Read the table; raises `DataError` with every wrong entry."""
    entries: dict[str, dict[str, Any]] = read_yaml_table(path, "datasets", like="configs/data/swe_datasets.yaml")
    wrong = {name: entry for name, entry in entries.items() if not _is_entry(entry)}
    if wrong:
        expected, fix = "`revision`, `split` and optionally `instances`, a number", "correct the entry"
        problems = [
            Problem(where=f"{path}: datasets.{name}", got=repr(entry), expected=expected, fix=fix)
            for name, entry in wrong.items()
        ]
        raise DataError(problems)
    return entries


def _is_entry(entry: Any) -> bool:
    texts = isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("revision", "split"))
    return texts and not entry.keys() - KEYS and type(entry.get("instances", 0)) is int


def read_table(path: Path) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a parquet file with the columns of `COLUMNS`."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    names = pyarrow.parquet.read_schema(path).names
    table = pyarrow.parquet.read_table(path, columns=[name for name in COLUMNS if name in names])
    rows: list[Mapping[str, Any]] = table.to_pylist()
    return rows


def instances_of_table(rows: Iterable[Mapping[str, Any]], dataset: str) -> Iterable[Instance]:
    """Yield the instance of each row; R2E-Gym has no instance ids, so the name of the image is the id."""
    for row in rows:
        name = row.get("instance_id") or str(row["docker_image"]).rpartition("/")[2].replace(":", "_")
        yield instance_from({**row, "instance_id": name, "dataset_name": dataset})
