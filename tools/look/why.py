"""Say why a run does not learn: what each cause is, in how many steps, and which key to change.

    python -m tools.look.why [--exp-name NAME]

Causes that one step shows are those of log, status and report. The others show in the course of the run alone: rates,
entropy, rows. Exit status 0, also when causes were found; 2 when there is no such run or it has done no step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.command_line import exit_status
from tools.look.report.load import RunData, load_run
from tools.look.report.page import little_learned, trained
from tools.look.run_state import find_run

FEW_STEPS = 10  # of fewer nothing can be said but what single steps show
RISE, NO_RISE = 0.1, 0.02  # of a mean reward of at most 1
MANY_VISITS = 4  # of a row, on average


def course(run: RunData) -> Iterator[str]:
    """Yield the causes that only the course of a run shows."""
    steps = trained(run)
    if len(steps) < FEW_STEPS:
        yield f"few steps: {len(steps)} are done, and most runs need more than {FEW_STEPS}; let it run on"
        return
    yield from _rate(run)
    first, last = _ends(run.column("train/approx_entropy").values)
    if 0 < last < first / 10:
        yield (
            f"entropy fell from {first:.3g} to {last:.3g}: the answers to a prompt are nearly alike; lower "
            "policy.megatron_cfg.optimizer.lr, or raise loss_fn.reference_policy_kl_penalty"
        )
    before, after = _ends(run.column("train/reward").values)
    held_out = run.column("validation/accuracy").values
    if after - before >= RISE and len(held_out) > 1 and held_out[-1] - held_out[0] <= NO_RISE:
        yield (
            f"learned by heart: the reward rose from {before:.3f} to {after:.3f}, that of held-out rows went from "
            f"{held_out[0]:.3f} to {held_out[-1]:.3f}; give more rows, or fewer steps (grpo.max_num_steps)"
        )


def _rate(run: RunData) -> Iterator[str]:
    """Yield that the learning rate is far below the one that is set."""
    rates, wanted = run.column("train/lr").values, run.setting("policy.megatron_cfg.optimizer.lr")
    if rates and isinstance(wanted, int | float) and max(rates[-FEW_STEPS:]) < wanted / 10:
        yield (
            f"learning rate: it is {rates[-1]:.3g}, and policy.megatron_cfg.optimizer.lr is {wanted:.3g}; shorten the "
            "warm-up or lengthen the decay (policy.megatron_cfg.scheduler)"
        )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last fifth of a curve."""
    size = max(1, len(values) // 5)
    return (statistics.fmean(values[:size]), statistics.fmean(values[-size:])) if values else (0.0, 0.0)


def rows(run: RunData) -> Iterator[str]:
    """Yield what the rows have to do with it: those that teach nothing, and those that come too often."""
    seen: dict[str, dict[int, float]] = {}
    for line in run.pass_rates:
        if isinstance(line.get("pass_rate"), int | float):
            seen.setdefault(str(line.get("row_id")), {})[line["step"]] = float(line["pass_rate"])
    if not seen:
        return
    never, always = (sum(set(rates.values()) == {end} for rates in seen.values()) for end in (0.0, 1.0))
    if never + always > len(seen) / 2:
        yield (
            f"rows: of {len(seen)} trained, {never} were never solved and {always} always, which teaches nothing; "
            "choose others by how often they are solved (`make profile`, then `make curriculum`)"
        )
    visits = sum(map(len, seen.values())) / len(seen)
    if visits >= MANY_VISITS:
        yield f"few rows: each of {len(seen)} was trained {visits:.1f} times on average; give more rows (TRAIN_PATH)"


def explain(run: RunData) -> list[str]:
    """Return every cause of a run."""
    compares = bool(run.column("train/num_groups_zero_variance").values)  # the rewards of a group
    return [*little_learned(run.records), *course(run), *(rows(run) if compares else ())]


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print why a run does not learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="directory of the runs")
    parser.add_argument("--exp-name", default="", help="name of the run; default: the newest")
    args = parser.parse_args(argv)
    run = load_run(find_run(args.results, args.exp_name))
    curves = [("reward", "train/reward"), ("held-out", "validation/accuracy")]
    shown = [(name, run.column(key).values) for name, key in curves]
    ends = ", ".join(f"{name} {values[0]:.3f} -> {values[-1]:.3f}" for name, values in shown if values)
    print(f"{run.name}: {len(trained(run))} steps" + (f", {ends}" if ends else ""))
    for text in explain(run) or ["nothing that is known keeps it from learning"]:
        print(f"  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
