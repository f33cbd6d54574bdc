"""What a worker does with one block of a split: check and count every row, and compare it with the validation rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from recipes.types import Row
from tools.files.parallel import Block
from tools.rows.checks import FAILURES, RowChecker
from tools.rows.overlap import ValidationTexts, request_key, text_of
from tools.rows.pass_rates import pass_rate_of
from tools.rows.stats import FileStats


@dataclass(slots=True)
class BlockFindings:
    """What was found in one block; lines are numbered from 1 within the block."""

    stats: FileStats = field(default_factory=FileStats)
    findings: list[tuple[int, str, str]] = field(default_factory=list)  # line, kind, text
    keys: list[tuple[int, bytes]] = field(default_factory=list)  # line, digest of the request
    texts: list[tuple[int, str]] = field(default_factory=list)  # line, text; of the validation file only
    contaminated: list[tuple[int, int, str]] = field(default_factory=list)  # line, validation line, what was found


@dataclass(slots=True)
class BlockChecker:
    """Checks the blocks of one file.

    `held_out` are the texts of the validation rows to compare with. Without them the file is the validation file, whose
    texts are returned.
    """

    path: Path
    tokenizer: Path | None
    held_out: list[tuple[int, str]] | None = None
    instances: Mapping[str, Any] = field(default_factory=dict)  # servers and agents that read the rows
    is_complete: bool = True  # False: a file of another blend, whose rows are compared but not checked
    _tools: tuple[RowChecker, ValidationTexts] | None = None

    def __call__(self, block: Block) -> BlockFindings:
        if self._tools is None:  # made in each worker: a codec is not picklable, and hashes of texts differ there
            self._tools = (
                RowChecker.for_tokenizer(self.tokenizer, self.instances),
                ValidationTexts.of(self.held_out or ()),
            )
        checker, held_out = self._tools
        held_out.forget()
        checked = BlockFindings()
        for number, line in enumerate(block.read(self.path).removesuffix(b"\n").split(b"\n"), start=1):
            checked.stats.num_lines = number
            row, is_sound = self._check(checker, line, number, checked)
            if row is None:
                continue
            checked.keys.append((number, request_key(row)))
            try:
                text = text_of(row)
            except FAILURES:
                assert not (is_sound and self.is_complete)  # such a row was reported by the environment's check
                continue
            if not text:
                continue
            if self.held_out is None:
                checked.texts.append((number, text))
            else:
                checked.contaminated += [(number, held, what) for held, what in held_out.found_in(text)]
        return checked

    def _check(self, checker: RowChecker, line: bytes, number: int, checked: BlockFindings) -> tuple[Row | None, bool]:
        """Return the row, None when it does not have the shape of a row, and whether its environment can read it."""
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
    """Return a row of another blend, or None when it cannot be compared."""
    try:
        row: Row = orjson.loads(line)
        request_key(row)
    except FAILURES:
        return None
    return row
