"""Which image every SWE task needs: its name in a registry, and the file that the agent will look for.

A row says from which data set its instance is. The three families name their images in three ways; a row that holds
the name of its image itself (`docker_image`, as R2E-Gym has it) is believed. How a file must be called so that it is
found again is the rule of names.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from recipes.errors import DataError, Problem
from tools.sif.names import TEMPLATES, Listing, candidates, find_image

DOCKER_HUB = "docker.io"
MAX_PROBLEMS = 20  # shown one by one
NAMED = ("docker_image", "image_name")  # keys under which a row names its image
LOCAL_HOST = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")
SWE_BENCH, SWE_GYM, R2E_GYM = "swebench", "swegym", "r2egym"  # the beginnings of the file names
TEMPLATE = {template.partition("_")[0]: template for template in TEMPLATES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The name of an image in a registry."""

    host: str
    repository: str
    tag: str = "latest"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a name as docker does: without a host it is on Docker Hub; a repository is lower-case, a tag as it is.

        Raises `ValueError` when nothing is left of it.
        """
        first, slash, rest = text.partition("/")
        is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
        host, path = (first, rest) if is_host else (DOCKER_HUB, text)
        repository, colon, tag = path.partition(":")
        if not repository or (colon and not tag):
            raise ValueError(f"{text!r} is no name of an image")
        if host == DOCKER_HUB and "/" not in repository:
            repository = f"library/{repository}"
        return cls(host=host, repository=repository.lower(), tag=tag or "latest")

    def behind(self, mirror: str) -> Reference:
        """Return the name under a mirror, given as host[:port][/prefix]."""
        host, _, prefix = mirror.rstrip("/").partition("/")
        return replace(self, host=host, repository=f"{prefix}/{self.repository}".lstrip("/"))

    @property
    def api(self) -> str:
        """The address of the repository; plain HTTP for this machine only, as docker does it."""
        host = "registry-1.docker.io" if self.host == DOCKER_HUB else self.host
        scheme = "http" if LOCAL_HOST.match(self.host) else "https"
        return f"{scheme}://{host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}:{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One instance of a SWE task."""

    instance: str
    reference: Reference
    file: str  # name of the SIF file that is made
    facts: Mapping[str, Any]  # of the row: base_commit, patch, test_patch, FAIL_TO_PASS, ...

    @property
    def family(self) -> str:
        return self.file.partition("_")[0]

    def existing(self, directory: Path, listing: Listing) -> Path | None:
        """Return the file that an agent would find for it."""
        return find_image(self.instance, [str(directory / text) for text in TEMPLATES], listing)


def tasks_of_rows(paths: Sequence[Path]) -> list[Task]:
    """Return the tasks of row files, each once; raises `DataError` for rows whose image has no name, and for none."""
    tasks: dict[str, Task] = {}
    problems: list[Problem] = []
    for path in paths:
        if not path.is_file():
            fix = "run `make data BLEND=...` first, or name another file"
            problems.append(Problem(where=str(path), got="no such file", expected="a JSONL file of rows", fix=fix))
            continue
        for number, facts in _facts_of(path, problems):
            try:
                task = task_of(facts)
            except ValueError as error:
                fix = "add the family to tools/sif/wanted.py, or `docker_image` to the row"
                where = f"{path}:{number}: {facts['instance_id']}"
                problems.append(Problem(where=where, got=str(error), expected="a known family", fix=fix))
                continue
            tasks.setdefault(task.instance, task)
    if not (tasks or problems):
        where, fix = " and ".join(str(path) for path in paths), "name the rows of a SWE blend: BLEND=swe2, or ROWS=FILE"
        expected = "rows with responses_create_params.metadata.instance_id"
        problems.append(Problem(where=where, got="no row of a SWE task", expected=expected, fix=fix))
    if (hidden := len(problems) - MAX_PROBLEMS) > 0:
        where, fix = " and ".join(str(path) for path in paths), "`make data-validate` names every wrong row"
        problems[MAX_PROBLEMS:] = [Problem(where=where, got=f"{hidden} more wrong rows", expected="none", fix=fix)]
    if problems:
        raise DataError(problems)
    return list(tasks.values())


def _facts_of(path: Path, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, facts of the instance) of the rows that an agent works on in an image."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = orjson.loads(line)
                metadata = row["responses_create_params"].get("metadata") or {}
                if not isinstance(metadata.get("instance_id"), str):
                    continue
                yield number, {**row, **metadata, **_instance_dict(metadata)}
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                fix = "`make data-validate` names every wrong row"
                got = f"{type(error).__name__}: {error}"
                problems.append(Problem(where=f"{path}:{number}", got=got, expected="a row of a SWE task", fix=fix))


def _instance_dict(metadata: Mapping[str, Any]) -> dict[str, Any]:
    value = json.loads(metadata.get("instance_dict") or "{}")
    if not isinstance(value, dict):
        raise TypeError(f"instance_dict is a {type(value).__name__}")
    return {**value, "instance_id": metadata["instance_id"]}


def task_of(facts: Mapping[str, Any]) -> Task:
    """Return the task of one instance; raises `ValueError` for a family that is not known."""
    instance = str(facts["instance_id"])
    family = family_of(str(facts.get("dataset_name") or ""))
    named = next((str(facts[key]) for key in NAMED if facts.get(key)), None)
    if family == SWE_BENCH:
        name, way = f"swebench/sweb.eval.x86_64.{instance.replace('__', '_1776_')}", instance.replace("__", "_1776_")
    elif family == SWE_GYM:
        name, way = f"xingyaoww/sweb.eval.x86_64.{instance.replace('__', '_s_')}", instance.replace("__", "_s_")
    else:
        way = next((way for way in candidates(instance) if "_final_" in way), instance)
        repository, is_final, commit = way.rpartition("_final_")
        if not (named or is_final):
            raise ValueError("an R2E-Gym instance that is not ORGANISATION__REPOSITORY-COMMIT")
        name = f"namanjain12/{repository}_final:{commit}"
    file = TEMPLATE[family].replace("{instance_id}", way)
    return Task(instance=instance, reference=Reference.parse(named or name), file=file, facts=facts)


def family_of(dataset: str) -> str:
    """Return the family of a data set; raises `ValueError` for one that is not known."""
    for part, family in (("R2E-Gym", R2E_GYM), ("SWE-Gym", SWE_GYM), ("SWE-bench", SWE_BENCH)):
        if part.lower() in dataset.lower():
            return family
    raise ValueError(f"dataset_name {dataset!r}")
