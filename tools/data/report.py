"""What is in the blends: rows, lengths and pass rates per agent, as text and as one self-contained page.

    python -m tools.data.report --data data/rlvr1 [data/rlvr2 ...] [--tokenizer DIR] [--out data/report.html]

Lengths are those of the whole first prompt in tokens where a tokenizer is given, else of the request in bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import orjson

from recipes.environments.codec import ChatCodec
from recipes.grpo.data import row_id
from tools.command_line import exit_status
from tools.data.bars import bars
from tools.data.files import require_file, write_atomically
from tools.data.make_curriculum import read_pass_rates
from tools.data.manifest import read_manifest
from tools.data.parallel import Block, blocks_of, map_in_order
from tools.data.row_stats import QUANTILES, AgentStats, FileStats, agent_table, pass_rate_of, quantile
from tools.data.split import TRAIN, VALIDATION
from tools.report.page import STYLE_FILE

NUM_RATE_BINS = 10
NUM_PARTS = 40  # of a file, along which pass rates are shown


@dataclass(slots=True)
class CountRows:
    """Counts the rows of a block; one that cannot be read is only a line."""

    path: Path
    tokenizer: Path | None
    pass_rates: Mapping[str, float]  # of a profile, by row id; else those in the rows
    _codec: ChatCodec | None = None

    def __call__(self, block: Block) -> FileStats:
        if self._codec is None and self.tokenizer is not None:
            self._codec = ChatCodec(self.tokenizer)
        stats = FileStats()
        for number, line in enumerate(block.read(self.path).removesuffix(b"\n").split(b"\n"), start=1):
            stats.num_lines = number
            try:
                row = orjson.loads(line)
                params = row["responses_create_params"]
                length = len(self._codec.encode(params)) if self._codec else len(orjson.dumps(params))
                rate = self.pass_rates.get(row_id(row)) if self.pass_rates else pass_rate_of(row)
                stats.count(row, number, length=length, pass_rate=rate)
            except Exception:  # what is wrong with it, `make data-validate` says; a template may raise anything
                continue
        return stats


@dataclass(slots=True, kw_only=True)
class BlendStats:
    """Both splits of one blend."""

    name: str
    train: FileStats = field(default_factory=FileStats)
    validation: FileStats = field(default_factory=FileStats)
    made_by: str = ""  # what the manifest says of the split


def read_blend(directory: Path, tokenizer: Path | None, pass_rates: Mapping[str, float]) -> BlendStats:
    """Count both splits of a blend; raises `DataError` when one is not there."""
    manifest = read_manifest(directory / "manifest.json") or {}
    parameters = manifest.get("parameters", {})
    made_by = ", ".join(f"{key} {value}" for key, value in parameters.items() if isinstance(value, int | str))
    blend = BlendStats(name=directory.resolve().name, made_by=made_by)
    for path, stats in ((directory / TRAIN, blend.train), (directory / VALIDATION, blend.validation)):
        require_file(path, fix="make the data, or correct --data")
        for block in map_in_order(blocks_of(path), CountRows(path, tokenizer, pass_rates)):
            stats.add(block)
    return blend


def as_text(blends: Sequence[BlendStats], *, unit: str) -> str:
    """Return one table per blend."""
    parts = []
    for blend in blends:
        unread = blend.train.num_lines + blend.validation.num_lines - blend.train.num_rows - blend.validation.num_rows
        rows = f"{blend.name}: {blend.train.num_rows} rows to train on, {blend.validation.num_rows} to validate"
        note = f", {unread} lines that cannot be read: run `make data-validate`" if unread else ""
        parts.append(f"{rows}{note}\n{agent_table(blend.train, blend.validation, unit=unit)}")
    return "\n\n".join(parts)


def as_page(blends: Sequence[BlendStats], *, unit: str) -> str:
    """Return one HTML page that needs nothing else."""
    total = sum(blend.train.num_lines + blend.validation.num_lines for blend in blends)
    agents = {agent for blend in blends for stats in (blend.train, blend.validation) for agent in stats.agents}
    tiles = [("blends", str(len(blends))), ("rows", f"{total:,}"), ("agents", str(len(agents)))]
    rated = [rate for blend in blends for rate in blend.train.rates]
    if rated:
        tiles.append(("mean pass rate", f"{sum(rated) / len(rated):.3f}"))
        tiles.append(("always solved", f"{100 * sum(rate == 1 for rate in rated) / len(rated):.1f} %"))
    shown = "".join(f'<div class="tile"><span>{name}</span><b>{value}</b></div>' for name, value in tiles)
    sections = "".join(_section(blend, unit) for blend in blends)
    title = "Data: " + ", ".join(blend.name for blend in blends)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head><body><main>"
        f'<header><p class="kicker">Super RL recipe</p><h1>{escape(title)}</h1></header>'
        f'<div class="tiles">{shown}</div>{sections}</main></body></html>\n'
    )


def _section(blend: BlendStats, unit: str) -> str:
    note = f'<p class="note">{escape(blend.made_by)}</p>' if blend.made_by else ""
    charts = [_lengths(blend, unit), _rates(blend), _order(blend)]
    return (
        f"<section><h2>{escape(blend.name)}</h2>{note}{_table(blend, unit)}</section>"
        f'<section class="charts">{"".join(charts)}</section>'
    )


def _table(blend: BlendStats, unit: str) -> str:
    rows = []
    for agent in sorted({*blend.train.agents, *blend.validation.agents}):
        train, val = (stats.agents.get(agent, AgentStats()) for stats in (blend.train, blend.validation))
        lengths = sorted([*train.lengths, *val.lengths])
        numbers = [f"{quantile(lengths, share):,}" if lengths else "-" for share in QUANTILES]
        shares = [
            100 * part.num_rows / max(1, stats.num_rows)
            for part, stats in ((train, blend.train), (val, blend.validation))
        ]
        rate = f"{sum(train.pass_rates) / len(train.pass_rates):.3f}" if train.pass_rates else "-"
        cells = [f"{train.num_rows:,}", f"{shares[0]:.1f} %", f"{val.num_rows:,}", f"{shares[1]:.1f} %", rate, *numbers]
        rows.append(f"<tr><td>{escape(agent)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    heads = ["agent", "train", "share", "validation", "share", "pass rate", f"median {unit}", "95 %", "longest"]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f"<div class='scroll'><table class='numbers'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _lengths(blend: BlendStats, unit: str) -> str:
    """Return the histogram of lengths over powers of two, by agent."""
    longest = max((max(stats.lengths, default=0) for stats in blend.train.agents.values()), default=0)
    shortest = min((min(stats.lengths, default=longest) for stats in blend.train.agents.values()), default=0)
    low, high = max(0, shortest.bit_length() - 1), longest.bit_length()
    parts = {}
    for agent, stats in blend.train.agents.items():
        counts = Counter(max(0, length.bit_length() - 1) for length in stats.lengths)
        parts[agent] = [counts[power] for power in range(low, high)]
    labels = [f"{2**power:,}" for power in range(low, high)]
    return bars(
        "Lengths of training rows", labels, parts, unit=f"rows, from so many {unit} to twice as many", axis=unit
    )


def _rates(blend: BlendStats) -> str:
    """Return the histogram of pass rates, by agent; rows that are always solved have a bar of their own."""
    parts = {}
    for agent, stats in blend.train.agents.items():
        counts = Counter(NUM_RATE_BINS if rate == 1 else int(rate * NUM_RATE_BINS) for rate in stats.pass_rates)
        parts[agent] = [counts[part] for part in range(NUM_RATE_BINS + 1)]
    labels = [*(f"{part / NUM_RATE_BINS:.1f}" for part in range(NUM_RATE_BINS)), "1"]
    return bars("Pass rates of training rows", labels, parts, unit="rows", axis="pass rate, from")


def _order(blend: BlendStats) -> str:
    """Return the mean pass rate along the file: how the difficulty changes in the order of training."""
    means = list(_means_along(blend.train))
    labels = [f"{100 * part / NUM_PARTS:.0f} %" for part in range(NUM_PARTS)]
    return bars("Mean pass rate in the order of training", labels, {"mean": means}, axis="of the file")


def _means_along(stats: FileStats) -> Iterator[float]:
    sums, counts = [0.0] * NUM_PARTS, [0] * NUM_PARTS
    for line, rate in zip(stats.rated_lines, stats.rates, strict=True):
        part = (line - 1) * NUM_PARTS // max(1, stats.num_lines)
        sums[part] += rate
        counts[part] += 1
    return (total / count if count else 0.0 for total, count in zip(sums, counts, strict=True))


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.report", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="directories with both splits")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory; lengths are then in tokens")
    parser.add_argument("--pass-rates", type=Path, help="file of `make profile`; left out: those in the rows")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args(arguments)
    unit = "tokens" if options.tokenizer else "bytes"
    if options.tokenizer:
        ChatCodec(options.tokenizer)  # names what is wrong with it before anything is counted
    rates = read_pass_rates(options.pass_rates) if options.pass_rates else {}
    blends = [read_blend(directory, options.tokenizer, rates) for directory in options.data]
    print(as_text(blends, unit=unit))
    if options.out:
        write_atomically(options.out, as_page(blends, unit=unit).encode(errors="replace"))
        print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
