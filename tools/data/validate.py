"""Check the two files that training reads, every row of both, and report what is in them.

    python -m tools.data.validate --train F --val F [--tokenizer DIR] [--problems OUT.jsonl] [--max-printed 20]

Ends with status 2 when anything is wrong. All problems go to --problems; the first few are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from recipes.grpo.errors import InputError, Problem
from recipes.grpo.types import Row
from tools.data.files import atomic_writer, require_file
from tools.data.overlap import HeldOut, Seen, text_of
from tools.data.row_checks import FAILURES, RowChecker

TRAIN, VALIDATION = "train", "validation"
EXPECTED = {"duplicate": "each request once", "contamination": "validation rows that training does not give away"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with one row."""

    file: str
    line: int
    kind: str  # shape | environment | reward | tools | length | duplicate | contamination
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
    """Everything found in the two files."""

    checker: RowChecker
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, Counter[str]] = field(default_factory=lambda: {TRAIN: Counter(), VALIDATION: Counter()})
    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # agent -> of both files

    def check(self, train: Path, validation: Path) -> None:
        """Check both files, validation first."""
        held_out = HeldOut()
        self._check_file(validation, VALIDATION, held_out)
        held_out.seal()
        self._check_file(train, TRAIN, held_out, validation)

    def _check_file(self, path: Path, split: str, held_out: HeldOut, validation: Path | None = None) -> None:
        seen = Seen()
        number = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row, found = self.checker.check(line)
                for kind, text in found:
                    self._add(path, number, kind, text)
                if row is None:
                    continue
                is_sound = all(kind != "environment" for kind, _ in found)
                self._count(path, number, split, row, is_sound=is_sound)
                if (first := seen.first_line(row, number)) is not None:
                    self._add(path, number, "duplicate", f"the request of line {first} again")
                try:
                    text = text_of(row)
                except FAILURES:
                    assert not is_sound  # what is unreadable here was unreadable to the environment
                    continue
                if validation is None:
                    held_out.add(text, number)
                    continue
                for known, how in held_out.known_by(text):
                    self._add(validation, known, "contamination", f"{how} in {path}:{number}")
        if number == 0:
            self._add(path, 0, "shape", "an empty file")

    def _add(self, path: Path, line: int, kind: str, text: str) -> None:
        self.findings.append(Finding(file=str(path), line=line, kind=kind, text=text))

    def _count(self, path: Path, number: int, split: str, row: Row, *, is_sound: bool) -> None:
        agent = row["agent_ref"]["name"]
        self.rows[split][agent] += 1
        if self.checker.codec is None:
            self.lengths[agent].append(len(orjson.dumps(row["responses_create_params"])))
        elif is_sound:
            self._count_tokens(path, number, row)

    def _count_tokens(self, path: Path, number: int, row: Row) -> None:
        try:
            self.lengths[row["agent_ref"]["name"]].append(self.checker.num_tokens(row))
        except Exception as error:  # a template may refuse a conversation in any way
            self._add(path, number, "length", f"a request that the chat template refuses ({error})")

    def report(self) -> str:
        """Return the table of agents: rows of each split, their shares, and lengths of requests."""
        unit = "bytes" if self.checker.codec is None else "tokens"
        head = f"{'agent':<44} {'train':>8} {'':>6} {'val':>6} {'':>6}  length in {unit}: median, 95 %, longest"
        lines = [head]
        totals = {split: max(1, sum(counts.values())) for split, counts in self.rows.items()}
        for agent in sorted({*self.rows[TRAIN], *self.rows[VALIDATION]}):
            train, val = self.rows[TRAIN][agent], self.rows[VALIDATION][agent]
            shares = (100 * train / totals[TRAIN], 100 * val / totals[VALIDATION])
            lengths = sorted(self.lengths[agent])
            numbers = ", ".join(str(quantile(lengths, share)) for share in (0.5, 0.95, 1.0)) if lengths else "-"
            lines.append(f"{agent:<44} {train:>8} {shares[0]:>5.1f}% {val:>6} {shares[1]:>5.1f}%  {numbers}")
        return "\n".join(lines)


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def write_findings(path: Path, findings: Sequence[Finding]) -> None:
    """Write one JSON object per problem."""
    with atomic_writer(path) as file:
        file.writelines(orjson.dumps(asdict(finding)) + b"\n" for finding in findings)


def validate(train: Path, validation: Path, tokenizer: Path | None) -> Validation:
    """Check two files; raises `InputError` only for what cannot be opened."""
    for path in (train, validation):
        require_file(path, fix="make the data, or correct the path")
    result = Validation(RowChecker.for_tokenizer(tokenizer))
    result.check(train, validation)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.validate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--train", type=Path, required=True, help="rows to train on")
    parser.add_argument("--val", type=Path, required=True, help="rows to validate with")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory; lengths are then in tokens")
    parser.add_argument("--problems", type=Path, help="file for all problems, one JSON object per line")
    parser.add_argument("--max-printed", type=int, default=20, help="problems printed one by one")
    options = parser.parse_args(arguments)
    try:
        result = validate(options.train, options.val, options.tokenizer)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
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
    return InputError.exit_code


if __name__ == "__main__":
    sys.exit(main())
