"""Show what a coding agent did on one instance, turn by turn: `make swe-replay RUN=... INSTANCE=...`.

    python -m tools.report.replay --results results --run NAME --instance ID [--out FILE]

A run logs a few rollouts of every step, so an instance has those that were among them. The page lists all of them and
shows the newest. Exit status 2 for a run or an instance that is not there, with those that are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from recipes.errors import InputError, Problem, nearest
from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.report.load import read_lines
from tools.report.page import STYLE_FILE
from tools.report.samples import visible
from tools.report.trajectory import Sample, instance_of, replayed, reward_words, verdict_style

KINDS = ("train", "val")
MAX_SHOWN = 12  # rollouts on one page
MAX_NAMED = 12  # runs or instances that a message names


def rollouts_of(run_dir: Path) -> list[Sample]:
    """Return every logged rollout that has a trajectory, the oldest first; raises `InputError` where there is none."""
    found = [
        {**sample, "kind": kind}
        for kind in KINDS
        for sample in read_lines(run_dir / "rollouts" / f"{kind}.jsonl", [], missing_is_fine=True)
        if instance_of(sample)
    ]
    if not found:
        wrong = "no logged rollout has a trajectory"
        raise InputError(Problem(where=str(run_dir), wrong=wrong, fix="name a run of stage 2.2 that has done a step"))
    return sorted(found, key=lambda sample: sample["step"])


def find_run(results: Path, name: str) -> Path:
    """Return the directory of a run; raises `InputError` that names those that are there."""
    run_dir = results / Path(name).name
    if Path(name).name and (run_dir / "metrics.jsonl").is_file():
        return run_dir
    there = sorted(path.parent.name for path in results.glob("*/metrics.jsonl"))
    raise InputError(_unknown("RUN", name, there, f"no run in {results} has logged a step"))


def rollouts_on(run_dir: Path, instance: str) -> list[Sample]:
    """Return the rollouts on an instance; raises `InputError` that names the instances that were logged."""
    logged = rollouts_of(run_dir)
    mine = [sample for sample in logged if instance_of(sample) == instance]
    if not mine:
        counts = Counter(instance_of(sample) for sample in logged)
        raise InputError(_unknown("INSTANCE", instance, [name for name, _ in counts.most_common()], ""))
    return mine


def _unknown(variable: str, got: str, there: Sequence[str], none: str) -> Problem:
    if not there:
        return Problem(where=variable, wrong=none, fix="name the directory of results with RESULTS_DIR")
    close = nearest(got, there)
    named = list(dict.fromkeys([*([close] if close else []), *there]))[:MAX_NAMED]
    more = f" or one of {len(there) - len(named)} more" if len(there) > len(named) else ""
    expected = ", ".join(map(_printable, named)) + more
    return Problem(where=variable, got=_printable(got) or "an empty name", expected=expected, fix="name one of them")


def _printable(text: str) -> str:
    """Return a text that a terminal only shows; ids come from rows."""
    return "".join(letter if letter.isprintable() else f"U+{ord(letter):04X}" for letter in text[:200])


def render_replay(run: str, instance: str, rollouts: Sequence[Sample]) -> str:
    """Return the page: a table of the rollouts on an instance, then the newest of them turn by turn."""
    newest = list(enumerate(rollouts))[-MAX_SHOWN:][::-1]
    left_out = len(rollouts) - len(newest)
    note = f"<p class='note'>The {len(newest)} newest are shown; {left_out} older ones are not.</p>" if left_out else ""
    table = "".join(_line(number, sample) for number, sample in newest)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{visible(instance)}</title><style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head><body><main>"
        f"<header><p class='kicker'>{visible(run)}</p><h1>{visible(instance)}</h1>"
        f"<p class='facts'><span>{len(rollouts)} logged rollouts</span></p></header>"
        "<section><h2>Rollouts</h2><div class='scroll'><table class='numbers'><thead><tr><th>step</th><th>rows</th>"
        "<th>turns</th><th>verdict</th><th class='reason'>reason</th></tr></thead>"
        f"<tbody>{table}</tbody></table></div>{note}</section>"
        f"<section><h2>Turn by turn</h2>{''.join(replayed(s, anchor=f'r{n}') for n, s in newest)}</section>"
        "</main></body></html>\n"
    )


def _line(number: int, sample: Sample) -> str:
    return (
        f"<tr><td><a href='#r{number}'>step {sample['step']}</a></td><td>{escape(str(sample['kind']))}</td>"
        f"<td>{visible(str(sample.get('num_turns', '?')))}</td>"
        f"<td><span class='status {verdict_style(sample)}'>{escape(reward_words(sample))}</span></td>"
        f"<td class='reason'>{visible(str(sample.get('reason', '')))}</td></tr>"
    )


def file_name(instance: str) -> str:
    """Return the name of the page of an instance, whose id may hold anything."""
    return f"replay-{re.sub('[^A-Za-z0-9._-]+', '-', instance)[:100]}.html"


def text_lines(rollouts: Sequence[Sample]) -> Iterator[str]:
    """Yield a line per rollout, for the terminal."""
    for sample in rollouts[-MAX_SHOWN:]:
        yield f"step {sample['step']} ({sample['kind']}): {reward_words(sample)}, {sample.get('num_turns', '?')} turns"


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.report.replay", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, required=True, help="directory of runs")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--instance", required=True, help="instance_id of the task")
    parser.add_argument("--out", type=Path, help="file to write (default: replay-INSTANCE.html in the run directory)")
    arguments = parser.parse_args(argv)
    run_dir = find_run(arguments.results, arguments.run)
    mine = rollouts_on(run_dir, arguments.instance)
    out = arguments.out or run_dir / file_name(arguments.instance)
    write_atomically(out, render_replay(run_dir.name, arguments.instance, mine).encode(errors="replace"))
    print("\n".join(text_lines(mine)).encode("ascii", "backslashreplace").decode())
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
