"""The sources of placeholder questions: data sets on the hub at a pinned commit, or files on this machine.

Only the needed rows are kept in memory, and parquet files are read one row group at a time.

The restored questions of one fill, in a temporary SQLite file that every worker process reads.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem
from recipes.retry import RetryPolicy
from tools.data.files.manifest import TOOL_VERSION, changes, read_manifest, write_manifest
from tools.data.files.tables import read_yaml_table
from tools.data.files.transfer import commit_of, download_file, is_commit, list_all_files, no_commit
from tools.data.placeholders import nested, restore_answer

_TABLE = "CREATE TABLE questions (source TEXT, row INTEGER, question TEXT, answer TEXT, PRIMARY KEY (source, row))"


@dataclass(slots=True)
class Questions:
    """A file of (question, answer) by source name and row. It is removed when the `with` block ends.

    Each process opens its own connection at the first `find`.
    """

    path: Path
    _connection: sqlite3.Connection | None = None

    def __getstate__(self) -> Path:
        """Pickle the path only: a connection cannot be sent to another process."""
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path, self._connection = path, None

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self.path.unlink(missing_ok=True)

    def find(self, source: str, row: int) -> tuple[str, str] | None:
        """Return question and answer of a source row, or None when the source lacks one of them."""
        if self._connection is None:
            self._connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        found: tuple[str, str] | None = self._connection.execute(
            "SELECT question, answer FROM questions WHERE source = ? AND row = ?", (source, row)
        ).fetchone()
        return found


def restore(
    path: Path, sources: Mapping[str, Source], files: Mapping[str, Sequence[Path]], needed: Mapping[str, set[int]]
) -> dict[str, dict[str, str]]:
    """Write the needed questions that the sources have to `path`; return the sha256 of each, by source and row."""
    path.unlink(missing_ok=True)  # a killed run may have left it
    hashes: dict[str, dict[str, str]] = {}
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")  # the file is made again after a power cut
        connection.execute(_TABLE)
        for name, rows in needed.items():
            source, found = sources[name], hashes.setdefault(name, {})
            for row, record in read_records(source, files[name], rows):
                question, answer = nested(record, source.question), restore_answer(nested(record, source.answer))
                if isinstance(question, str) and question and answer:
                    connection.execute("INSERT INTO questions VALUES (?, ?, ?, ?)", (name, row, question, answer))
                    found[str(row)] = hashlib.sha256(question.encode()).hexdigest()
        connection.commit()
    return hashes


STYLES = ("dapo", "skywork")
BATCH_ROWS = 4096  # rows of a parquet file in memory at once
KEYS = {"path", "dataset", "revision", "split", "style", "question", "answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set that holds the questions of one `dataset` name in a blend."""

    name: str
    style: str  # of the templates of its placeholders: dapo | skywork
    split: str
    question: tuple[str | int, ...]  # path of the question inside a record
    answer: tuple[str | int, ...]
    path: Path | None = None  # a directory laid out like a hub data set, or one .parquet or .jsonl file
    dataset: str | None = None  # name on the hub
    revision: str | None = None  # its commit
    moving_revision: str | None = None  # the branch that pointed to `revision` when the fill ran

    def as_parameters(self) -> dict[str, Any]:
        """Return what a manifest records about the source."""
        moving = {"moving_revision": self.moving_revision} if self.moving_revision else {}
        return moving | {
            "dataset": self.dataset or (self.path.name if self.path else None),
            "revision": self.revision,
            "split": self.split,
            "style": self.style,
            "question": list(self.question),
            "answer": list(self.answer),
        }


def load_sources(path: Path) -> dict[str, Source]:
    """Read a table of sources; local paths in it are relative to the table. Raises `DataError` with every problem."""
    entries = read_yaml_table(path, "sources", like="configs/data/placeholders.yaml")
    problems: list[Problem] = []
    sources = {name: _source(path, name, entry, problems) for name, entry in entries.items()}
    if problems:
        raise DataError(problems)
    return {name: source for name, source in sources.items() if source is not None}


def _source(file: Path, name: str, entry: Any, problems: list[Problem]) -> Source | None:
    where, before = f"{file}: sources.{name}", len(problems)

    def wrong(key: str, expected: str) -> None:
        if key in entry:
            fix = "correct the entry"
            problems.append(Problem(where=f"{where}.{key}", got=repr(entry[key]), expected=expected, fix=fix))
        else:
            problems.append(Problem(where=f"{where}.{key}", wrong="this key is missing", fix=f"give {expected}"))

    if not isinstance(entry, dict):
        problems.append(Problem(where=where, got=repr(entry), expected="a mapping", fix="correct the entry"))
        return None
    for key in sorted(entry.keys() - KEYS):
        wrong(key, "one of " + ", ".join(sorted(KEYS)))
    if entry.get("style") not in STYLES:
        wrong("style", "dapo or skywork")
    if ("path" in entry) == ("dataset" in entry):
        wrong("path", "either `path` or `dataset`")
    if "dataset" in entry and not isinstance(entry.get("revision"), str):
        wrong("revision", "a commit of the data set")
    for key in ("question", "answer"):
        if not isinstance(entry.get(key), list) or not entry[key]:
            wrong(key, "a list: the keys and indices that lead to the value inside a record")
    if len(problems) > before:
        return None
    return Source(
        name=name,
        style=entry["style"],
        split=entry.get("split", "train"),
        question=tuple(entry["question"]),
        answer=tuple(entry["answer"]),
        path=(file.parent / entry["path"]) if "path" in entry else None,
        dataset=entry.get("dataset"),
        revision=entry.get("revision"),
    )


def pinned(source: Source, sources_file: Path, *, allow_moving: bool) -> Source:
    """Return the source at a commit; a branch is refused, or with `allow_moving` resolved to its current commit."""
    if source.dataset is None or is_commit(source.revision):
        return source
    assert source.revision is not None
    where = f"{sources_file}: sources.{source.name}.revision"
    commit = pinned_commit(source.dataset, source.revision, where, allow_moving=allow_moving)
    return replace(source, revision=commit, moving_revision=source.revision)


def pinned_commit(dataset: str, revision: str, where: str, *, allow_moving: bool) -> str:
    """Return the commit of a revision; a branch is refused, or with `allow_moving` resolved to its current commit."""
    if is_commit(revision):
        return revision
    if not allow_moving:
        url = f"https://huggingface.co/datasets/{dataset}/commits/{revision}"
        fix = f"take the commit from {url}, or add --allow-moving-revision, which prints and records the commit"
        raise DataError(no_commit(where, revision, fix=fix))
    commit = commit_of(dataset, revision, RetryPolicy())
    print(f"sources: {dataset} {revision} is now at commit {commit}, and may move")
    return commit


def source_files(source: Source, cache: Path) -> list[Path]:
    """Return the data files of a source, in row order; files on the hub are downloaded to `cache`."""
    if source.path is None:
        assert source.dataset is not None
        assert source.revision is not None
        return download_split(source.dataset, source.revision, source.split, cache)
    if source.path.is_file():
        return [source.path]
    if not source.path.is_dir():
        wrong, fix = "there is no such file or directory", "correct `path` in the table of sources"
        raise DataError(Problem(where=str(source.path), wrong=wrong, fix=fix))
    names = [file.relative_to(source.path).as_posix() for file in source.path.rglob("*") if file.is_file()]
    return [source.path / name for name in _files_of(source.split, names, str(source.path))]


def download_split(dataset: str, revision: str, split: str, cache: Path) -> list[Path]:
    """Download the parquet files of a split to `cache`, unless they are up to date; return them in row order."""
    policy = RetryPolicy()
    directory = cache / dataset / revision
    manifest_file = directory / f"{split}.manifest.json"
    parameters = {"dataset": dataset, "revision": revision, "split": split}
    known = {"tool": "sources", "tool_version": TOOL_VERSION, "parameters": parameters}
    if changes(manifest_file, known):
        _, listed = list_all_files(dataset, revision, policy)
        outputs = []
        for name in _files_of(split, list(listed), f"{dataset}@{revision[:12]}"):
            received = download_file(listed[name], directory / name, policy)
            outputs.append({"file": name, "sha256": received.sha256, "bytes": received.size})
        write_manifest(manifest_file, {**known, "outputs": outputs})
    manifest = read_manifest(manifest_file)
    assert manifest is not None
    return [directory / output["file"] for output in manifest["outputs"]]


def _files_of(split: str, names: Sequence[str], where: str) -> list[str]:
    """Return the files of a split, found by the first known layout that matches any file."""
    layouts = (f"data/{split}-*.parquet", "data/*.parquet", f"{split}/*.parquet", f"default/{split}/*.parquet")
    for layout in layouts:
        if found := sorted(name for name in names if fnmatch.fnmatchcase(name, layout)):
            return found
    wrong = f"it has no parquet files of split {split} ({' or '.join(layouts)})"
    raise DataError(Problem(where=where, wrong=wrong, fix="correct `split` of the source"))


def read_records(
    source: Source, files: Sequence[Path], rows: Collection[int]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (row number, record) for those of `rows` that the files have; numbers run on from file to file."""
    first = 0
    columns = sorted({str(source.question[0]), str(source.answer[0])})
    for file in files:
        reader = _jsonl_records if file.suffix == ".jsonl" else _parquet_records
        count = -1
        for count, record in reader(file, columns, {row - first for row in rows}):
            if record is not None:
                yield first + count, record
        first += count + 1


def _jsonl_records(
    file: Path, columns: Sequence[str], rows: Collection[int]
) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            yield number, _record(line, f"{file}:{number + 1}") if number in rows else None


def _record(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__}")
    except (ValueError, RecursionError) as error:
        fix = "fetch it again: the file is damaged or was edited"
        raise DataError(Problem(where=where, wrong=f"it is no JSON object ({error})", fix=fix)) from error
    return record


def _parquet_records(
    file: Path, columns: Sequence[str], rows: Collection[int]
) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """Yield (row number, record) for `rows`, then (number of the last row, None); one batch is in memory at a time."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    with parquet.ParquetFile(file) as table:
        first = 0
        for group in range(table.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            if any(row in rows for row in range(first, first + size)):
                start = first
                for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(columns)):
                    here = [row for row in range(start, start + batch.num_rows) if row in rows]
                    records = batch.take([row - start for row in here]).to_pylist() if here else []
                    yield from zip(here, records, strict=True)
                    start += batch.num_rows
            first += size
        yield first - 1, None
