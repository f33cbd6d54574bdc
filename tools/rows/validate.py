"""Check the two files that training reads, every row of both, and report what is in them.

    python -m tools.rows.validate --train F --val F [--others DIR ...] [--tokenizer DIR] [--problems OUT.jsonl]

Ends with status 2 when anything is wrong. All problems go to --problems; the first few are printed. With the
directories of other blends, rows that occur there too are listed, which is no error, and validation rows that their
training rows give away, which is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer
from tools.command_line import exit_status
from tools.data.split import TRAIN, VALIDATION
from tools.files.parallel import blocks_of, map_in_order
from tools.files.row_files import require_file
from tools.rows.stats import FileStats, agent_table
from tools.rows.validate_block import Checked, CheckRows

ALLOWED = frozenset({"repeat"})  # kinds that are listed but are no error: blends of one recipe share prompts
EXPECTED = {
    "duplicate": "each request once",
    "contamination": "validation rows that training does not give away",
    "repeat": "it in one blend only, unless that is meant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with one row."""

    file: str
    line: int
    kind: str  # shape | environment | reward | tools | length | duplicate | contamination | repeat
    text: str

    def as_problem(self) -> Problem:
        """Return it in the form of every message."""
        return Problem(
            where=f"{self.file}:{self.line}",
            got=self.text,
            expected=EXPECTED.get(self.kind, "a valid row"),
            fix="correct or remove the row",
        )


@dataclass(slots=True)
class Validation:
    """Everything found in the files of one blend. Memory grows by some hundred bytes per row, whatever its length."""

    train: Path
    validation: Path
    tokenizer: Path | None
    findings: list[Finding] = field(default_factory=list)
    stats: dict[Path, FileStats] = field(default_factory=dict)
    _held_out: list[tuple[int, str]] = field(default_factory=list)
    _given_away: set[int] = field(default_factory=set)  # held-out lines that are reported already
    _lines: dict[bytes, int] = field(default_factory=dict)  # request of a training row -> its line

    def check(self, others: Sequence[Path]) -> None:
        """Check both files, validation first, then compare with the training files of other blends."""
        self._check_file(CheckRows(self.validation, self.tokenizer))
        self._lines = {}
        self._check_file(CheckRows(self.train, self.tokenizer, self._held_out))
        for other in others:
            self._compare(other)
        order = [str(self.validation), str(self.train)]
        self.findings.sort(key=lambda finding: (order.index(finding.file), finding.line))

    def _check_file(self, work: CheckRows) -> None:
        stats = self.stats[work.path] = FileStats()
        for first, checked in _blocks(work):
            found = [(first + line, kind, text) for line, kind, text in checked.findings]
            for line, key in checked.keys:
                known = self._lines.setdefault(key, first + line)
                if known != first + line:
                    found.append((first + line, "duplicate", f"the request of line {known} again"))
            for line, kind, text in sorted(found, key=lambda entry: entry[0]):
                self._add(work.path, line, kind, text)
            self._held_out += [(first + line, text) for line, text in checked.texts]
            self._give_away(work.path, first, checked)
            stats.add(checked.stats)
        if stats.num_lines == 0:
            self._add(work.path, 0, "shape", "an empty file")

    def _compare(self, other: Path) -> None:
        """List the training rows that another training file holds, and the held-out rows that it gives away."""
        for first, checked in _blocks(CheckRows(other, None, self._held_out, is_complete=False)):
            for line, key in checked.keys:
                if (known := self._lines.get(key)) is not None:
                    self._add(self.train, known, "repeat", f"the request of {other}:{first + line}")
            self._give_away(other, first, checked)

    def _give_away(self, path: Path, first: int, checked: Checked) -> None:
        for line, held_out, how in checked.known:
            if held_out not in self._given_away:
                self._given_away.add(held_out)
                self._add(self.validation, held_out, "contamination", f"{how} in {path}:{first + line}")

    def _add(self, path: Path, line: int, kind: str, text: str) -> None:
        self.findings.append(Finding(file=str(path), line=line, kind=kind, text=text))

    def report(self) -> str:
        """Return the table of agents: rows of each split, their shares, and lengths of requests."""
        unit = "bytes" if self.tokenizer is None else "tokens"
        return agent_table(self.stats[self.train], self.stats[self.validation], unit=unit)


def _blocks(work: CheckRows) -> Iterator[tuple[int, Checked]]:
    """Yield (number of lines before it, what was found) for each block of a file."""
    num_lines = 0
    for checked in map_in_order(blocks_of(work.path), work):
        yield num_lines, checked
        num_lines += checked.stats.num_lines


def validate(train: Path, validation: Path, tokenizer: Path | None, others: Sequence[Path] = ()) -> Validation:
    """Check the splits of one blend; raises `InputError` only for what cannot be opened."""
    for path in (train, validation, *others):
        require_file(path, fix="make the data, or correct the path")
    if same := [str(path) for path in others if path.resolve() == train.resolve()]:
        fix = "name the other blends only"
        raise DataError(Problem(where="--others", got=same[0], expected="another blend's rows", fix=fix))
    result = Validation(train, validation, tokenizer)
    result.check(others)
    return result


def write_findings(path: Path, findings: Sequence[Finding]) -> None:
    """Write one JSON object per problem."""
    with atomic_writer(path) as file:
        file.writelines(orjson.dumps(asdict(finding)) + b"\n" for finding in findings)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.rows.validate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, help=f"directory with {TRAIN} and {VALIDATION}")
    parser.add_argument("--train", type=Path, help="rows to train on")
    parser.add_argument("--val", type=Path, help="rows to validate with")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="directories of other blends")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory; lengths are then in tokens")
    parser.add_argument("--problems", type=Path, help="file for all problems, one JSON object per line")
    parser.add_argument("--max-printed", type=int, default=20, help="problems printed one by one")
    options = parser.parse_args(arguments)
    if (options.data is None) == (options.train is None or options.val is None):
        parser.error("give either --data, or --train and --val")
    train, val = (
        (options.train, options.val) if options.data is None else (options.data / TRAIN, options.data / VALIDATION)
    )
    result = validate(train, val, options.tokenizer, [directory / TRAIN for directory in options.others])
    print(result.report())
    if options.problems:
        write_findings(options.problems, result.findings)
    for finding in result.findings[: options.max_printed]:
        print(finding.as_problem(), file=sys.stderr)
    if not result.findings:
        print("validate: nothing wrong")
        return 0
    kinds = Counter(finding.kind for finding in result.findings)
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    place = f"all in {options.problems}" if options.problems else "give --problems to have all in a file"
    print(f"validate: {len(result.findings)} problems ({counts}); {place}", file=sys.stderr)
    return DataError.exit_code if kinds.keys() - ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
