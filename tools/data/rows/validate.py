"""Check the two files that training reads, every row of both, and report what is in them.

    python -m tools.data.rows.validate --data DIR [--config C] [--others DIR ...] [--tokenizer DIR] [KEY=VALUE ...]

Ends with status 2 when anything is wrong. --config names the configuration whose environments read the rows, KEY=VALUE
changes it as in a launch; without --config it is that of the stage which trains on this blend, of rows of your own that
of stage 1.1. Equal problems are printed once, with the number of their rows; --problems OUT takes all problems, one
JSON object per line. --others names directories of other blends: training rows that occur there too are listed, which
is no error, and validation rows that occur in their training rows, which is an error (contamination).

What a worker does with one block of a split: check and count every row, and compare it with the validation rows.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from recipes.config.load import config_path, load_config, load_stages, require_valid
from recipes.environments.contract.texts import OWN
from recipes.errors import DataError, Problem
from recipes.exact_json import dumps, loads
from recipes.files import atomic_writer
from recipes.types import Row
from tools.command_line import exit_status
from tools.data.files.parallel import Block, blocks_of, map_in_order
from tools.data.files.row_blocks import TRAIN, VALIDATION, require_file
from tools.data.rows.checks import FAILURES, RowChecker, ValidationTexts, request_key, text_of
from tools.data.rows.pass_rates import pass_rate_of
from tools.data.rows.stats import FileStats, agent_table
from tools.draft.launch import WIDE, WIDE_CONFIG


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
    judge_texts: str = OWN
    is_complete: bool = True  # False: a file of another blend, whose rows are compared but not checked
    _tools: tuple[RowChecker, ValidationTexts] | None = None

    def __call__(self, block: Block) -> BlockFindings:
        if self._tools is None:  # made in each worker: a codec is not picklable, and hashes of texts differ there
            self._tools = (
                RowChecker.for_tokenizer(self.tokenizer, self.instances, self.judge_texts),
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
        length = len(dumps(row["responses_create_params"])) if checker.codec is None else None
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
        row: Row = loads(line)
        request_key(row)
    except FAILURES:
        return None
    return row


MAX_LINES = 6  # of rows with an equal problem, the first included
ALLOWED = frozenset({"repeat"})  # listed, but no error: blends of one recipe share prompts
FIXES = {  # of problems between rows; a row with one of them is valid by itself
    "duplicate": "remove one of the two rows",
    "contamination": "remove the training row, or validate on other rows",
    "repeat": "remove it from one blend, unless both are meant to have it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinding:
    """One problem of one row."""

    file: str
    line: int
    kind: str  # shape | environment | reward | tools | length | duplicate | contamination | repeat
    text: str

    def as_problem(self) -> Problem:
        """Return the problem in the form of every message."""
        where = f"{self.file}:{self.line}"
        return Problem(where=where, wrong=self.text, fix=FIXES.get(self.kind, "correct or remove the row"))


@dataclass(slots=True)
class SplitsCheck:
    """The check of both splits of one blend. Memory grows by some hundred bytes per row, whatever its length."""

    train: Path
    validation: Path
    tokenizer: Path | None
    instances: Mapping[str, Any] = field(default_factory=dict)  # servers and agents that read the rows
    judge_texts: str = OWN
    findings: list[RowFinding] = field(default_factory=list)
    stats: dict[Path, FileStats] = field(default_factory=dict)
    _held_out: list[tuple[int, str]] = field(default_factory=list)
    _contaminated: set[int] = field(default_factory=set)  # validation lines that were reported
    _lines: dict[bytes, int] = field(default_factory=dict)  # request of a training row -> its line

    def check(self, others: Sequence[Path]) -> None:
        """Check both files, validation first, then compare with the training files of other blends."""
        readers = (self.instances, self.judge_texts)
        self._check_file(BlockChecker(self.validation, self.tokenizer, None, *readers))
        self._lines = {}
        self._check_file(BlockChecker(self.train, self.tokenizer, self._held_out, *readers))
        for other in others:
            self._compare(other)
        order = [str(self.validation), str(self.train)]
        self.findings.sort(key=lambda finding: (order.index(finding.file), finding.line))

    def _check_file(self, work: BlockChecker) -> None:
        stats = self.stats[work.path] = FileStats()
        for first, checked in _blocks(work):
            found = [(first + line, kind, text) for line, kind, text in checked.findings]
            for line, key in checked.keys:
                known = self._lines.setdefault(key, first + line)
                if known != first + line:
                    found.append((first + line, "duplicate", f"it repeats the request of line {known}"))
            for line, kind, text in sorted(found, key=lambda entry: entry[0]):
                self._add(work.path, line, kind, text)
            self._held_out += [(first + line, text) for line, text in checked.texts]
            self._add_contaminated(work.path, first, checked)
            stats.add(checked.stats)
        if stats.num_lines == 0:
            self._add(work.path, 0, "shape", "an empty file")

    def _compare(self, other: Path) -> None:
        """List the training rows that another training file holds too, and the validation rows that it contains."""
        for first, checked in _blocks(BlockChecker(other, None, self._held_out, is_complete=False)):
            for line, key in checked.keys:
                if (known := self._lines.get(key)) is not None:
                    self._add(self.train, known, "repeat", f"{other}:{first + line} has the same request")
            self._add_contaminated(other, first, checked)

    def _add_contaminated(self, path: Path, first: int, checked: BlockFindings) -> None:
        for line, held_out, what in checked.contaminated:
            if held_out not in self._contaminated:
                self._contaminated.add(held_out)
                text = f"{what} in the training row {path}:{first + line}"
                self._add(self.validation, held_out, "contamination", text)

    def _add(self, path: Path, line: int, kind: str, text: str) -> None:
        self.findings.append(RowFinding(file=str(path), line=line, kind=kind, text=text))

    def report(self) -> str:
        """Return the table of agents: rows of each split, their shares, and lengths of requests."""
        unit = "bytes" if self.tokenizer is None else "tokens"
        return agent_table(self.stats[self.train], self.stats[self.validation], unit=unit)


def _blocks(work: BlockChecker) -> Iterator[tuple[int, BlockFindings]]:
    """Yield (number of lines before it, what was found) for each block of a file."""
    num_lines = 0
    for checked in map_in_order(blocks_of(work.path), work):
        yield num_lines, checked
        num_lines += checked.stats.num_lines


def validate(
    train: Path,
    validation: Path,
    tokenizer: Path | None,
    others: Sequence[Path] = (),
    instances: Mapping[str, Any] | None = None,
    judge_texts: str = OWN,
) -> SplitsCheck:
    """Check the splits of one blend; raises `InputError` only for what cannot be opened."""
    for path in (train, validation, *others):
        require_file(path, fix="make the data, or correct the path")
    if same := [str(path) for path in others if path.resolve() == train.resolve()]:
        wrong, fix = f"{same[0]} is the blend that is checked", "name the other blends only"
        raise DataError(Problem(where="--others", wrong=wrong, fix=fix))
    result = SplitsCheck(train, validation, tokenizer, instances or {}, judge_texts)
    result.check(others)
    return result


def config_of(blend: str) -> Path:
    """Return the configuration of the stage that trains on a blend; for rows of a user's own that of stage 1.1."""
    name = re.sub(r"-sample\d+$", "", blend).removesuffix("-good").removesuffix("-ordered")
    scale = "tiny" if name.partition("-")[0] == "tiny" else "prod"
    name = name.removeprefix("tiny").removeprefix("-")
    stages = load_stages()
    path = config_path(next((stage for stage in stages if stage.blend == name), stages[0]), scale, "h100")
    return path.with_name(WIDE_CONFIG) if (scale, name) == ("tiny", WIDE) else path


def readers_in(path: Path, overrides: Sequence[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Return the servers and agents of a configuration, and whose words they ask in; raises `ConfigError`."""
    env = require_valid(load_config(path, overrides)).env
    return env.nemo_gym.instances, env.judge_texts


def write_findings(path: Path, findings: Sequence[RowFinding]) -> None:
    """Write one JSON object per problem."""
    with atomic_writer(path) as file:
        file.writelines(orjson.dumps(asdict(finding)) + b"\n" for finding in findings)


def grouped(findings: Sequence[RowFinding]) -> Iterator[Problem]:
    """Yield equal problems of a file once, at their first row, with the lines of the next ones."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for finding in findings:
        lines.setdefault((finding.file, finding.kind, finding.text), []).append(finding.line)
    for (file, kind, text), found in lines.items():
        problem = RowFinding(file=file, line=found[0], kind=kind, text=text).as_problem()
        if len(found) > 1:
            shown = ", ".join(map(str, found[1:MAX_LINES])) + (", ..." if len(found) > MAX_LINES else "")
            problem = replace(problem, wrong=f"{text} (and in {len(found) - 1} further rows: {shown})")
        yield problem


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.rows.validate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, help=f"directory with {TRAIN} and {VALIDATION}")
    parser.add_argument("--train", type=Path, help="rows to train on")
    parser.add_argument("--val", type=Path, help="rows to validate with")
    parser.add_argument("--config", type=Path, help="configuration whose environments read the rows")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="directories of other blends")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory, to give lengths in tokens")
    parser.add_argument("--problems", type=Path, help="file to write every problem to, one JSON object per line")
    parser.add_argument("--max-printed", type=int, default=20, help="different problems printed one by one")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    options = parser.parse_intermixed_args(arguments)
    overrides = [*options.overrides, *(str(path) for path in options.others if "=" in str(path))]  # behind --others
    if (options.data is None) == (options.train is None or options.val is None):
        parser.error("give either --data, or --train and --val")
    train, val = (
        (options.train, options.val) if options.data is None else (options.data / TRAIN, options.data / VALIDATION)
    )
    others = [directory / TRAIN for directory in options.others if "=" not in str(directory)]
    config = options.config or config_of(train.resolve().parent.name)
    result = validate(train, val, options.tokenizer, others, *readers_in(config, overrides))
    print(result.report())
    if options.problems:
        write_findings(options.problems, result.findings)
    for problem in islice(grouped(result.findings), options.max_printed):
        print(problem, file=sys.stderr)
    if not result.findings:
        print("validate: every row is valid")
        return 0
    kinds = Counter(finding.kind for finding in result.findings)
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    place = f"all of them: {options.problems}" if options.problems else "--problems FILE writes all of them"
    print(f"validate: {len(result.findings)} problems ({counts}); {place}", file=sys.stderr)
    return DataError.exit_code if kinds.keys() - ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
