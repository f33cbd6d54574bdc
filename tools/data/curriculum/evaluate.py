"""Evaluates a checkpoint on rows, beside the one that it was trained from: pass@k with intervals, per environment.

    python -m tools.data.curriculum.evaluate CHECKPOINT --results DIR [--data ROWS] [--baseline DIR]
    python -m tools.data.curriculum.evaluate --url http://host:8000/v1 [--served NAME] --data ROWS --results DIR

Each row is answered several times, and once without sampling, with the settings of the run. Answers of earlier starts
are kept: the same command goes on after a kill. DIR/eval-NAME/ has the page and one line of JSON.
Exit status 0; 1 when a row has no verdict; 2 for a wrong input.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from markupsafe import Markup

from recipes.config.load import config_path, find_stage
from recipes.errors import InputError, Problem
from recipes.files import write_atomically
from tools.command_line import exit_status, positive
from tools.data.curriculum import by_url, profile
from tools.data.files.fetch import model_of, rows_file
from tools.look.report.chart import Series, line_chart, page, part
from tools.look.report.load import Column
from tools.look.run_state import find_checkpoint

ALL = "all rows"
HEADS = ("environment", "model", "rows", "pass@1 (95 %)", "pass@k", "greedy", "mean reward", "gain in pass@1 (95 %)")
SHARES, GAINS = (1.0, 1.0, 0.0, 0.0), (1.0, -1.0)  # rows that an interval of solved rows, or of gains, counts as well
_Z = 1.96  # of an interval that holds 95 of 100 true values


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over rows, and what it lies in with 95 %."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What one checkpoint did on the rows of one environment, or on all of them."""

    num_rows: int
    num_judged: int  # with a verdict of at least one answer
    reward: float  # mean over rows
    pass_at: Mapping[int, float]  # k -> share of rows that one of k answers solves
    solved: Interval  # pass@1
    greedy: Interval | None  # share of rows that the answer without sampling solves
    num_never: int  # rows that no answer solves
    num_always: int  # rows that every answer solves; training learns from the others


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the chance that one of k answers is right, k drawn from those that were sampled, without putting back.

    The estimator without bias of Chen et al. 2021 (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k).
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"got k = {k}, expected 1 to {num_samples}, the number of answers")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def interval(values: Sequence[float], added: Sequence[float] = SHARES) -> Interval:
    """Return the mean of a value per row, with its interval of 95 %; answers to one row are one observation.

    The interval counts `added` as well, as Agresti and Coull 1998 do for shares: two rows that are solved and two that
    are not. So it is no point where all rows are alike. It ends at the smallest and the largest of them. Raises
    `ValueError` without values.
    """
    mean, kept = statistics.fmean(values), [*values, *added]
    center, half = statistics.fmean(kept), _Z * statistics.stdev(kept) / math.sqrt(len(kept))
    low, high = min(center - half, mean), max(center + half, mean)
    return Interval(mean=mean, low=max(low, min(added)), high=min(high, max(added)))


def scores(entries: Sequence[Mapping[str, Any]], greedy: Sequence[Mapping[str, Any]]) -> Scores:
    """Return what the lines of a profile say together; rows without a verdict count in `num_rows` alone.

    A row with fewer verdicts than k has no part in pass@k. Raises `ValueError` where no row has a verdict.
    """
    judged = [entry for entry in entries if entry["pass_rate"] is not None]
    counts = [(entry["num_scored"], round(entry["pass_rate"] * entry["num_scored"])) for entry in judged]
    most = max(n for n, _ in counts)
    solved = [entry["pass_rate"] for entry in greedy if entry["pass_rate"] is not None]
    return Scores(
        num_rows=len(entries),
        num_judged=len(judged),
        reward=statistics.fmean(entry["mean_reward"] for entry in judged),
        pass_at={
            k: statistics.fmean(pass_at_k(n, right, k) for n, right in counts if n >= k)
            for k in (2**power for power in range(most.bit_length()))
        },
        solved=interval([entry["pass_rate"] for entry in judged]),
        greedy=interval(solved) if solved else None,
        num_never=sum(entry["pass_rate"] == 0 for entry in judged),
        num_always=sum(entry["pass_rate"] == 1 for entry in judged),
    )


def by_environment(directory: Path) -> dict[str, Scores | None]:
    """Return the scores of a profile's directory: of all rows first, then per agent by name.

    None for an agent of whose rows none has a verdict. Raises `InputError` when that is true of all.
    """
    sampled, greedy = (_lines(place / profile.RESULT) for place in (directory, directory / profile.GREEDY))
    judged = {entry["agent"] for entry in sampled if entry["pass_rate"] is not None}
    if not judged:
        fix = "correct what `reason` says in its lines, then run this again"
        where = str(directory / profile.RESULT)
        raise InputError(Problem(where=where, wrong="no answer to any row has a verdict", fix=fix))
    found: dict[str, Scores | None] = {ALL: scores(sampled, greedy)}
    agents = sorted({entry["agent"] for entry in sampled})
    for agent in agents if len(agents) > 1 else ():
        own = [[entry for entry in lines if entry["agent"] == agent] for lines in (sampled, greedy)]
        found[environment_of(agent)] = scores(*own) if agent in judged else None
    return found


def environment_of(agent: str) -> str:
    """Return an agent's name as the table shows it."""
    return agent.removesuffix("_simple_agent")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def gains(before: Path, after: Path) -> dict[str, Interval]:
    """Return the gain in pass@1 row by row, for all rows and per agent: the same rows, so their difficulty cancels."""
    first, second = (
        {entry["line"]: entry for entry in _lines(one / profile.RESULT) if entry["pass_rate"] is not None}
        for one in (before, after)
    )
    found: dict[str, list[float]] = {ALL: []}
    for line in sorted(first.keys() & second.keys()):
        gain = second[line]["pass_rate"] - first[line]["pass_rate"]
        found[ALL].append(gain)
        found.setdefault(environment_of(second[line]["agent"]), []).append(gain)
    return {name: interval(values, GAINS) for name, values in found.items() if values}


def cells(found: Mapping[str, Mapping[str, Scores | None]], gained: Mapping[str, Interval]) -> list[tuple[str, ...]]:
    """Return a row of text per checkpoint and environment, below `HEADS`; the last checkpoint shows its gain."""
    everything = [one for per_environment in found.values() for one in per_environment.values() if one is not None]
    k = min(max(one.pass_at) for one in everything)  # the largest that all have
    rows = []
    for label, per_environment in found.items():
        for name, one in per_environment.items():
            if one is None:
                rows.append((name, label, "no verdict", *[""] * 5))
                continue
            gain = gained.get(name) if label == list(found)[-1] else None
            rows.append(
                (
                    name,
                    label,
                    str(one.num_rows) if one.num_judged == one.num_rows else f"{one.num_judged} of {one.num_rows}",
                    f"{one.solved.mean:.3f} ({one.solved.low:.3f} to {one.solved.high:.3f})",
                    f"{one.pass_at[k]:.3f} (k = {k})",
                    f"{one.greedy.mean:.3f}" if one.greedy else "",
                    f"{one.reward:.3f}",
                    f"{gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})" if gain else "",
                )
            )
    return sorted(rows, key=lambda row: (row[0] != ALL, row[0]))


def in_words(label: str, one: Scores) -> str:
    """Return what the answers of a checkpoint to all rows say about training on such rows."""
    share = f"{label}: solves {one.solved.mean:.0%} ({one.solved.low:.0%} to {one.solved.high:.0%})"
    alike = one.num_never + one.num_always
    learns = f"the other {one.num_judged - alike} teach" if alike < one.num_judged else "none teaches anything"
    return f"{share} of {one.num_judged} rows: {one.num_never} never, {one.num_always} always; {learns}"


def text_of(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as aligned lines."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def page_of(
    title: str, facts: Sequence[str], rows: Sequence[Sequence[str]], pass_at: Mapping[str, Mapping[int, float]]
) -> str:
    """Return the page: a table, and per checkpoint the share of rows that one of k answers solves."""
    curves = [
        Series(
            label=label,
            column=Column(steps=tuple(shares), values=tuple(shares.values()), along="answers"),
            color=color,
            has_points=True,
        )
        for color, (label, shares) in enumerate(pass_at.items())
    ]
    chart = line_chart("pass@k of all rows", curves, include=(0.0, 1.0), note="k answers, of which one must be right")
    body = [
        part("page", "header", title=title, facts=facts),
        part("page", "charts", drawn=Markup(chart)),
        part("page", "table", heads=HEADS, rows=rows, reason=(0, 1)),
    ]
    return page(title, body)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.split("\n", 1)[0])
    about = "a run, one of its checkpoints, a Hugging Face directory, or a name on the hub"
    parser.add_argument("checkpoint", nargs="?", default="", help=f"{about}; not with --url")
    parser.add_argument("--url", default="", help="in its place: an engine that serves it, up to and with /v1")
    parser.add_argument("--served", default="", help="name of the model there, which may be left out if it has one")
    parser.add_argument("--baseline", help="what it is compared with, by default what it was trained from")
    parser.add_argument("--config", type=Path, help="whose engines and environments are used, by default the run's")
    parser.add_argument("--stage", default="stage1.1", help="in its place where no run says, at SCALE on PLATFORM")
    parser.add_argument("--data", help="rows that are answered, by default the run's held-out ones")
    parser.add_argument("--results", type=Path, required=True, help="directory in which that of the results is made")
    parser.add_argument("--samples", type=positive, default=8, help="answers per row")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    args = parser.parse_intermixed_args(argv)
    if args.url and "=" in args.checkpoint:  # the first override
        args.checkpoint, args.overrides = "", [args.checkpoint, *args.overrides]
    return args


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model behind a URL."""

    url: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"


def _measure(model: Path | Served, config: Path, data: Path, run_dir: Path, args: argparse.Namespace) -> int:
    """Write the profile of one model; return its status."""
    if isinstance(model, Served):
        checked = profile.checked_config(config, profile.settings(model.name, data, args.overrides))
        return by_url.measure(checked, data, run_dir, url=model.url, model=model.name, samples=args.samples)
    words = ["--config", str(config), "--model", str(model), "--data", str(data), "--samples", str(args.samples)]
    return profile.main([*words, "--greedy", "--run-dir", str(run_dir), *args.overrides])


def _chosen(args: argparse.Namespace) -> tuple[str, dict[str, Path | Served], Path, Path]:
    """Return the name of what is evaluated, the models by label, the configuration and the rows."""
    if bool(args.url) == bool(args.checkpoint):
        fix = "give a checkpoint: CHECKPOINT, or an engine that serves one: URL, and not both"
        raise InputError(Problem(where="CHECKPOINT and URL", wrong="one of them says what is evaluated", fix=fix))
    served = Served(url=args.url, name=by_url.served_model(args.url, args.served)) if args.url else None
    checkpoint = find_checkpoint(model_of(args.checkpoint)) if served is None else None
    before = find_checkpoint(model_of(args.baseline)).model if args.baseline else None
    before = before or (checkpoint.trained_from if checkpoint else None)
    data = rows_file(args.data) if args.data else checkpoint.rows if checkpoint else None
    if data is None:
        problem = Problem(where="DATA", wrong="no run says which rows are held out", fix="give DATA=rows.jsonl")
        raise InputError(problem)
    scale, platform = os.environ.get("SCALE") or "prod", os.environ.get("PLATFORM") or "h100"
    config = args.config or (checkpoint.config if checkpoint else None)
    config = config or config_path(find_stage(args.stage), scale, platform)
    what = served or (checkpoint.model if checkpoint else Path())
    name = re.sub(r"[^\w.-]", "-", served.name) if served else checkpoint.name if checkpoint else ""
    return name, {**({"before": before} if before else {}), "checkpoint": what}, config, data


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint, and what it is compared with."""
    args = _arguments(argv)
    name, models, config, data = _chosen(args)
    out, status = args.results / f"eval-{name}", 0
    for label, model in models.items():
        print(f"evaluate: {label}: {model}", flush=True)
        ended = _measure(model, config, data, out / label, args)
        if ended not in (0, 1) or not (out / label / profile.GREEDY / profile.RESULT).is_file():
            return ended
        status = max(status, ended)
    found = {label: by_environment(out / label) for label in models}
    gained = gains(out / "before", out / "checkpoint") if "before" in models else {}
    rows = cells(found, gained)
    facts = [f"{label}: {model}" for label, model in models.items()] + [f"rows: {data}", f"{args.samples} answers"]
    page_file = out / "evaluation.html"
    pass_at = {label: one.pass_at for label, of_all in found.items() if (one := of_all[ALL]) is not None}
    write_atomically(page_file, page_of(f"Evaluation of {name}", facts, rows, pass_at).encode())
    numbers = {"models": {label: str(model) for label, model in models.items()}, "rows": str(data)}
    line = orjson.dumps(numbers | {"scores": found, "gain": gained}, option=orjson.OPT_NON_STR_KEYS)
    write_atomically(out / "evaluation.json", line + b"\n")
    print(text_of([HEADS, *rows]))
    print("\n".join(in_words(label, one) for label, of_all in found.items() if (one := of_all[ALL]) is not None))
    print(f"page: {page_file}, for scripts: {out / 'evaluation.json'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
