"""The restored questions of one fill, in a temporary SQLite file that every worker process reads."""

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
