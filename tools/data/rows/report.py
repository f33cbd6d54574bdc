"""Report on blends: rows, lengths and pass rates per agent, as text and as one self-contained page.

    python -m tools.data.rows.report --data data/rlvr1 [data/rlvr2 ...] [--tokenizer DIR] [--out data/report.html]

With a tokenizer a length is the number of tokens of the first prompt, else the number of bytes of the request.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from recipes.environments.chat.codec import ChatCodec
from recipes.exact_json import dumps, loads
from recipes.files import write_atomically
from recipes.grpo.data import row_id
from tools.command_line import exit_status
from tools.data.files.manifest import read_manifest
from tools.data.files.parallel import Block, blocks_of, map_in_order
from tools.data.files.row_blocks import TRAIN, VALIDATION, require_file
from tools.data.rows.pass_rates import pass_rate_of, read_pass_rates
from tools.data.rows.stats import QUANTILES, FileStats, agent_lines, agent_table
from tools.look.report.chart import bars, drawn_as, page, palette, part

NUM_RATE_BINS = 8  # `make profile` takes eight answers per row, so every bin can be filled
NOTABLE = 0.02  # an agent is marked when its shares of validation and training differ by this much
NUM_PARTS = 40  # the file is cut into so many parts to show pass rates along it


@dataclass(slots=True)
class BlockCounter:
    """Counts the rows of a block; a line that cannot be read counts as a line, not as a row."""

    path: Path
    tokenizer: Path | None
    pass_rates: Mapping[str, float]  # of a profile, by row id; empty: those in the rows
    _codec: ChatCodec | None = None

    def __call__(self, block: Block) -> FileStats:
        if self._codec is None and self.tokenizer is not None:
            self._codec = ChatCodec(self.tokenizer)
        stats = FileStats()
        for number, line in enumerate(block.read(self.path).removesuffix(b"\n").split(b"\n"), start=1):
            stats.num_lines = number
            try:
                row = loads(line)
                params = row["responses_create_params"]
                length = len(self._codec.encode(params)) if self._codec else len(dumps(params))
                rate = self.pass_rates.get(row_id(row)) if self.pass_rates else pass_rate_of(row)
                stats.count(row, number, length=length, pass_rate=rate)
            except Exception:  # a template may raise anything; `make data-validate` reports what is wrong
                continue
        return stats


@dataclass(slots=True, kw_only=True)
class BlendStats:
    """Both splits of one blend."""

    name: str
    train: FileStats = field(default_factory=FileStats)
    validation: FileStats = field(default_factory=FileStats)
    made_by: str = ""  # parameters of the split, from its manifest

    @property
    def names(self) -> dict[str, str]:
        """The palette: under which name each agent is drawn."""
        sizes = Counter({agent: stats.num_rows for agent, stats in self.train.agents.items()})
        return palette(sizes + Counter({agent: stats.num_rows for agent, stats in self.validation.agents.items()}))


def read_blend(directory: Path, tokenizer: Path | None, pass_rates: Mapping[str, float]) -> BlendStats:
    """Count both splits of a blend; raises `DataError` when one is missing."""
    manifest = read_manifest(directory / "manifest.json") or {}
    parameters = manifest.get("parameters", {})
    made_by = ", ".join(f"{key} {value}" for key, value in parameters.items() if isinstance(value, int | str))
    blend = BlendStats(name=directory.resolve().name, made_by=made_by)
    for path, stats in ((directory / TRAIN, blend.train), (directory / VALIDATION, blend.validation)):
        require_file(path, fix="make the data, or correct --data")
        for block in map_in_order(blocks_of(path), BlockCounter(path, tokenizer, pass_rates)):
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
    """Return one HTML page that loads no other file."""
    total = sum(blend.train.num_lines + blend.validation.num_lines for blend in blends)
    agents = {agent for blend in blends for stats in (blend.train, blend.validation) for agent in stats.agents}
    tiles = [("blends", str(len(blends))), ("rows", f"{total:,}"), ("agents", str(len(agents)))]
    rated = [rate for blend in blends for rate in blend.train.rates]
    if rated:
        tiles.append(("mean pass rate", f"{sum(rated) / len(rated):.3f}"))
        tiles.append(("always solved", f"{100 * sum(rate == 1 for rate in rated) / len(rated):.1f} %"))
    title = "Data: " + ", ".join(blend.name for blend in blends)
    body = [part("page", "header", title=title), part("page", "tiles", found=tiles)]
    return page(title, [*body, *(_section(blend, unit) for blend in blends)])


def _section(blend: BlendStats, unit: str) -> Markup:
    notes = [blend.made_by] if blend.made_by else []
    charts = [_lengths(blend, unit)]
    if blend.train.rates:
        charts.append(_order(blend))
        charts += [_rates("training", blend.train, blend.names), _rates("validation", blend.validation, blend.names)]
    else:
        notes.append("No pass rates are recorded: `make profile` measures them.")
    table = _table(blend, unit)
    return part("rows", "blend", name=blend.name, table=table, notes=notes, charts=Markup("".join(charts)))


def _table(blend: BlendStats, unit: str) -> Markup:
    """Return the table of agents; a bar shows how much an agent's shares of training and validation differ."""
    lines = list(agent_lines(blend.train, blend.validation))
    widest = max((share for line in lines for share in line.shares), default=1.0) or 1.0
    rows = []
    for line in lines:
        shown = [f"{counted.num_rows:,}" for counted in line.parts]
        rates = ["-" if rate is None else f"{rate:.2f}" for rate in line.rates]
        lengths = [f"{length:,}" for length in line.lengths] or ["-"] * len(QUANTILES)
        shares = [f"{100 * share:.1f} %" for share in line.shares]
        away = line.shares[1] - line.shares[0]
        row = {
            "agent": line.agent,
            "before": (shown[0], shares[0], shown[1]),
            "share": shares[1],
            "style": "up" if away >= NOTABLE else "down" if away <= -NOTABLE or not line.shares[1] else "",
            "bar": [share / widest for share in line.shares],
            "after": (*rates, *lengths),
        }
        rows.append(row)
    return part("rows", "agents", lines=rows, unit=unit)


def _lengths(blend: BlendStats, unit: str) -> str:
    """Return the histogram of lengths by agent; the bins are powers of two."""
    longest = max((max(stats.lengths, default=0) for stats in blend.train.agents.values()), default=0)
    shortest = min((min(stats.lengths, default=longest) for stats in blend.train.agents.values()), default=0)
    low, high = max(0, shortest.bit_length() - 1), longest.bit_length()
    parts = {}
    for agent, stats in blend.train.agents.items():
        counts = Counter(max(0, length.bit_length() - 1) for length in stats.lengths)
        parts[agent] = [counts[power] for power in range(low, high)]
    labels = [f"{2**power:,}" for power in range(low, high)]
    about, drawn = f"rows per length, from the {unit} below a bar to twice as many", drawn_as(blend.names, parts)
    return bars("Lengths of training rows", labels, drawn, unit=about, axis=unit)


def _rates(split: str, rows: FileStats, names: Mapping[str, str]) -> str:
    """Return the histogram of pass rates, by agent; rows that are always solved have a bar of their own."""
    parts = {}
    for agent, stats in rows.agents.items():
        counts = Counter(NUM_RATE_BINS if rate == 1 else int(rate * NUM_RATE_BINS) for rate in stats.pass_rates)
        parts[agent] = [counts[part] for part in range(NUM_RATE_BINS + 1)]
    labels = [*(f"{part / NUM_RATE_BINS:g}" for part in range(NUM_RATE_BINS)), "1"]
    drawn = drawn_as(names, parts)
    return bars(f"Pass rates of {split} rows", labels, drawn, unit="rows", axis="pass rate, from")


def _order(blend: BlendStats) -> str:
    """Return the mean pass rate along the file, which shows how the difficulty changes in the order of training."""
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
    parser = argparse.ArgumentParser(prog="python -m tools.data.rows.report", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="directories with both splits")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory, to give lengths in tokens")
    parser.add_argument("--pass-rates", type=Path, help="of `make profile` or a run; default: those in the rows")
    parser.add_argument("--out", type=Path, help="HTML page to write")
    options = parser.parse_args(arguments)
    unit = "tokens" if options.tokenizer else "bytes"
    if options.tokenizer:
        ChatCodec(options.tokenizer)  # raises for a broken tokenizer before anything is counted
    rates = read_pass_rates(options.pass_rates) if options.pass_rates else {}
    blends = [read_blend(directory, options.tokenizer, rates) for directory in options.data]
    print(as_text(blends, unit=unit))
    if options.out:
        write_atomically(options.out, as_page(blends, unit=unit).encode(errors="replace"))
        print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
