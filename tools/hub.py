"""Models and rows by their names on the hub: which text is a name, and where in the cache lies what was fetched.

    org/name          what its main branch held when it was fetched first
    org/name@COMMIT   that commit, or that of a branch or tag when it was fetched first
    org/name:FOLDER   of rows: only the files below it

A text is a path where one is there, where it begins with `/`, `.` or `~`, ends like a file of rows, or begins with a
directory that is here or that commands make here (`PLACES`). The cache has huggingface_hub's layout, so what `hf
download` fetched is found, too. Nothing here asks the hub: `make fetch` does, and commands that start something long.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.files import read_object

MODEL, ROWS = "model", "dataset"  # kinds of repositories, as the hub calls them
ROW_SUFFIXES = (".jsonl", ".parquet", ".csv", ".json")
PLACES = ("data", "models", "results")
FETCHED = "fetched"  # directory beside `snapshots`: the files of one fetch, by commit and folder
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository, or a part of it, at a revision."""

    repository: str
    revision: str = "main"
    folder: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return self.repository + at + (f":{self.folder}" if self.folder else "")


def hub_name(text: str) -> HubName | None:
    """Return the name that a text is; None for a path."""
    found, first = _NAME.fullmatch(text), text.partition("/")[0]
    if not found or text.endswith(ROW_SUFFIXES) or Path(text).exists() or first in PLACES or Path(first).is_dir():
        return None
    return HubName(repository=found[1], revision=found[2] or "main", folder=(found[3] or "").strip("/"))


def repository_directory(name: HubName, kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of a repository in the cache."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{base}/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser().absolute()
    return cache / f"{kind}s--{name.repository.replace('/', '--')}"


def commit_in_cache(name: HubName, directory: Path) -> str:
    """Return the commit of a revision when it was fetched; empty where it was not."""
    if _COMMIT.fullmatch(name.revision):
        return name.revision
    ref = directory / "refs" / name.revision
    found = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    return found if _COMMIT.fullmatch(found) else ""


def cached_model(name: HubName, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of a fetched model; its config.json comes last."""
    directory = repository_directory(name, MODEL, environ)
    found = directory / "snapshots" / commit_in_cache(name, directory)
    return found if found.parent.name == "snapshots" and (found / "config.json").is_file() else None


def cached_rows(name: HubName, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the fetched files of rows, in their order; none where they were not fetched."""
    directory = repository_directory(name, ROWS, environ)
    commit = commit_in_cache(name, directory)
    files = read_object(fetch_record(directory, commit, name.folder)).get("files", [])
    found = [directory / "snapshots" / commit / str(file) for file in files]
    return found if all(file.is_file() for file in found) else []


def fetch_record(directory: Path, commit: str, folder: str) -> Path:
    """Return the file that says which files of rows a fetch has chosen; it is written last."""
    return directory / FETCHED / f"{commit}{('-' + folder.replace('/', '--')) if folder else ''}.json"


def model_path(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory of a model that was fetched, else the text."""
    name = hub_name(text)
    found = cached_model(name, environ) if name else None
    return str(found or text)


def origin_of(path: Path) -> str:
    """Return the name and the commit of what lies in the cache of the hub; empty for another path."""
    found = _SNAPSHOT.search(str(path))
    return f"{found[1]}/{found[2]}@{found[3]}" if found else ""


def taken_for(text: str, variable: str) -> tuple[str, str]:
    """Return what a text that leads nowhere was taken for, and what to do about it."""
    if name := hub_name(text):
        wrong = f"no such path, so it is a name on the hub, and {name} is not in the cache"
        return wrong, f"run `make fetch {variable}={text}`, or correct the path"
    return "it is taken for a path, and nothing is there", "correct the path, or give a name on the hub: org/name"
