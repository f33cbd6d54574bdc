"""Write the rows of a split in training order, some of them changed, as configs/data/curriculum.yaml says.

    python -m tools.curriculum.write --in data/rlvr1/train-split.jsonl --out data/rlvr1-ordered/train-split.jsonl \
        --pass-rates results/profile/pass_rates.jsonl [--tokenizer DIR] [seed=1 low_effort.share=0.02 ...]

Unchanged rows are copied byte for byte. The manifest beside the output holds every parameter and the counts. Pass rates
come from the file of `make profile`, or from the rows themselves. The validation split is copied beside the output.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.errors import DataError, InputError, Problem
from recipes.grpo.data import row_id
from tools.command_line import exit_status
from tools.curriculum.edits import cut_by, has_reasoning, is_marked, with_budget, with_marker, without_reasoning
from tools.curriculum.order import PassRateSchedule, ProfiledRow, choose, gaussian_order, without_solved
from tools.curriculum.settings import DEFAULT_SETTINGS, load_settings
from tools.data.split import VALIDATION
from tools.files.locks import only_one
from tools.files.manifest import changes, describe, lineage_of, write_manifest
from tools.files.parallel import Block, blocks_of, map_in_order
from tools.files.row_blocks import line_at
from tools.files.row_files import HashedWriter, require_file
from tools.rows.pass_rates import pass_rate_of, read_pass_rates

TOOL_VERSION = "2"  # raise it when the same inputs would give other rows or another order
ROWS_AT_ONCE = 256  # in memory while the output is written


@dataclass(frozen=True, slots=True)
class IndexedRow:
    """Where one row is in the file, and the facts that decide its place in the order."""

    block: Block
    row_id: str
    agent: str
    pass_rate: float | None
    has_reasoning: bool
    is_marked: bool | None  # ends with the low-effort marker; None: the row has no user turn


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """What a worker does with one block: read the facts of its rows."""

    path: Path
    marker: str

    def __call__(self, block: Block) -> list[IndexedRow]:
        rows, start = [], block.start
        for line in io.BytesIO(block.read(self.path)):
            try:
                row = orjson.loads(line)
                facts = (row_id(row), row["agent_ref"]["name"], pass_rate_of(row), has_reasoning(row))
                rows.append(IndexedRow(Block(start, start + len(line)), *facts, is_marked(row, self.marker)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                where = f"{self.path}:{line_at(self.path, start)}"
                wrong = f"the row cannot be read ({type(error).__name__}: {error})"
                raise DataError(Problem(where=where, wrong=wrong, fix="run `make data-validate`")) from error
            start += len(line)
        return rows


def make_curriculum(
    rows_file: Path, output: Path, settings: Mapping[str, Any], *, pass_rates: Path | None, tokenizer: Path | None
) -> dict[str, Any]:
    """Write `output` and its manifest unless they are up to date; return the manifest."""
    if output.resolve().parent == rows_file.resolve().parent:
        wrong, fix = "the output would lie in the directory of the input", "give --out another directory"
        raise InputError(Problem(where=str(output), wrong=wrong, fix=fix))
    validation = rows_file.with_name(VALIDATION)
    files = [rows_file, validation, pass_rates, tokenizer and tokenizer / "tokenizer.json"]
    used = [file for file in files if file and (file != validation or file.is_file())]
    for file in used:
        require_file(file, fix="make the data, or correct the path")
    manifest_file = output.with_name("manifest.json")
    origin = lineage_of(rows_file.with_name("manifest.json"))
    made_by = {file: {"made_by": origin} for file in (rows_file, validation) if origin}
    inputs = [describe(file, **made_by.get(file, {})) for file in used]
    parameters = {**settings, "output": output.name}
    known = {"tool": "curriculum", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": parameters}
    if not (reasons := changes(manifest_file, known)):
        print(f"curriculum: {output} is up to date")
        return known
    marker = settings["low_effort"]["marker"]
    work = BlockIndexer(rows_file, marker)
    rows = [row for block in map_in_order(blocks_of(rows_file), work) for row in block]
    rates = read_pass_rates(pass_rates) if pass_rates else None
    domain_of = {agent: domain for domain, agents in settings["domains"].items() for agent in agents}
    entries = [
        ProfiledRow(
            index=index,
            row_id=row.row_id,
            domain=domain_of.get(row.agent, row.agent),
            pass_rate=row.pass_rate if rates is None else rates.get(row.row_id),
            has_reasoning=row.has_reasoning,
        )
        for index, row in enumerate(rows)
    ]
    kept = without_solved(entries, max_pass_rate=settings["filter"]["max_pass_rate"])
    order = gaussian_order(
        kept, PassRateSchedule(**settings["gaussian"]), shares=settings["shares"], seed=settings["seed"]
    )
    if not order:
        wrong = f"none of its {len(rows)} rows has a pass rate below {settings['filter']['max_pass_rate']:g}"
        raise DataError(Problem(where=str(rows_file), wrong=wrong, fix="profile other rows"))
    edits = Edits.chosen(order, rows, settings, tokenizer)
    with only_one(output.with_name(".curriculum.lock")):
        outputs = [_write(rows_file, output, order, rows, edits)]
        if validation in used:
            outputs.append(_copy(validation, output.with_name(VALIDATION)))
        counts = {
            "rows": len(rows),
            "always_solved": len(entries) - len(kept),
            "left_over": len(kept) - len(order),
            **edits.counts(),
            "domains": dict(sorted(Counter(entry.domain for entry in order).items())),
        }
        manifest = {**known, "counts": counts, "mean_pass_rates": means(order), "outputs": outputs}
        write_manifest(manifest_file, manifest)
    print(f"curriculum: {output} ({', '.join(reasons)}): {len(order)} of {len(rows)} rows, {_summary(counts)}")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Which rows are edited, and how."""

    settings: Mapping[str, Any]
    tokenizer: Path | None
    marked: frozenset[int]
    stripped: frozenset[int]
    truncated: frozenset[int]

    @classmethod
    def chosen(
        cls,
        order: Sequence[ProfiledRow],
        rows: Sequence[IndexedRow],
        settings: Mapping[str, Any],
        tokenizer: Path | None,
    ) -> Edits:
        """Choose the rows to edit; rows that have the low-effort marker already count towards its share."""
        seed, low, reasoning = settings["seed"], settings["low_effort"], settings["reasoning"]
        missing = max(0, round(low["share"] * len(order)) - sum(bool(rows[entry.index].is_marked) for entry in order))
        able = [entry for entry in order if entry.domain in low["domains"] and rows[entry.index].is_marked is False]
        if missing > len(able):
            wrong = f"it asks to mark {missing} rows, and the named domains have {len(able)}"
            fix = "lower it, or name more domains in low_effort.domains"
            raise DataError(Problem(where="low_effort.share", wrong=wrong, fix=fix))
        marked = choose(able, missing, seed=seed, what="low effort")
        able = [entry for entry in order if entry.has_reasoning]
        stripped = choose(able, round(reasoning["strip"] * len(able)), seed=seed, what="strip")
        left = [entry for entry in able if entry.index not in stripped]
        truncated = choose(left, round(reasoning["truncate"] * len(able)), seed=seed, what="truncate")
        if truncated and tokenizer is None:
            wrong = "it is not given, and reasoning budgets are counted in tokens"
            fix = "give the model's directory, or set reasoning.truncate=0"
            raise DataError(Problem(where="--tokenizer", wrong=wrong, fix=fix))
        return cls(settings=settings, tokenizer=tokenizer, marked=marked, stripped=stripped, truncated=truncated)

    def counts(self) -> dict[str, int]:
        """Return how many rows each edit changes."""
        return {"low_effort": len(self.marked), "stripped": len(self.stripped), "truncated": len(self.truncated)}

    def apply(self, entry: ProfiledRow, line: bytes) -> bytes:
        """Return the line of a row, with the edits that it was chosen for."""
        if not any(entry.index in chosen for chosen in (self.marked, self.stripped, self.truncated)):
            return line if line.endswith(b"\n") else line + b"\n"
        row = orjson.loads(line)
        if entry.index in self.marked:
            row = with_marker(row, self.settings["low_effort"]["marker"])
        if entry.index in self.stripped:
            row = without_reasoning(row)
        elif entry.index in self.truncated:
            assert self.tokenizer is not None
            budget = random.Random(f"{self.settings['seed']}:budget:{entry.row_id}").choice(
                self.settings["reasoning"]["budgets"]
            )
            row = with_budget(row, budget, cut_by(self.tokenizer))
        return orjson.dumps(row) + b"\n"


def means(order: Sequence[ProfiledRow], parts: int = 10) -> list[float]:
    """Return the mean pass rate of each of `parts` equal parts of the order."""
    found = []
    for part in range(parts):
        rates = [
            entry.pass_rate or 0.0 for entry in order[part * len(order) // parts : (part + 1) * len(order) // parts]
        ]
        found.append(round(sum(rates) / len(rates), 4) if rates else 0.0)
    return found


def _write(
    rows_file: Path, output: Path, order: Sequence[ProfiledRow], rows: Sequence[IndexedRow], edits: Edits
) -> dict[str, Any]:
    with HashedWriter.open(output) as writer, rows_file.open("rb") as file:
        for first in range(0, len(order), ROWS_AT_ONCE):
            lines = []
            for entry in order[first : first + ROWS_AT_ONCE]:
                block = rows[entry.index].block
                file.seek(block.start)
                lines.append(edits.apply(entry, file.read(block.end - block.start)))
            writer.write(b"".join(lines))
    return writer.as_output(output, rows=len(order))


def _copy(source: Path, target: Path) -> dict[str, Any]:
    content = source.read_bytes()
    with HashedWriter.open(target) as writer:
        writer.write(content)
    return writer.as_output(target, rows=len(content.splitlines()))


def _summary(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {key}" for key, value in counts.items() if isinstance(value, int) and key != "rows")


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.curriculum.write", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in", dest="rows", type=Path, required=True, help="rows to train on")
    parser.add_argument("--out", type=Path, required=True, help="file to write, in a directory of its own")
    parser.add_argument("--pass-rates", type=Path, help="of `make profile` or a run; default: those in the rows")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory, to count reasoning budgets")
    parser.add_argument("--config", type=Path, default=DEFAULT_SETTINGS, help="settings of the curriculum")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of settings; the last one wins")
    options = parser.parse_intermixed_args(arguments)
    settings = load_settings(options.config, options.overrides)
    make_curriculum(options.rows, options.out, settings, pass_rates=options.pass_rates, tokenizer=options.tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
