"""Show what a coding agent did on one instance, turn by turn: `make swe-replay EXP_NAME=... INSTANCE=...`.

    python -m tools.look.report.replay --results results --run NAME --instance ID [--out FILE]

A run logs a few rollouts of every step, so an instance has those that were among them. The page lists all of them and
shows the newest. Exit status 2 for a run or an instance that is not there, with those that are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from recipes.errors import InputError, Problem, nearest
from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.look.report.chart import page, part, visible
from tools.look.report.load import read_lines
from tools.look.report.trajectory import Sample, instance_of, replayed, reward_words, verdict_style

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
    note = f"The {len(newest)} newest are shown; {left_out} older ones are not." if left_out else ""
    heads = ("step", "rows", "turns", "verdict", "reason")
    table = part("page", "table", heads=heads, rows=[_line(*one) for one in newest], reason=(4,))
    facts = [f"{len(rollouts)} logged rollouts"]
    turns = Markup("").join(replayed(sample, anchor=f"r{number}") for number, sample in newest)
    body = [
        part("page", "header", kicker=visible(run), title=visible(instance), facts=facts),
        part("page", "section", title="Rollouts", body=table, note=note),
        part("page", "section", title="Turn by turn", body=turns),
    ]
    return page(visible(instance), body)


def _line(number: int, sample: Sample) -> tuple[object, ...]:
    link = Markup("<a href='#r{}'>step {}</a>").format(number, sample["step"])
    verdict = part("page", "status", word=reward_words(sample), style=verdict_style(sample))
    turns, reason = visible(str(sample.get("num_turns", "?"))), visible(str(sample.get("reason", "")))
    return link, str(sample["kind"]), turns, verdict, reason


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
    parser = argparse.ArgumentParser(prog="python -m tools.look.report.replay", description=__doc__.split("\n", 1)[0])
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
