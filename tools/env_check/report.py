"""The results of checks, as a table for a terminal and as an HTML page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tools.env_check.checks import Result, Status

STYLE_FILE = Path(__file__).resolve().parents[1] / "report" / "report.css"
CLASSES = {Status.PASS: "good", Status.FAIL: "bad", Status.NOT_APPLICABLE: "neutral", Status.KNOWN: "neutral"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One environment with the results of its checks."""

    name: str
    where: str  # "in process", or an address
    num_rows: int
    results: Sequence[Result]
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def counts(self) -> Counter[Status]:
        """How many checks ended how."""
        return Counter(result.status for result in self.results)

    @property
    def title(self) -> str:
        """Name, place, rows and settings in one line."""
        settings = "".join(f", {key}={value}" for key, value in self.settings.items())
        return f"{self.name} ({self.where}, {self.num_rows} rows{settings})"


def table(checked: Checked, *, is_whole: bool) -> str:
    """Return the lines of one environment; without `is_whole` checks that do not apply are only counted."""
    shown = [result for result in checked.results if is_whole or result.status is not Status.NOT_APPLICABLE]
    width = max((len(result.check) for result in shown), default=0)
    lines = [checked.title]
    lines += [f"  {result.status:<4}  {result.check:<{width}}  {result.why}" for result in shown]
    lines.append(f"  {_counted(checked.counts)}")
    return "\n".join(lines)


def page(everything: Sequence[Checked]) -> str:
    """Return the whole page."""
    total: Counter[Status] = Counter()
    for checked in everything:
        total += checked.counts
    verdict = f'<p class="verdict {"bad" if total[Status.FAIL] else "good"}">{_counted(total)}</p>'
    style = STYLE_FILE.read_text(encoding="utf-8")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Environment check</title><style>{style}</style></head>"
    )
    sections = "".join(_section(checked) for checked in everything)
    return f"{head}<body><main><h1>Environment check</h1>{verdict}{sections}</main></body></html>\n"


def _section(checked: Checked) -> str:
    rows = "".join(
        f'<tr><td><span class="{CLASSES[result.status]}">{result.status}</span></td><td>{escape(result.check)}</td>'
        f"<td>{escape(result.why)}</td><td>{result.seconds:.2f} s</td></tr>"
        for result in checked.results
    )
    head = "<tr><th></th><th>check</th><th>result</th><th>time</th></tr>"
    return (
        f"<section><h2>{escape(checked.title)}</h2><p class='note'>{_counted(checked.counts)}</p>"
        f"<div class='scroll'><table>{head}{rows}</table></div></section>"
    )


def _counted(counts: Mapping[Status, int]) -> str:
    words = {Status.PASS: "passed", Status.FAIL: "failed", Status.NOT_APPLICABLE: "do not apply"}
    known = counts.get(Status.KNOWN, 0)
    said = ", ".join(f"{counts.get(status, 0)} {word}" for status, word in words.items())
    return f"{said}, {known} known" if known else said
