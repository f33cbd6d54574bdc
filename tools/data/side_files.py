"""Files that verifiers read besides the rows (configs/data/side_files.yaml), each at a commit and checked by its hash.

    make side-files [NAME=workplace_assistant]

They are downloaded from GitHub's raw address, or from the address in GITHUB_RAW_ENDPOINT, and resume as blends do.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem, suggestion
from recipes.retry import RetryPolicy
from tools.command_line import exit_status
from tools.data.files.hosts import GITHUB
from tools.data.files.manifest import TOOL_VERSION, changes, write_manifest
from tools.data.files.tables import read_yaml_table
from tools.data.files.transfer import RemoteFile, download_file, is_commit, no_commit

SIDE_FILES = Path(__file__).resolve().parents[2] / "configs" / "data" / "side_files.yaml"
ENDPOINT = "https://raw.githubusercontent.com"
KEYS = {"blends", "repository", "revision", "path", "files"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFiles:
    """The files of one verifier."""

    name: str
    blends: tuple[str, ...]  # blends whose rows need them
    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


def load_side_files(path: Path) -> dict[str, SideFiles]:
    """Read the table; raises `DataError` with every wrong entry."""
    entries = read_yaml_table(path, "side_files", like="configs/data/side_files.yaml")
    problems = [problem for name, entry in entries.items() for problem in _problems(path, name, entry)]
    if problems:
        raise DataError(problems)
    return {name: _side_files(name, entry) for name, entry in entries.items()}


def _problems(path: Path, name: str, entry: Any) -> list[Problem]:
    where = f"{path}: side_files.{name}"
    if not isinstance(entry, dict) or entry.keys() != KEYS:
        got = ", ".join(sorted(map(str, entry))) if isinstance(entry, dict) and entry else repr(entry)
        return [Problem(where=where, got=got, expected=", ".join(sorted(KEYS)), fix="correct the entry")]
    if not isinstance(entry["files"], dict):
        got, expected = repr(entry["files"]), "a mapping of paths"
        return [Problem(where=f"{where}.files", got=got, expected=expected, fix="correct the entry")]
    found = []
    if not is_commit(entry["revision"]):
        fix = f"take the commit from https://github.com/{entry['repository']}/commits"
        found.append(no_commit(f"{where}.revision", entry["revision"], fix=fix))
    for file, facts in entry["files"].items():
        if str(file).startswith("/") or ".." in str(file).split("/"):
            expected = "a path below `path`"
            found.append(Problem(where=f"{where}.files", got=str(file), expected=expected, fix="correct the entry"))
        sha256, size = (facts.get("sha256"), facts.get("bytes")) if isinstance(facts, dict) else (None, None)
        if not re.fullmatch(r"[0-9a-f]{64}", str(sha256)) or type(size) is not int:
            expected = "`bytes` and `sha256` of the file"
            found.append(
                Problem(where=f"{where}.files.{file}", got=repr(facts), expected=expected, fix="correct the entry")
            )
    return found


def _side_files(name: str, entry: dict[str, Any]) -> SideFiles:
    endpoint = (os.environ.get(GITHUB.variable) or ENDPOINT).rstrip("/")
    repository, revision = entry["repository"], entry["revision"]
    base = f"{endpoint}/{repository}/{revision}/{entry['path']}"
    files = [
        RemoteFile(
            repository=repository,
            revision=revision,
            name=file,
            size=facts["bytes"],
            sha256=facts["sha256"],
            git_blob="",
            url=f"{base}/{file}",
        )
        for file, facts in sorted(entry["files"].items())
    ]
    blends = tuple(entry["blends"])
    return SideFiles(name=name, blends=blends, repository=repository, revision=revision, files=tuple(files))


def fetch(side: SideFiles, out: Path, policy: RetryPolicy) -> Path:
    """Download the files to `out`/NAME, with a manifest, unless they are up to date; return that directory."""
    directory = out / side.name
    manifest_file = directory / "manifest.json"
    known = {
        "tool": "side_files",
        "tool_version": TOOL_VERSION,
        "parameters": {"repository": side.repository, "revision": side.revision},
        "outputs": [{"file": file.name, "sha256": file.sha256, "bytes": file.size} for file in side.files],
    }
    if not (reasons := changes(manifest_file, known)):
        print(f"side_files: {directory} is up to date")
        return directory
    for file in side.files:
        download_file(file, directory / file.name, policy)
    write_manifest(manifest_file, known)
    print(f"side_files: {directory} (files: {len(side.files)}; {', '.join(reasons)})")
    return directory


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.side_files", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write one directory per verifier to")
    parser.add_argument("--name", help="verifier; default: all")
    parser.add_argument("--table", type=Path, default=SIDE_FILES, help="table of side files")
    parser.add_argument(
        "--back-off", type=float, default=RetryPolicy().first_seconds, help="seconds before the first retry"
    )
    options = parser.parse_args(arguments)
    table = load_side_files(options.table)
    if options.name and options.name not in table:
        expected, fix = f"one of {', '.join(table)}", suggestion(options.name, table)
        raise DataError(Problem(where="--name", got=options.name, expected=expected, fix=fix))
    for side in table.values():
        if options.name in (None, side.name):
            fetch(side, options.out, RetryPolicy(first_seconds=options.back_off))
    return 0


if __name__ == "__main__":
    sys.exit(main())
