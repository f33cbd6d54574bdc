"""Make rows of your own ready for training: `make data-import ROWS=my.jsonl REWARD=my_reward.py`.

    python -m tools.data.import_rows --rows FILE --out data/NAME [--reward FILE | --agent NAME] [--fields question=q]

FILE is JSON lines, one JSON list, CSV or Parquet, or a data set on the hub (org/name). A line may be a NeMo Gym row, an
OpenAI chat (`messages`), or a question with its answer under one of the usual names; `--fields` says others. All
further columns stay in the row for the reward. Writes train-split.jsonl, val-split.jsonl and manifest.json as `make
data` does, and a copy of the reward beside them; it prints what became of each column. Exit status 2 for rows that
cannot be used, with every kind of wrong row.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from recipes import exact_json
from recipes.errors import DataError, InputError, Problem
from recipes.files import atomic_writer, write_atomically
from tools.command_line import exit_status
from tools.data.files.fetch import rows_of
from tools.data.files.manifest import TOOL_VERSION, describe, manifest_of, write_manifest
from tools.data.split import split
from tools.hub import origin_of

QUESTIONS = ("question", "prompt", "problem", "instruction", "query", "input")
ANSWERS = ("expected_answer", "answer", "solution", "target", "output", "completion", "response", "label")
PARAMS, AGENT_REF, MESSAGES = "responses_create_params", "agent_ref", "messages"
REWARD_AGENT = "reward_simple_agent"
ROWS_FILE = "rows.jsonl"
MAX_CELL = 1 << 27  # characters
MAX_SHOWN = 8  # kinds of wrong rows in a message
VALIDATION_SHARE, MAX_VALIDATION = 10, 100  # one row in ten, at most a hundred

Row = dict[str, Any]


def records_of(path: Path) -> Iterator[Row]:
    """Yield every record of a file; raises `DataError` for a file that cannot be read as what its name says."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet  # type: ignore[import-untyped]

            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        elif path.suffix == ".csv":
            csv.field_size_limit(MAX_CELL)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        elif path.suffix == ".json":
            found = exact_json.loads(path.read_bytes())
            yield from found if isinstance(found, list) else [found]
        else:
            with path.open("rb") as file:
                yield from (exact_json.loads_row(line) for line in file if line.strip())
    except (OSError, ValueError, RecursionError, csv.Error) as error:  # those of pyarrow are ValueErrors or OSErrors
        expected = "JSON lines, one JSON list (.json), .csv or .parquet"
        wrong = f"it cannot be read: {type(error).__name__}: {error}"
        raise DataError(Problem(where=str(path), wrong=wrong, expected=expected, fix="correct the file")) from error


class Converter:
    """Turns records into rows, and counts what it did with each column."""

    def __init__(self, *, agent: str, columns: Mapping[str, str]) -> None:
        self._agent, self._columns = agent, columns
        self.uses: Counter[tuple[str, str]] = Counter()  # (column, what became of it)

    def row(self, record: object) -> Row:
        """Return the row of a record; raises `ValueError` that says what it lacks."""
        if not isinstance(record, dict):
            raise ValueError(f"got {type(record).__name__}, expected an object")
        if None in record:  # as csv names cells beyond the last column
            raise ValueError(f"it has more cells than columns: {record[None]!r:.60}")
        if PARAMS in record:
            row = dict(record)
            self.uses[PARAMS, "kept: it is a NeMo Gym row"] += 1
        elif chat := next((name for name in (MESSAGES, *self._questions(record)) if _is_chat(record.get(name))), ""):
            row = self._from_chat(record, chat)
        elif MESSAGES in record:
            got = f"{record[MESSAGES]!r:.60}"
            raise ValueError(f"column {MESSAGES!r}: got {got}, expected a list of messages with a role")
        else:
            row = self._from_question(record)
        if self._agent or AGENT_REF not in row:
            row[AGENT_REF] = {"type": "responses_api_agents", "name": self._required_agent()}
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a value of it cannot be written as JSON: {error}") from error
        return row

    def _questions(self, record: Row) -> list[str]:
        """Return the columns that hold the question: the one that is named, else those of the usual names."""
        named = self._columns.get("question")
        return [named] if named else [name for name in QUESTIONS if record.get(name) not in (None, "")]

    def _required_agent(self) -> str:
        if not self._agent:
            raise ValueError(
                'no agent scores it; give REWARD=my_reward.py, or ARGS="--agent mcqa_simple_agent" or another'
            )
        return self._agent

    def _from_chat(self, record: Row, column: str) -> Row:
        messages = record[column]
        if any(one.get("tool_calls") or one["role"] == "tool" for one in messages) or record.get("tools"):
            raise ValueError(
                f"column {column!r}: it has tools; write it as a NeMo Gym row, whose request can have them"
            )
        last = max((number for number, one in enumerate(messages) if one["role"] == "user"), default=-1)
        if last < 0:
            raise ValueError(f"column {column!r}: no message of the user")
        asked = [{"role": one["role"], "content": one.get("content") or ""} for one in messages[: last + 1]]
        self.uses[column, "the conversation up to the last message of the user"] += 1
        answered = [one.get("content") for one in messages[last + 1 :] if one["role"] == "assistant"]
        row = self._others(record, {column})
        if answered and "expected_answer" not in row:
            self.uses[column, "the assistant's last message: expected_answer"] += 1
            row["expected_answer"] = answered[-1]
        return {PARAMS: {"input": asked}, **row}

    def _from_question(self, record: Row) -> Row:
        questions, known = self._questions(record), ", ".join(map(str, record)) or "none"
        if not questions or record.get(questions[0]) is None:
            wanted = self._columns.get("question") or " or ".join(QUESTIONS)
            raise ValueError(f"it has the columns {known}; expected {wanted}, or FIELDS='question=...'")
        if len(questions) > 1:
            raise ValueError(f"{' and '.join(questions)} could each be the question; give FIELDS='question=...'")
        (question,) = questions
        if not isinstance(record[question], str | int | float):
            raise ValueError(f"column {question!r}: got {record[question]!r:.60}, expected a text")
        answer = self._columns.get("answer") or next((name for name in ANSWERS if name in record), "")
        if "answer" in self._columns and answer not in record:
            raise ValueError(f"it has the columns {known}; expected {answer}, the answer of FIELDS")
        row = self._others(record, {question, answer})
        self.uses[question, "the message of the user"] += 1
        row["question"] = record[question]
        if answer in record:
            self.uses[answer, "expected_answer"] += 1
            row["expected_answer"] = record[answer]
        return {PARAMS: {"input": [{"role": "user", "content": str(record[question])}]}, **row}

    def _others(self, record: Row, used: set[str]) -> Row:
        kept = {name: value for name, value in record.items() if name not in used}
        for name in kept:
            self.uses[str(name), "kept for the reward"] += 1
        return kept


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def convert(records: Iterable[object], converter: Converter, where: Path) -> list[Row]:
    """Return the rows; raises `DataError` with every kind of record that is none."""
    rows: list[Row] = []
    wrong: dict[str, list[int]] = {}  # message -> its rows
    for number, record in enumerate(records, start=1):
        try:
            rows.append(converter.row(record))
        except ValueError as error:
            wrong.setdefault(str(error), []).append(number)
    problems = []
    for message, numbers in list(wrong.items())[:MAX_SHOWN]:
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        fix = "correct or remove them" if more else "correct or remove it"
        problems.append(Problem(where=f"{where}: row {numbers[0]}{more}", wrong=message, fix=fix))
    if len(wrong) > MAX_SHOWN:
        others = f"{len(wrong) - MAX_SHOWN} further kinds of wrong rows"
        problems.append(Problem(where=str(where), wrong=others, fix="correct these first"))
    if problems:
        raise DataError(problems)
    if len(rows) < 2:
        got, expected = f"{len(rows)} rows", "two rows at least: one to train on, one to validate"
        raise DataError(Problem(where=str(where), got=got, expected=expected, fix="give more rows"))
    return rows


def import_rows(
    sources: Sequence[Path], out: Path, *, agent: str, reward: Path | None, columns: Mapping[str, str]
) -> list[str]:
    """Write rows, splits and manifests; return what became of each column, a line each."""
    converter = Converter(agent=REWARD_AGENT if reward else agent, columns=columns)
    rows = convert(chain.from_iterable(map(records_of, sources)), converter, sources[0])
    out.mkdir(parents=True, exist_ok=True)
    inputs = [*map(describe, sources), *([describe(reward)] if reward else [])]
    with atomic_writer(out / ROWS_FILE) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    parameters: dict[str, Any] = {"agent": agent, "columns": dict(columns)}
    if origin := origin_of(sources[0].absolute()):
        parameters["hub"] = origin
    known = {"tool": "import", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": parameters}
    write_manifest(manifest_of(out / ROWS_FILE), {**known, "outputs": [describe(out / ROWS_FILE)]})
    if reward is not None:  # under the name of its content: another one does not take its place in a run that goes on
        content = reward.read_bytes()
        write_atomically(out / f"reward-{hashlib.sha256(content).hexdigest()[:12]}.py", content)
    split(out / ROWS_FILE, out, val_rows=max(1, min(MAX_VALIDATION, len(rows) // VALIDATION_SHARE)))
    return [f"{column}: {use} ({count} of {len(rows)} rows)" for (column, use), count in converter.uses.items()]


def column_map(texts: Iterable[str]) -> dict[str, str]:
    """Read `question=NAME` and `answer=NAME`."""
    found = dict(text.partition("=")[::2] for text in texts)
    if unknown := sorted(found.keys() - {"question", "answer"}):
        fix = "write FIELDS='question=NAME answer=NAME'"
        raise DataError(Problem(where="FIELDS", got=", ".join(unknown), expected="question or answer", fix=fix))
    return found


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Import the rows and print what became of each column; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.import_rows", description=__doc__.split("\n", 1)[0])
    about = "JSON lines, JSON, CSV or Parquet, or the name of a data set on the hub: org/name[@REVISION][:FOLDER]"
    parser.add_argument("--rows", required=True, help=about)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--agent", default="", help="agent that scores them, such as mcqa_simple_agent")
    parser.add_argument("--reward", type=Path, help="Python file with score(response, row)")
    parser.add_argument("--fields", nargs="*", default=[], metavar="question=NAME", help="names of your columns")
    options = parser.parse_args(argv)
    if options.agent and options.reward:
        fix = "leave one of them out"
        raise DataError(Problem(where="REWARD and --agent", wrong="both would score the rows", fix=fix))
    problems: list[Problem] = []
    columns, sources = {}, []
    if options.reward is not None and not options.reward.is_file():
        problem = Problem(where="REWARD", got=str(options.reward), expected="a file", fix="correct the path")
        problems.append(problem)
    try:
        columns = column_map(options.fields)
        sources = rows_of(options.rows)
    except InputError as error:
        problems += error.problems
    if problems:
        raise DataError(problems)
    lines = import_rows(sources, options.out, agent=options.agent, reward=options.reward, columns=columns)
    print("\n".join(f"import: {line}" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
