"""`python -m tools.environments.check` (`make env-check`): try an environment with right, wrong and dishonest answers.

Without a name or an address every environment of ours is checked. Exit status: 0 when no check failed, 1 when one did,
2 for wrong input.

The results of checks, as a table for a terminal and as an HTML page.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from recipes.environments.instances import ALL_VERIFIERS
from recipes.errors import InputError, Problem, suggestion
from recipes.exact_json import loads
from recipes.files import write_atomically
from tools.command_line import amount, exit_status, positive, setting
from tools.environments.check import repositories
from tools.environments.check.checks import Checker, Result, Status
from tools.environments.check.target import EXAMPLES, Target, Workshop, first_problem
from tools.look.report.chart import page, part

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


def as_page(everything: Sequence[Checked]) -> str:
    """Return the whole page."""
    total: Counter[Status] = Counter()
    for checked in everything:
        total += checked.counts
    verdict = part("env_check", "verdict", text=_counted(total), style="bad" if total[Status.FAIL] else "good")
    return page("Environment check", [verdict, *map(_section, everything)])


def _section(checked: Checked) -> Markup:
    rows = [(CLASSES[result.status], result) for result in checked.results]
    return part("env_check", "environment", title=checked.title, counted=_counted(checked.counts), rows=rows)


def _counted(counts: Mapping[Status, int]) -> str:
    words = {Status.PASS: "passed", Status.FAIL: "failed", Status.NOT_APPLICABLE: "do not apply"}
    known = counts.get(Status.KNOWN, 0)
    said = ", ".join(f"{counts.get(status, 0)} {word}" for status, word in words.items())
    return f"{said}, {known} known" if known else said


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table, write the page; return the exit status."""
    parser = argparse.ArgumentParser(prog="env_check", description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--name", default="", help="environment of ours; with --url, the type that the server has")
    parser.add_argument("--url", default="", help="address of a resources server, http://host:port")
    parser.add_argument("--data", type=Path, help="rows, one JSON object per line (default: the example rows)")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="directory of example rows")
    parser.add_argument("--rows", type=positive, default=3, help="rows of each file that are tried")
    parser.add_argument("--seconds", type=amount, default=60.0, help="longest time of one verdict")
    parser.add_argument("--out", type=Path, default=Path("results/env-check.html"), help="page to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the verifier")
    parser.add_argument("--all", action="store_true", help="print the checks that do not apply, too")
    options = parser.parse_args(argv)
    if options.url and not options.url.startswith(("http://", "https://")):
        raise InputError(Problem(where="--url", got=options.url, expected="http://host:port", fix="correct it"))
    if options.name == repositories.NAME and not options.url:
        return _repositories(options)
    if options.name and not options.url and options.name not in ALL_VERIFIERS:
        known = [*ALL_VERIFIERS, repositories.NAME]
        wrong, fix = f"there is no environment '{options.name}'", suggestion(options.name, known)
        raise InputError(Problem(where="--name", wrong=wrong, fix=fix))
    if options.set and (options.url or not options.name):
        wrong, fix = "settings are those of one environment in this process", "give --name, and no --url"
        raise InputError(Problem(where="--set", wrong=wrong, fix=fix))
    settings = dict(setting(text) for text in options.set)
    names = [options.name or "server"] if options.url or options.name else sorted(ALL_VERIFIERS)
    rows = {name: _rows(name, options) for name in names}
    missing = [name for name in names if not rows[name]]
    if len(missing) == len(names):
        wrong = f"there is no row of {', '.join(missing)}"
        raise InputError(Problem(where=str(options.data or options.examples), wrong=wrong, fix="give rows: DATA=FILE"))
    checked = asyncio.run(_check(options, rows, settings))
    write_atomically(options.out, as_page(checked).encode(errors="replace"))
    for name in missing:
        print(f"{name}: not checked, there is no row of it in {options.examples}")
    print(options.out)
    return int(any(one.counts[Status.FAIL] for one in checked))


def _repositories(options: argparse.Namespace) -> int:
    """Check how work on repositories is judged; return the exit status."""
    results = asyncio.run(repositories.check_repositories())
    checked = Checked(name=repositories.NAME, where="in containers", num_rows=1, results=results)
    print(table(checked, is_whole=options.all), flush=True)
    write_atomically(options.out, as_page([checked]).encode(errors="replace"))
    print(options.out)
    return int(bool(checked.counts[Status.FAIL]))


async def _check(
    options: argparse.Namespace, rows: Mapping[str, list[dict[str, Any]]], settings: Mapping[str, Any]
) -> list[Checked]:
    workshop = Workshop(examples=options.examples)
    checked = []
    try:
        for name in (name for name in rows if rows[name]):
            try:
                target = _target(workshop, name, options, settings)
            except InputError as error:
                if options.name:
                    raise
                print(f"{name}: not checked: {error}")
                continue
            results = await Checker(target=target, rows=rows[name], limit_seconds=options.seconds).run()
            if target.url:
                results.append(await _requests(target.url, rows[name][0]))
            one = Checked(
                name=name,
                where=target.url or "in process",
                num_rows=len(rows[name]),
                results=results,
                settings=target.settings,
            )
            print(table(one, is_whole=options.all), flush=True)
            checked.append(one)
    finally:
        await workshop.close()
    return checked


def _target(workshop: Workshop, name: str, options: argparse.Namespace, settings: Mapping[str, Any]) -> Target:
    if options.url:
        return workshop.by_url(options.url, name, seconds=options.seconds)
    return workshop.own(name, settings, seconds=options.seconds)


async def _requests(url: str, row: Mapping[str, Any]) -> Result:
    problem = await first_problem(url, row)
    status = Status.FAIL if problem else Status.PASS
    return Result(check="malformed requests", status=status, why=problem or "no reward on any")


def _rows(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the first rows of the given file, or of each example file of an environment."""
    if options.data:
        files = [options.data]
    else:
        files = sorted(path for path in options.examples.glob("*.jsonl") if path.stem.partition("__")[0] == name)
    return [row for path in files for row in _read(path, options.rows)]


def _read(path: Path, count: int) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, count), 1):
            try:
                row = loads(line)
            except ValueError as error:
                row = error
            if not isinstance(row, dict):
                wrong, fix = "no JSON object", "write one row per line"
                raise InputError(Problem(where=f"{path}:{number}", wrong=wrong, fix=fix))
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
