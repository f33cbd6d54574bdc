"""The SWE instances of the rows: which image each needs in a registry, and which file the agent will look for.

A row says from which data set its instance is. The three families of data sets name their images in three ways. A row
that holds the name of its image (`docker_image`, as in R2E-Gym) is followed, as long as that image is in a trusted
registry. How a file must be called for the agent to find it is in recipes/environments/swe/images.py.

All instances of the published SWE data sets, for `--all`: far more than the rows of a blend need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.swe.hidden_tests import SWE_BENCH, SWE_GYM, family_of
from recipes.environments.swe.images import TEMPLATES, Listing, candidates, find_image
from recipes.errors import DataError, Problem
from tools.data.files.tables import read_yaml_table
from tools.data.sources import download_split, pinned_commit
from tools.task_images.registry.references import DOCKER_HUB, REGISTRIES, Reference

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


MAX_PROBLEMS = 20  # shown one by one
IMAGE_KEYS = ("docker_image", "image_name")  # under which a row names its image
TEMPLATE = {template.partition("_")[0]: template for template in TEMPLATES}
VALIDATE = "run `make data-validate`, which names every wrong row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance of a SWE data set: a repository at a commit, with a task to solve in it."""

    id: str
    reference: Reference
    file: str  # name of the SIF file that is made
    facts: Mapping[str, Any]  # of the row: base_commit, patch, test_patch, FAIL_TO_PASS, ...

    @property
    def family(self) -> str:
        return self.file.partition("_")[0]

    def existing(self, directory: Path, listing: Listing) -> Path | None:
        """Return the file that an agent would find for it."""
        return find_image(self.id, [str(directory / text) for text in TEMPLATES], listing)


def instances_of_rows(paths: Sequence[Path], trusted: frozenset[str] = frozenset((DOCKER_HUB,))) -> list[Instance]:
    """Return the instances of row files, each once; `trusted` are the registries that rows may name.

    Raises `DataError` with every wrong row: of an unknown family, or with an image in another registry; and where no
    row needs an image.
    """
    instances: dict[str, Instance] = {}
    problems: list[Problem] = []
    for path in paths:
        if not path.is_file():
            fix = "run `make data BLEND=...` first, or name another file"
            problems.append(Problem(where=str(path), wrong="there is no such file", fix=fix))
            continue
        for number, facts in _facts_of(path, problems):
            where = f"{path}:{number}: {facts['instance_id']}"
            try:
                instance = instance_from(facts)
            except ValueError as error:
                fix = "add the family to recipes/environments/swe/hidden_tests.py, or `docker_image` to the row"
                problems.append(Problem(where=where, wrong=str(error), fix=fix))
                continue
            if instance.reference.host not in trusted:
                problems.append(_untrusted(where, instance.reference.host, trusted))
            instances.setdefault(instance.id, instance)
    everywhere = " and ".join(str(path) for path in paths)
    if not (instances or problems):
        wrong = "no row has responses_create_params.metadata.instance_id, so none needs an image"
        problems.append(
            Problem(where=everywhere, wrong=wrong, fix="name the rows of a SWE blend: BLEND=swe2, or ROWS=FILE")
        )
    if (hidden := len(problems) - MAX_PROBLEMS) > 0:
        problems[MAX_PROBLEMS:] = [Problem(where=everywhere, wrong=f"{hidden} more rows are wrong", fix=VALIDATE)]
    if problems:
        raise DataError(problems)
    return list(instances.values())


def _untrusted(where: str, host: str, trusted: frozenset[str]) -> Problem:
    fix = f"remove the row, or, if you trust that registry, set {REGISTRIES}={host}"
    return Problem(where=where, got=f"an image in {host}", expected=" or ".join(sorted(trusted)), fix=fix)


def _facts_of(path: Path, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, facts of the instance) of the rows whose agent works in an image."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = orjson.loads(line)
                metadata = row["responses_create_params"].get("metadata") or {}
                if not isinstance(metadata.get("instance_id"), str):
                    continue
                yield number, {**row, **metadata, **_instance_dict(metadata)}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                wrong = f"not a row of a SWE data set ({type(error).__name__}: {error})"
                problems.append(Problem(where=f"{path}:{number}", wrong=wrong, fix=VALIDATE))


def _instance_dict(metadata: Mapping[str, Any]) -> dict[str, Any]:
    value = json.loads(metadata.get("instance_dict") or "{}")
    if not isinstance(value, dict):
        raise TypeError(f"instance_dict is a {type(value).__name__}")
    return {**value, "instance_id": metadata["instance_id"]}


def instance_from(facts: Mapping[str, Any]) -> Instance:
    """Return the instance that a row's facts describe; raises `ValueError` for an unknown family or a wrong name."""
    name = str(facts["instance_id"])
    family = family_of(str(facts.get("dataset_name") or ""))
    image = next((str(facts[key]) for key in IMAGE_KEYS if facts.get(key)), None)
    if family == SWE_BENCH:
        written = name.replace("__", "_1776_")
        default = f"swebench/sweb.eval.x86_64.{written}"
    elif family == SWE_GYM:
        written = name.replace("__", "_s_")
        default = f"xingyaoww/sweb.eval.x86_64.{written}"
    else:
        written = next((way for way in candidates(name) if "_final_" in way), name)
        repository, is_final, commit = written.rpartition("_final_")
        if not (image or is_final):
            raise ValueError(f"{name!r} is not an R2E-Gym instance, which is ORGANISATION__REPOSITORY-COMMIT")
        default = f"namanjain12/{repository}_final:{commit}"
    file = TEMPLATE[family].replace("{instance_id}", written)
    if "/" in file or "\0" in file:
        raise ValueError(f"instance_id {name!r} cannot be part of a file name")
    return Instance(id=name, reference=Reference.parse(image or default), file=file, facts=facts)
