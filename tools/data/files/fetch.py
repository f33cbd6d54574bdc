"""Fetch a model or rows by their name on the hub into its cache: `make fetch MODEL_PATH=org/name ROWS=org/name`.

    python -m tools.data.files.fetch [--model org/name[@REVISION]] [--rows org/name[@REVISION][:FOLDER]]

Each file is compared with the hash that the hub declares, a broken transfer goes on where it stopped, and what is in
the cache is not asked for again: a branch stays at the commit that it had. HF_ENDPOINT names a mirror, HF_HOME or
HF_HUB_CACHE the cache, HF_TOKEN a login. A path is left as it is. Exit status 2 where something cannot be fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from recipes.errors import DataError, InputError, Problem
from recipes.files import write_atomically
from recipes.retry import RetryPolicy
from tools import hub
from tools.command_line import exit_status
from tools.data.files.transfer import RemoteFile, download_file, list_all_files

# Of a model: weights in safetensors, settings, tokenizer, templates, code; no other forms of the same weights.
MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
TEMPLATES = "additional_chat_templates/"
OTHER_FORM = "consolidated"  # begins the names of weights that some repositories hold twice
CONFIG = "config.json"
TRAIN = "train"


def model_files(names: Iterable[str]) -> list[str]:
    """Return the files of a model repository that are fetched, its settings last: with them a model is complete."""
    kept = [
        name
        for name in names
        if name.endswith(MODEL_SUFFIXES)
        and ("/" not in name or name.startswith(TEMPLATES))
        and not name.startswith(OTHER_FORM)
    ]
    return sorted(kept, key=lambda name: (name == CONFIG, name))


def row_files(names: Collection[str], name: hub.HubName) -> list[str]:
    """Return the files of a data set that hold the rows to train on; raises `DataError` where that is not clear."""
    below = [one for one in names if not name.folder or one == name.folder or one.startswith(f"{name.folder}/")]
    found: list[str] = []
    for suffix in hub.ROW_SUFFIXES:
        if found := sorted(one for one in below if one.endswith(suffix) and not one.endswith("_infos.json")):
            break
    found = [one for one in found if TRAIN in one] or found
    folders = sorted({one.rpartition("/")[0] for one in found})
    if found and len(folders) == 1 and (len(found) == 1 or all(TRAIN in one for one in found)):
        return found
    wrong = f"several could be the rows: {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
    fix = f"give one of them: {name.repository}:{found[0]}, or a directory" if found else "give another data set"
    if not found:
        wrong = f"no rows in it{f' below {name.folder}' if name.folder else ''}: expected {', '.join(hub.ROW_SUFFIXES)}"
    raise DataError(Problem(where=str(name), wrong=wrong, fix=fix))


def fetch_model(name: hub.HubName) -> Path:
    """Return the directory of a model, fetched unless it is in the cache."""
    if found := hub.cached_model(name):
        return found
    directory, files = hub.repository_directory(name, hub.MODEL), list_model(name)
    _download(name, directory, files)
    return directory / "snapshots" / files[0].revision


def list_model(name: hub.HubName) -> list[RemoteFile]:
    """Return the files of a model on the hub, its settings last; raises `DataError` where it holds none."""
    _, listed = _listed(name, hub.repository_directory(name, hub.MODEL), hub.MODEL)
    names = model_files(listed)
    if CONFIG not in names or not any(one.endswith(".safetensors") for one in names):
        wrong, fix = "it holds no model: config.json and weights in safetensors", "give another model, or convert it"
        raise DataError(Problem(where=str(name), wrong=wrong, fix=fix))
    return [listed[one] for one in names]


def fetch_rows(name: hub.HubName) -> list[Path]:
    """Return the files of rows, fetched unless they are in the cache."""
    if found := hub.cached_rows(name):
        return found
    directory = hub.repository_directory(name, hub.ROWS)
    commit, listed = _listed(name, directory, hub.ROWS)
    names = row_files(listed, name)
    _download(name, directory, [listed[one] for one in names])
    content = json.dumps({"name": str(name), "files": names}).encode()
    write_atomically(hub.fetch_record(directory, commit, name.folder), content)
    return [directory / "snapshots" / commit / one for one in names]


def _listed(name: hub.HubName, directory: Path, kind: str) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of a name, the one of an earlier fetch where there was one, and its files."""
    revision = hub.commit_in_cache(name, directory) or name.revision
    try:
        return list_all_files(name.repository, revision, RetryPolicy(), kind=kind)
    except DataError as error:  # the user may have meant a path
        what = "model" if kind == hub.MODEL else "data set"
        taken = f"{name}, no path here, so taken for the name of a {what} on the hub"
        raise DataError([replace(problem, where=taken) for problem in error.problems]) from error


def _download(name: hub.HubName, directory: Path, files: list[RemoteFile]) -> None:
    """Receive the files of a snapshot; the branch keeps the commit from here on, so that all are of one."""
    commit = files[0].revision
    if name.revision != commit:
        write_atomically(directory / "refs" / name.revision, commit.encode())
    for file in files:
        download_file(file, directory / "snapshots" / commit / file.name, RetryPolicy())
    print(f"fetch: {name} at {commit}: {directory / 'snapshots' / commit}", file=sys.stderr)


def model_of(text: str) -> Path:
    """Return the path of a model, which need not be there, or the directory of one that is named on the hub."""
    name = hub.hub_name(text)
    return fetch_model(name) if name else Path(text)


def rows_of(text: str) -> list[Path]:
    """Return the files of rows given by path, or by name on the hub; raises `InputError` for a path of none."""
    name = hub.hub_name(text)
    if name is None and not Path(text).is_file():
        wrong, fix = hub.taken_for(text, "ROWS")
        raise InputError(Problem(where=text, wrong=wrong, fix=fix))
    return fetch_rows(name) if name else [Path(text)]


def rows_file(text: str) -> Path:
    """Return the one file of NeMo Gym rows that a path or a name on the hub stands for."""
    found = rows_of(text)
    if len(found) == 1 and found[0].suffix == ".jsonl":
        return found[0]
    got, expected = ", ".join(file.name for file in found), "one file of NeMo Gym rows (.jsonl)"
    fix = f"make rows of them: make data-import ROWS={text}"
    raise DataError(Problem(where=text, got=got, expected=expected, fix=fix))


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Fetch what is named, and print where it lies; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.files.fetch", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="", help="name of a model, or a path")
    parser.add_argument("--rows", default="", help="name of a data set, or a path")
    options = parser.parse_args(argv)
    problems: list[Problem] = []
    for text, fetch in ((options.model, model_of), (options.rows, rows_of)):
        try:
            found = fetch(text) if text else []
            for path in found if isinstance(found, list) else [found]:
                if not path.exists():
                    wrong, fix = hub.taken_for(text, "MODEL_PATH")
                    raise InputError(Problem(where=text, wrong=wrong, fix=fix))
                print(path)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return 0


if __name__ == "__main__":
    sys.exit(main())
