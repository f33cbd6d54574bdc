"""`python -m tools.env_check` (`make env-check`): try an environment with right, wrong and dishonest answers.

Without a name or an address every environment of ours is checked. Exit status: 0 when no check failed, 1 when one did,
2 for wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.registry import ALL_VERIFIERS
from recipes.errors import InputError, Problem, suggestion
from recipes.files import write_atomically
from tools.command_line import amount, exit_status, positive, setting
from tools.env_check import repositories
from tools.env_check.checks import Checker, Result, Status
from tools.env_check.protocol import first_problem
from tools.env_check.report import Checked, page, table
from tools.env_check.target import Target, Workshop

EXAMPLES = Path("../shared/gym_examples")  # one file per environment, `NAME.jsonl` and `NAME__*.jsonl`


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table, write the page; return the exit status."""
    parser = argparse.ArgumentParser(prog="env_check", description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--name", default="", help="environment of ours; with --url, the type that the server has")
    parser.add_argument("--url", default="", help="address of a resources server, http://host:port")
    parser.add_argument("--data", type=Path, help="rows, one JSON object per line (default: the example rows)")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="directory of example rows")
    parser.add_argument("--rows", type=positive, default=2, help="rows of each file that are tried")
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
    write_atomically(options.out, page(checked).encode(errors="replace"))
    for name in missing:
        print(f"{name}: not checked, there is no row of it in {options.examples}")
    print(options.out)
    return int(any(one.counts[Status.FAIL] for one in checked))


def _repositories(options: argparse.Namespace) -> int:
    """Check how work on repositories is judged; return the exit status."""
    results = asyncio.run(repositories.check_repositories())
    checked = Checked(name=repositories.NAME, where="in containers", num_rows=1, results=results)
    print(table(checked, is_whole=options.all), flush=True)
    write_atomically(options.out, page([checked]).encode(errors="replace"))
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
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                row = error
            if not isinstance(row, dict):
                wrong, fix = "no JSON object", "write one row per line"
                raise InputError(Problem(where=f"{path}:{number}", wrong=wrong, fix=fix))
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
