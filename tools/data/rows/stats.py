"""Counts of a row file per agent: rows, lengths of requests, pass rates. Blocks are counted alone, then added."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from recipes.types import Row

QUANTILES = (0.5, 0.95, 1.0)


@dataclass(slots=True)
class AgentStats:
    """The rows of one agent."""

    num_rows: int = 0
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    pass_rates: array[float] = field(default_factory=lambda: array("d"))

    def add(self, other: AgentStats) -> None:
        """Add the rows of another block."""
        self.num_rows += other.num_rows
        self.lengths.extend(other.lengths)
        self.pass_rates.extend(other.pass_rates)


@dataclass(slots=True)
class FileStats:
    """The rows of one file or block."""

    num_lines: int = 0
    agents: dict[str, AgentStats] = field(default_factory=dict)
    rated_lines: array[int] = field(default_factory=lambda: array("Q"))  # from 1; lines with a pass rate
    rates: array[float] = field(default_factory=lambda: array("d"))  # of `rated_lines`

    @property
    def num_rows(self) -> int:
        """Number of rows that have an agent."""
        return sum(stats.num_rows for stats in self.agents.values())

    def count(self, row: Row, line: int, *, length: int | None, pass_rate: float | None) -> None:
        """Count one row; `line` is its number in this block."""
        stats = self.agents.setdefault(row["agent_ref"]["name"], AgentStats())
        stats.num_rows += 1
        if length is not None:
            stats.lengths.append(length)
        if pass_rate is not None:
            stats.pass_rates.append(pass_rate)
            self.rated_lines.append(line)
            self.rates.append(pass_rate)

    def add(self, other: FileStats) -> None:
        """Add the block that follows."""
        self.rated_lines.extend(line + self.num_lines for line in other.rated_lines)
        self.rates.extend(other.rates)
        self.num_lines += other.num_lines
        for name, stats in other.agents.items():
            self.agents.setdefault(name, AgentStats()).add(stats)


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLine:
    """One agent in both splits, training first."""

    agent: str
    parts: tuple[AgentStats, AgentStats]
    shares: tuple[float, float]  # of the rows of the split, 0..1
    rates: tuple[float | None, float | None]  # mean pass rates
    lengths: tuple[int, ...]  # QUANTILES over both splits; empty when no row was measured


def agent_lines(train: FileStats, validation: FileStats) -> Iterator[AgentLine]:
    """Yield the lines of a table of agents, sorted by name."""
    for agent in sorted({*train.agents, *validation.agents}):
        parts = (train.agents.get(agent, AgentStats()), validation.agents.get(agent, AgentStats()))
        lengths = sorted([*parts[0].lengths, *parts[1].lengths])
        yield AgentLine(
            agent=agent,
            parts=parts,
            shares=(parts[0].num_rows / max(1, train.num_rows), parts[1].num_rows / max(1, validation.num_rows)),
            rates=(mean(parts[0].pass_rates), mean(parts[1].pass_rates)),
            lengths=tuple(quantile(lengths, share) for share in QUANTILES) if lengths else (),
        )


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return sum(values) / len(values) if values else None


def agent_table(train: FileStats, validation: FileStats, *, unit: str) -> str:
    """Return one line per agent: rows of each split and their shares, mean pass rates of each, lengths of both."""
    head = f"{'agent':<44} {'train':>8} {'':>6} {'val':>6} {'':>6} {'pass':>5} {'val':>5}"
    lines = [f"{head}  length in {unit}: median, 95 %, longest"]
    for line in agent_lines(train, validation):
        counts = [part.num_rows for part in line.parts]
        shares = [f"{100 * share:.1f}%" for share in line.shares]
        rates = ["-" if rate is None else f"{rate:.2f}" for rate in line.rates]
        lengths = ", ".join(str(length) for length in line.lengths) or "-"
        lines.append(
            f"{line.agent:<44} {counts[0]:>8} {shares[0]:>6} {counts[1]:>6} {shares[1]:>6} {rates[0]:>5} {rates[1]:>5}"
            f"  {lengths}"
        )
    return "\n".join(lines)
