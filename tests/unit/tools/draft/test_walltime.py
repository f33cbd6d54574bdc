"""The time by which a run must save lies inside its job."""

import pytest

from tools.draft.slurm import signal_option, slurm_seconds, walltime_problems


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("1-00:30", 88200),
        ("1-00:00:05", 86405),
        ("4h", None),
        ("1:2:3:4", None),
        ("-1", None),
    ],
)
def test_slurm_time(text, seconds):
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("limit", ["4:00:00", "240", "0-4"])
def test_saving_after_the_end_of_the_job_is_refused(limit):
    assert walltime_problems("00:03:59:59", limit) == []
    assert walltime_problems(None, limit) == []
    (problem,) = walltime_problems("00:04:00:00", limit)
    assert str(problem) == (
        f"checkpointing.checkpoint_must_save_by: got 00:04:00:00, expected less than SLURM_TIME_LIMIT = {limit}; "
        "the job would end before it saves; lower it"
    )


def test_no_limit_and_a_wrong_one():
    assert walltime_problems("09:00:00:00", "UNLIMITED") == []
    (problem,) = walltime_problems(None, "four hours")
    assert problem.where == "SLURM_TIME_LIMIT"


@pytest.mark.parametrize("limit", ["4:00:00", "40:00", "unlimited"])
def test_slurm_signals_a_long_job_before_its_end(limit):
    assert signal_option(limit) == ("--signal=B:TERM@600",)


def test_a_short_job_is_not_signalled_as_soon_as_it_starts():
    assert signal_option("0:02:00") == ()
