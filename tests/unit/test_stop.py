"""Stopping early: by signal, and by the time the checkpoint must be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from recipes.stop import StopRequest, parse_duration


@pytest.fixture
def restored_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_duration() -> None:
    assert parse_duration("01:02:03:04") == 86400 + 2 * 3600 + 3 * 60 + 4


def test_limit_counts_from_the_job_and_leaves_room_for_a_step() -> None:
    now = 1000.0
    stop = StopRequest(must_save_by="00:00:10:00", job_start=500.0, clock=lambda: now)
    assert not stop.requested(step_seconds=99.0)
    assert stop.requested(step_seconds=100.0)
    assert stop.reason == "checkpointing.checkpoint_must_save_by"


@pytest.mark.parametrize("set_by", [-7200.0, 7200.0])
def test_a_clock_that_is_set_during_a_run_moves_no_limit(set_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    stop = StopRequest.from_environment("00:00:10:00")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + set_by)
    assert not stop.requested(step_seconds=590.0)
    assert stop.requested(step_seconds=600.0)


def test_no_limit_never_stops() -> None:
    assert not StopRequest(must_save_by=None, job_start=0.0).requested(step_seconds=1e9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.usefixtures("restored_signals")
def test_a_signal_is_remembered_and_wakes_the_wait(number: signal.Signals) -> None:
    woken: list[bool] = []
    stop = StopRequest(must_save_by=None, job_start=0.0)
    stop.install()
    stop.wake_with(lambda: woken.append(True))
    os.kill(os.getpid(), number)
    assert woken == [True]
    assert stop.requested(step_seconds=0.0)
    assert stop.reason == f"signal {number.name}"


@pytest.mark.usefixtures("restored_signals")
def test_a_signal_held_back_while_the_process_started_is_taken() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    # To this thread: another one, left by another test, does not hold the signal back, and it would end the process.
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    woken: list[bool] = []
    stop = StopRequest(must_save_by=None, job_start=0.0)
    stop.install()
    stop.wake_with(lambda: woken.append(True))
    assert woken == [True]
    assert stop.reason == "signal SIGUSR1"


def test_the_jobs_end_leaves_room_for_a_step_and_for_saving() -> None:
    now = 0.0
    stop = StopRequest(must_save_by=None, job_start=0.0, job_end=7200.0, clock=lambda: now)
    now = 7200.0 - 600.0 - 99.0
    assert stop.requested(step_seconds=99.0)
    assert stop.reason == "the job's time limit"
    stop = StopRequest(must_save_by=None, job_start=0.0, job_end=7200.0, clock=lambda: now)
    assert not stop.requested(step_seconds=98.0)
    stop.save_seconds = 350.0  # saving takes longer than was thought
    assert stop.requested(step_seconds=0.0)


def test_a_short_job_is_not_all_reserve(caplog: pytest.LogCaptureFixture) -> None:
    stop = StopRequest(must_save_by=None, job_start=0.0, job_end=120.0, clock=lambda: 90.0)
    assert not stop.requested(step_seconds=9.0)
    assert stop.requested(step_seconds=10.0)
    times = "30 s are left, of which 20 s are for saving; a step takes about 10 s"
    assert caplog.messages == [f"stopping early: the job's time limit; {times}"]


def test_times_are_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    assert StopRequest.from_environment(None).requested(step_seconds=0.0)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert not StopRequest.from_environment(None).requested(step_seconds=1e9)
