"""The simulator against measured runs: speeds from the synchronous run alone predict the other three.

tests/golden/simulator holds what `make bench` measured on two CPU cores: the tiny stage 1.1, synchronous and
asynchronous, with environments as fast as they are and with 0.5 s more per rollout. Only the keys needed are kept.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from recipes.errors import InputError
from tools.bench.calibrate import compare, decode_speed, main, measured, measured_loop, steady_steps
from tools.look.report.load import StepRecord, load_run
from tools.sizing.simulator import forecast

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "simulator"


@pytest.mark.parametrize(
    ("target", "max_age", "latency"),
    [("sync_0s", 0, 0.0), ("async_0s", 1, 0.0), ("sync_0.5s", 0, 0.5), ("async_0.5s", 1, 0.5)],
)
def test_one_run_predicts_the_others(target, max_age, latency):
    loop = measured_loop(load_run(GOLDEN / "sync_0s"), max_age=max_age, environment_seconds=latency)
    found = measured(load_run(GOLDEN / target))
    predicted = forecast(loop, seed=0, num_steps=40)
    assert predicted.step_seconds == pytest.approx(found.step_seconds, rel=0.06)
    assert predicted.engines_busy == pytest.approx(found.engines_busy, abs=0.04)
    assert predicted.policy_waits == pytest.approx(found.policy_waits, abs=0.04)


def test_the_prediction_is_not_that_nothing_changes():
    """The measured step times differ by up to 2.6: the bounds above would catch a rule that is ignored."""
    seconds = [measured(load_run(path)).step_seconds for path in GOLDEN.iterdir()]
    assert max(seconds) / min(seconds) > 2.5


def make_step(**values: float) -> StepRecord:
    keys = {
        "longest": "train/gen_tokens_per_sample/max",
        "p50": "train/trajectory_duration_s/p50",
        "slowest": "train/trajectory_duration_s/max",
        "verifier": "train/env_duration_s",
    }
    return StepRecord(step=3, time=0.0, values={keys[name]: value for name, value in values.items()})


def test_the_decode_speed_of_a_wave_worked_out_by_hand():
    # 4 rollouts of 10, 10, 10 and 20 tokens, 5 + 2 n ms per iteration: 10 * 13 ms, then 10 * 7 ms; 30 ms of verifier
    step = make_step(longest=20.0, p50=0.160, slowest=0.230, verifier=0.030)
    fixed, per_sequence = decode_speed([step], [10.0, 10.0, 10.0, 20.0], wave=4)
    assert (fixed, per_sequence) == (pytest.approx(0.005), pytest.approx(0.002))


def test_a_speed_is_never_negative():
    step = make_step(longest=20.0, p50=0.160, slowest=0.161, verifier=0.030)
    fixed, per_sequence = decode_speed([step], [10.0, 10.0, 10.0, 20.0], wave=4)
    assert fixed == 0.0 and per_sequence > 0.0
    flat = make_step(longest=20.0, p50=0.1, slowest=0.1, verifier=0.1)
    assert min(decode_speed([flat], [20.0] * 4, wave=4)) >= 0.0


def test_steps_that_validate_or_save_do_not_count():
    run = load_run(GOLDEN / "sync_0s")
    kept = steady_steps(run)
    assert [step.step for step in kept] == list(range(3, 12))
    found = measured(run)
    assert found.step_seconds == statistics.fmean(step.values["timing/train/total_step_time"] for step in kept)


def test_a_run_without_a_steady_step_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing/train/policy_training": 1.0}\n', encoding="utf-8")
    with pytest.raises(InputError, match="longer run"):
        measured(load_run(tmp_path))


def test_the_command_prints_measured_and_predicted(capsys):
    arguments = ["--from", str(GOLDEN / "sync_0s"), "--against", str(GOLDEN / "async_0.5s")]
    assert main([*arguments, "--max-age", "1", "--environment-seconds", "0.5"]) == 0
    output = capsys.readouterr().out
    assert "sync_0s -> async_0.5s (9 steps)" in output
    assert output.count("\n") == 2 + len(compare(measured(load_run(GOLDEN / "sync_0s")), _any_forecast()))
    assert main(["--from", "/nowhere", "--against", "/nowhere", "--max-age", "1"]) == 2


def _any_forecast():
    return forecast(measured_loop(load_run(GOLDEN / "sync_0s"), max_age=0), seed=0, num_steps=2)
