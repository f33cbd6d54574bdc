"""The restored questions of one fill, on disk: written once, then read by every worker process."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tools.data.placeholders import nested, restore_answer
from tools.data.sources import Source, read_records

_TABLE = "CREATE TABLE questions (source TEXT, row INTEGER, question TEXT, answer TEXT, PRIMARY KEY (source, row))"


@dataclass(slots=True)
class Questions:
    """A file of (question, answer) by source name and row, gone when the block ends.

    A connection is opened where it is first needed.
    """

    path: Path
    _connection: sqlite3.Connection | None = None

    def __getstate__(self) -> Path:
        """Cross to another process as a path."""
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
        """Return question and answer, or None when the source has not both."""
        if self._connection is None:
            self._connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        found: tuple[str, str] | None = self._connection.execute(
            "SELECT question, answer FROM questions WHERE source = ? AND row = ?", (source, row)
        ).fetchone()
        return found


def restore(
    path: Path, sources: Mapping[str, Source], files: Mapping[str, Sequence[Path]], needed: Mapping[str, set[int]]
) -> dict[str, dict[str, str]]:
    """Write the questions that are needed and there to `path`; return the sha256 of each, by source and row."""
    path.unlink(missing_ok=True)  # of a run that was killed
    hashes: dict[str, dict[str, str]] = {}
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")  # a file that does not outlive this run
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
