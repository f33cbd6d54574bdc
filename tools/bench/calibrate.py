"""Take the speeds of the simulator from a measured run, and compare its forecast with another measured run.

    python -m tools.bench.calibrate --from RUN_DIR --against RUN_DIR [--max-age N --environment-seconds S]

One iteration of an engine with n sequences takes decode_seconds(n) = a + b*n. All rollouts of a step start together,
and n(i) of them still run at their i-th token. So a rollout of length L lasts a*L + b*sum(n(i), i <= L): the durations
of the median and of the longest rollout give two equations for a and b. Lengths are drawn from the sampled rollouts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import InputError, Problem
from recipes.grpo.metrics import TIMING_PREFIX
from tools.command_line import exit_status
from tools.look.report.load import RunData, StepRecord, load_run
from tools.sizing.simulator import Forecast, Loop, forecast

WARMUP_STEPS = 2  # left out: the pipeline still fills
_EXTRA = ("validation", "checkpointing")  # steps with these phases are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steady steps of a run, averaged."""

    step_seconds: float
    policy_waits: float  # share of the time
    engines_busy: float
    tokens_per_second: float
    num_steps: int


def steady_steps(run: RunData) -> list[StepRecord]:
    """Return the training steps after the warm-up that neither validated nor saved."""
    steps = [record for record in run.records if TIMING_PREFIX + "policy_training" in record.values][WARMUP_STEPS:]
    kept = [step for step in steps if not any(step.values.get(TIMING_PREFIX + name, 0.0) > 0.0 for name in _EXTRA)]
    if kept:
        return kept
    raise InputError(
        Problem(
            where=run.name,
            wrong=f"each of its {len(steps)} steps after the first {WARMUP_STEPS} validates or saves",
            fix="choose a longer run, or one with grpo.val_period=0",
        )
    )


def measured(run: RunData) -> Measured:
    """Return the averages that the simulator predicts."""
    steps = steady_steps(run)
    seconds = [step.values[TIMING_PREFIX + "total_step_time"] for step in steps]
    waits = [step.values[TIMING_PREFIX + "exposed_generation"] for step in steps]
    busy = [(1.0 - step.values["idle/generation"]) * total for step, total in zip(steps, seconds, strict=True)]
    tokens = [
        step.values["performance/generation_tokens_per_sec"] * total for step, total in zip(steps, seconds, strict=True)
    ]
    return Measured(
        step_seconds=statistics.fmean(seconds),
        policy_waits=sum(waits) / sum(seconds),
        engines_busy=sum(busy) / sum(seconds),
        tokens_per_second=sum(tokens) / sum(seconds),
        num_steps=len(steps),
    )


def measured_loop(run: RunData, *, max_age: int, environment_seconds: float = 0.0, num_engines: int = 1) -> Loop:
    """Return the loop of a run with its measured speeds.

    An environment takes `environment_seconds` longer on average, uniformly between 0.2 and 1.8 of them.
    """
    steps = steady_steps(run)
    lengths = [float(rollout["num_generated_tokens"]) for rollout in run.rollouts["train"]]
    prompts = round(_mean(steps, "train/num_groups"))
    rollouts = round(_mean(steps, "train/num_rollouts"))
    fixed, per_sequence = decode_speed(steps, lengths, wave=rollouts // num_engines)
    trained = statistics.fmean(_training_seconds(step) for step in steps)
    verifier = _mean(steps, "train/env_duration_s")
    return Loop(
        num_prompts=prompts,
        num_generations=rollouts // prompts,
        max_age=max_age,
        num_engines=num_engines,
        max_num_seqs=rollouts,
        decode_seconds=lambda n: fixed + per_sequence * n,
        prefill_seconds=0.0,  # included in the measured durations
        draw_tokens=lambda random: random.choice(lengths),
        turns=1,
        draw_environment_seconds=lambda random: verifier + environment_seconds * random.uniform(0.2, 1.8),
        train_seconds=lambda tokens: trained,
        refit_seconds=_mean(steps, TIMING_PREFIX + "weight_sync"),
    )


def decode_speed(steps: Sequence[StepRecord], lengths: Sequence[float], *, wave: int) -> tuple[float, float]:
    """Return (a, b) of decode_seconds(n) = a + b * n, in seconds, for an engine that starts `wave` rollouts at once."""
    # The expected number of rollouts still running at their i-th token, and its sum up to the median and the longest.
    longest = round(_mean(steps, "train/gen_tokens_per_sample/max"))
    median = max(1, round(statistics.median(lengths)))
    running = [wave * sum(length >= i for length in lengths) / len(lengths) for i in range(1, longest + 1)]
    middle, end = _mean(steps, "train/trajectory_duration_s/p50"), _mean(steps, "train/trajectory_duration_s/max")
    verifier = _mean(steps, "train/env_duration_s")
    early, late = sum(running[:median]), sum(running[median:])
    first, rest = middle - verifier, end - middle
    # median * a + early * b = first;  (longest - median) * a + late * b = rest
    determinant = median * late - (longest - median) * early
    a = (first * late - rest * early) / determinant if determinant else 0.0
    b = (median * rest - (longest - median) * first) / determinant if determinant else first / early
    if a < 0 or b < 0:  # noise: let one of the two terms explain everything
        a, b = (0.0, end / (early + late)) if a < 0 else (end / longest, 0.0)
    return a, b


def _training_seconds(step: StepRecord) -> float:
    """Return the seconds between having all groups and the refit."""
    waits = step.values[TIMING_PREFIX + "exposed_generation"] + step.values[TIMING_PREFIX + "weight_sync"]
    return step.values[TIMING_PREFIX + "total_step_time"] - waits


def _mean(steps: Sequence[StepRecord], key: str) -> float:
    return statistics.fmean(step.values[key] for step in steps)


def compare(found: Measured, predicted: Forecast) -> list[tuple[str, float, float]]:
    """Return (name, measured, predicted) of each number."""
    speed = predicted.tokens_per_step / predicted.step_seconds
    return [
        ("seconds per step", found.step_seconds, predicted.step_seconds),
        ("policy waits, share", found.policy_waits, predicted.policy_waits),
        ("engines busy, share", found.engines_busy, predicted.engines_busy),
        ("generated tokens/s", found.tokens_per_second, speed),
    ]


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate on one run, predict another, print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="run to take the speeds from")
    parser.add_argument("--against", type=Path, required=True, help="run to predict")
    parser.add_argument("--max-age", type=int, required=True, help="max_trajectory_age_steps of the run to predict")
    parser.add_argument("--environment-seconds", type=float, default=0.0, help="its extra latency per rollout, mean")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    source, target = load_run(args.source), load_run(args.against)
    loop = measured_loop(source, max_age=args.max_age, environment_seconds=args.environment_seconds)
    found = measured(target)
    print(
        f"{source.name} -> {target.name} ({found.num_steps} steps): one iteration of n sequences takes "
        f"{1000 * loop.decode_seconds(0):.2f} + {1000 * (loop.decode_seconds(1) - loop.decode_seconds(0)):.3f} n ms"
    )
    print(f"{'':<22}{'measured':>10}{'predicted':>11}")
    for what, real, simulated in compare(found, forecast(loop, seed=args.seed, num_steps=40)):
        print(f"{what:<22}{real:>10.3f}{simulated:>11.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
