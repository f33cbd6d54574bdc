"""Training rows from JSONL, the order they are drawn in, and the check of a whole file before anything starts.

Invariant: given the file, the seed and `data.shuffle`, a position in the stream always means the same (epoch, row). So
a checkpoint stores positions, and a resumed run draws exactly the prompts that were not drawn before.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.errors import DataError, Problem, RunError
from recipes.types import PromptRef, Row

_MAX_PROBLEMS = 20
# Agents that write the prompt themselves: the input of their rows is empty.
WRITE_THE_PROMPT = frozenset({"swe_agents_train", "swe_agents_val"})


def row_id(row: Row) -> str:
    """Return the first 16 hex digits of the sha256 of the row's canonical JSON."""
    return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What decides which prompt a position of the stream is; a checkpoint holds it."""

    sha256: str  # of the whole file
    num_rows: int
    shuffle: bool
    seed: int


class PromptDataset:
    """Rows of one JSONL file, read on demand; only line offsets are kept in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file once: `sha256` is that of exactly the bytes whose lines are indexed here."""
        self.path = path
        self._offsets: list[int] = []
        self._file = path.open("rb")
        offset, digest = 0, hashlib.sha256()
        for line in self._file:
            if line.strip():
                self._offsets.append(offset)
            offset += len(line)
            digest.update(line)
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        """Return a row; raises `RunError` when it is not in the file any more."""
        self._file.seek(self._offsets[index])
        try:
            row: dict[str, Any] = orjson.loads(self._file.readline())
        except orjson.JSONDecodeError as error:
            changed = f"{self.path}: row {index + 1} cannot be read any more ({error}): the file was changed"
            raise RunError(f"{changed} during the run; restore it and start again") from error
        return row


class PromptStream:
    """`num_epochs` passes over a dataset as one numbered stream of prompts."""

    def __init__(self, dataset: PromptDataset, *, num_epochs: int, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._order: list[int] = []
        self._order_epoch = -1
        self.num_prompts = len(dataset) * num_epochs

    def draw(self, position: int) -> tuple[PromptRef, Row] | None:
        """Return the prompt at `position`, or None past the end of the last epoch."""
        if position >= self.num_prompts:
            return None
        epoch, offset = divmod(position, len(self.dataset))
        return self._prompt(epoch, self._permutation(epoch)[offset])

    def position_of(self, ref: PromptRef) -> int:
        """Return the position of a prompt that was drawn from this stream."""
        return ref.epoch * len(self.dataset) + self._permutation(ref.epoch).index(ref.row_index)

    def find(self, ref: PromptRef) -> tuple[PromptRef, Row] | None:
        """Return the prompt that is now where `ref` says, or None when there is no such row."""
        return self._prompt(ref.epoch, ref.row_index) if ref.row_index < len(self.dataset) else None

    def _prompt(self, epoch: int, index: int) -> tuple[PromptRef, Row]:
        row = self.dataset[index]
        return PromptRef(epoch=epoch, row_index=index, prompt_id=row_id(row)), row

    @property
    def identity(self) -> DataIdentity:
        """Return what a position of this stream depends on."""
        return DataIdentity(
            sha256=self.dataset.sha256, num_rows=len(self.dataset), shuffle=self._shuffle, seed=self._seed
        )

    def positions_of(self, prompt_ids: Mapping[str, int]) -> tuple[int, ...]:
        """Return the first n positions of each prompt id, where `prompt_ids` maps the id to n."""
        ids = [row_id(self.dataset[index]) for index in range(len(self.dataset))]
        left = Counter(prompt_ids)
        found = []
        for position in range(self.num_prompts):
            epoch, offset = divmod(position, len(ids))
            prompt_id = ids[self._permutation(epoch)[offset]]
            if left[prompt_id] > 0:
                left[prompt_id] -= 1
                found.append(position)
        return tuple(found)

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._order_epoch:
            self._order = list(range(len(self.dataset)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self._order


def check_file(path: Path, check_row: Callable[[Row], list[str]]) -> list[Problem]:
    """Return the problems of a data file, each with its line number; at most 20, with a count of the rest.

    `check_row` returns what is wrong with one row beyond its general shape (unknown agent, verifier fields).
    """
    if not path.is_file():
        fix = "run `make data`, or set TRAIN_PATH / VAL_PATH"
        return [Problem(where=str(path), wrong="there is no such file", fix=fix)]
    problems: list[Problem] = []
    num_rows = num_bad = 0
    for number, line in _lines(path):
        num_rows += 1
        found = check_line(line, check_row)
        num_bad += bool(found)
        if len(problems) < _MAX_PROBLEMS:
            problems += [
                Problem(where=f"{path}:{number}", wrong=what, fix="correct or remove the row") for what in found
            ]
    if num_bad > _MAX_PROBLEMS:
        more = f"{num_bad} of {num_rows} rows are wrong; only the first are listed"
        problems.append(Problem(where=str(path), wrong=more, fix="run `make data-validate` to see all"))
    if num_rows == 0:
        problems.append(Problem(where=str(path), wrong="the file has no rows", fix="run `make data` again"))
    return problems


def require_rows(path: Path, check_row: Callable[[Row], list[str]]) -> PromptDataset:
    """Open a data file after checking every row; raises `DataError` with all problems."""
    if problems := check_file(path, check_row):
        raise DataError(problems)
    return PromptDataset(path)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def check_line(line: bytes, check_row: Callable[[Row], list[str]]) -> list[str]:
    """Return what is wrong with one line of a data file."""
    try:
        row = orjson.loads(line)
    except json.JSONDecodeError as error:
        return [f"invalid JSON ({error})"]
    if not isinstance(row, dict):
        return [f"a JSON {type(row).__name__} instead of an object"]
    if "_hf_placeholder" in row:
        return ["an unfilled `_hf_placeholder`; run the fill step"]
    return _shape_problems(row) or check_row(row)


def _shape_problems(row: Row) -> list[str]:
    params, agent = row.get("responses_create_params"), row.get("agent_ref")
    items = params.get("input") if isinstance(params, dict) else None
    name = agent.get("name") if isinstance(agent, dict) else None
    if not isinstance(items, str | list) or (not items and (items == "" or name not in WRITE_THE_PROMPT)):
        return ["no `responses_create_params.input` (a string or a non-empty list of items)"]
    if not isinstance(name, str):
        return ["no `agent_ref.name`: nothing routes this row to an agent"]
    return []
