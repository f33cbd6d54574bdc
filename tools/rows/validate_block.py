"""What a worker does with one block of a split: check every row, count it, and compare it with the held-out rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import orjson

from recipes.types import Row
from tools.files.parallel import Block
from tools.rows.checks import FAILURES, RowChecker
from tools.rows.overlap import HeldOut, request_key, text_of
from tools.rows.pass_rates import pass_rate_of
from tools.rows.stats import FileStats


@dataclass(slots=True)
class Checked:
    """What was found in one block; line numbers count from 1 in the block."""

    stats: FileStats = field(default_factory=FileStats)
    findings: list[tuple[int, str, str]] = field(default_factory=list)  # line, kind, text
    keys: list[tuple[int, bytes]] = field(default_factory=list)  # line, digest of the request
    texts: list[tuple[int, str]] = field(default_factory=list)  # of a file whose rows are held out
    known: list[tuple[int, int, str]] = field(default_factory=list)  # line, held-out line that it gives away, how


@dataclass(slots=True)
class CheckRows:
    """Checks the blocks of one file. `held_out` are the rows to compare with; without it, the file's own texts come."""

    path: Path
    tokenizer: Path | None
    held_out: list[tuple[int, str]] | None = None
    is_complete: bool = True  # False: of another blend, whose rows are only compared
    _tools: tuple[RowChecker, HeldOut] | None = None

    def __call__(self, block: Block) -> Checked:
        if self._tools is None:  # once per worker: a codec is not picklable, and runs are hashed per process
            self._tools = RowChecker.for_tokenizer(self.tokenizer), HeldOut.of(self.held_out or ())
        checker, held_out = self._tools
        held_out.forget()
        checked = Checked()
        for number, line in enumerate(block.read(self.path).removesuffix(b"\n").split(b"\n"), start=1):
            checked.stats.num_lines = number
            row, is_sound = self._check(checker, line, number, checked)
            if row is None:
                continue
            checked.keys.append((number, request_key(row)))
            try:
                text = text_of(row)
            except FAILURES:
                assert not (is_sound and self.is_complete)  # what is unreadable here was unreadable to the environment
                continue
            if not text:
                continue
            if self.held_out is None:
                checked.texts.append((number, text))
            else:
                checked.known += [(number, held, how) for held, how in held_out.known_by(text)]
        return checked

    def _check(self, checker: RowChecker, line: bytes, number: int, checked: Checked) -> tuple[Row | None, bool]:
        """Return the row, None when it has not even the shape, and whether its environment can read it."""
        if not self.is_complete:
            return readable(line), True
        row, found = checker.check(line)
        checked.findings += [(number, kind, text) for kind, text in found]
        if row is None:
            return None, False
        is_sound = all(kind != "environment" for kind, _ in found)
        length = len(orjson.dumps(row["responses_create_params"])) if checker.codec is None else None
        if checker.codec is not None and is_sound:
            try:
                length = checker.num_tokens(row)
            except Exception as error:  # a template may refuse a conversation in any way
                checked.findings.append((number, "length", f"a request that the chat template refuses ({error})"))
        checked.stats.count(row, number, length=length, pass_rate=pass_rate_of(row))
        return row, is_sound


def readable(line: bytes) -> Row | None:
    """Return a row of another blend as far as it can be compared, or None."""
    try:
        row: Row = orjson.loads(line)
        request_key(row)
    except FAILURES:
        return None
    return row
