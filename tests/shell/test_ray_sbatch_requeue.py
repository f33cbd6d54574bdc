"""The Slurm job file with shims for Slurm's programs: after which ends it starts again, and without which nodes."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.shell.job_shims import SRUN, wait_for_driver


def test_a_save_is_followed_by_a_requeue(job):
    (job.directory / "saves").touch()
    code, output = job.run(driver=75, environment={"SLURM_RESTART_COUNT": "2"})
    assert code == 75
    assert job.was_requeued()
    assert "requeued: saved step_25, restart 3 of at most 3" in output


@pytest.mark.parametrize(("num_failures", "num_requeues"), [(2, 3), (100, 8)])
def test_a_controller_that_is_away_for_a_moment_is_asked_again(job, num_failures, num_requeues):
    (job.directory / "saves").touch()
    (job.directory / "away").write_text("x\n" * num_failures)
    code, output = job.run(driver=75)
    assert code == 75
    assert job.requeues() == num_requeues
    assert ("requeued: saved" in output) == (num_failures == 2)
    assert ("Slurm did not take the requeue; submit again" in output) == (num_failures == 100)


@pytest.mark.parametrize("is_requeued", [True, False])
def test_nemo_rl_ends_with_0_also_when_only_its_time_was_up(job, is_requeued):
    says = "Timeout has been reached, stopping training early" if is_requeued else "all steps are done"
    (job.directory / "run" / "checkpoints" / "step_20").mkdir(parents=True)
    srun = job.directory / "bin" / "srun"
    saves = 'mkdir -p "${SHIM_DIR}/run/checkpoints/step_100"'
    srun.write_text(SRUN.replace("begin: what was wrong", says).replace('  exit "$(<', f'  {saves}\n  exit "$(<'))
    code, output = job.run(driver=0)
    assert code == (75 if is_requeued else 0)
    assert job.was_requeued() == is_requeued
    assert ("requeued: saved step_100" in output) == is_requeued


def test_restarts_are_counted(job):
    (job.directory / "saves").touch()
    code, output = job.run(driver=75, environment={"SLURM_RESTART_COUNT": "3"})
    assert code == 75
    assert not job.was_requeued()
    assert "restart 3 of at most 3 (MAX_RESTARTS)" in output


def test_a_job_that_slurm_restarts_again_and_again_ends(job):
    code, output = job.run(driver=0, environment={"SLURM_RESTART_COUNT": "4"})
    assert code == 2
    assert "restart 4 of at most 3 (MAX_RESTARTS)" in output
    assert not (job.directory / "calls").exists()  # nothing was started


def test_a_start_that_saved_nothing_is_not_followed_by_another(job):
    checkpoints = job.directory / "run" / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest").symlink_to("step_000010")
    code, output = job.run(driver=75)
    assert code == 75
    assert not job.was_requeued()
    assert "saved no new checkpoint (newest: step_000010)" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_steps_is_followed_by_another_start(job, number):
    (job.directory / "end").write_text("Unknown")
    control = job.directory / "bin" / "scontrol"
    control.write_text(control.read_text() + "sleep 0.4\n")
    process = job.start()
    end = time.monotonic() + 20
    while not (job.directory / "control").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 75, output
    assert f"got {number.name.removeprefix('SIG')} before anything was started" in output
    assert not (job.directory / "calls").exists()
    assert job.was_requeued(), output


@pytest.mark.parametrize("status", [138, 143])
def test_a_driver_that_the_signal_ends_while_its_python_loads_starts_again(job, status):
    (job.directory / "end").write_text("Unknown")
    code, output = job.run(driver=status)
    assert code == 75
    assert job.was_requeued(), output


@pytest.mark.parametrize(("end", "is_requeued"), [("Unknown", True), ("2126-01-02T04:04:05", True), (None, False)])
def test_a_start_that_was_interrupted_before_its_first_save_is_followed_by_another(job, end, is_requeued):
    """Unless its time was up: the end that the shim gives by default is long past."""
    if end is not None:
        (job.directory / "end").write_text(end)
    process = job.start()
    wait_for_driver(job, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert job.was_requeued() == is_requeued
    assert ("requeued: interrupted before its first save, restart 1 of at most 3" in output) == is_requeued
    assert ("saved no new checkpoint" in output) != is_requeued


def test_a_start_whose_time_to_save_had_come_is_not_followed_by_another(job):
    (job.directory / "end").write_text("2126-01-02T04:04:05")
    srun = job.directory / "bin" / "srun"
    srun.write_text(SRUN.replace("begin: what was wrong", "stopping early: checkpointing.checkpoint_must_save_by"))
    code, output = job.run(driver=75)
    assert code == 75
    assert not job.was_requeued()
    assert "saved no new checkpoint" in output


def test_a_cancelled_job_stays_cancelled(job):
    (job.directory / "saves").touch()
    (job.directory / "state").write_text("CANCELLED")
    code, output = job.run(driver=75)
    assert code == 75
    assert not job.was_requeued()
    assert "the job's state is CANCELLED" in output


def test_a_failure_that_saved_nothing_is_the_end(job):
    code, output = job.run(driver=1)
    assert code == 1
    assert re.search(r"the driver ended with status 1; .*/driver.log:\n\S+   begin: what was wrong\n", output), output
    assert "saved no new checkpoint (newest: none)" in output
    assert "is lost" not in output
    assert not job.was_requeued()


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_preempted_start_is_followed_by_another_on_any_node(job, has_saved):
    """Slurm ends the programs of all steps, Ray's too, long before it tells the job file."""
    (job.directory / "preempted").write_text("2026-01-02T03:30:00")
    if has_saved:
        (job.directory / "saves").touch()
    code, output = job.run(worker=0)
    assert code == 1
    saved = "saved step_05" if has_saved else "saved nothing new"
    assert f"requeued: preempted, {saved}, restart 1 of at most 3" in output
    assert job.requeues() == 1
    assert job.updates() == []


def test_a_failure_after_a_save_is_followed_by_another_start(job):
    (job.directory / "saves").touch()
    code, output = job.run(driver=1)
    assert code == 1
    assert job.was_requeued()
    assert "requeued: failed with status 1 after it had saved step_05, restart 1 of at most 3" in output
    assert "ExcNodeList" not in " ".join(job.updates())  # its message names no node


def test_failures_count_as_restarts(job):
    (job.directory / "saves").touch()
    code, output = job.run(driver=1, environment={"SLURM_RESTART_COUNT": "3"})
    assert code == 1
    assert not job.was_requeued()
    assert "restart 3 of at most 3 (MAX_RESTARTS)" in output


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ("EngineError: generation engine 0 (node 127.0.0.2, actor pid 7, EngineCore pid 8) died", "127.0.0.2"),
        ("PolicyError: rank 3 (pid 7 on node ab12, 127.0.0.3) died", "127.0.0.3"),
        ("RunError: 127.0.0.1 and 127.0.0.2 and 127.0.0.3 do not answer", ""),
        ("RunError: node 127.0.0.22 is not one of these", ""),
    ],
)
def test_the_next_start_runs_without_the_node_that_the_failure_names(job, message, left_out):
    (job.directory / "saves").touch()
    srun = job.directory / "bin" / "srun"
    srun.write_text(SRUN.replace("begin: what was wrong", message))
    output = job.run(driver=1)[1]
    assert job.was_requeued()
    assert job.updates() == ([f"update JobId=7 ExcNodeList={left_out}"] if left_out else [])
    assert (f"the next start runs without {left_out}" in output) == bool(left_out)


def test_a_step_that_failed_names_its_node_and_earlier_ones_stay_left_out(job):
    (job.directory / "saves").touch()
    (job.directory / "excluded").write_text("n[8-9]")
    code, output = job.run(worker=1)
    assert code == 1
    assert "a Ray worker ended with status 1 before the driver" in output
    assert job.updates() == ["update JobId=7 ExcNodeList=127.0.0.2,n[8-9]"]
    assert "on 127.0.0.3: " not in output  # srun ended its task, for the other had failed


def test_a_node_is_used_again_where_the_partition_has_no_other(job):
    (job.directory / "saves").touch()
    (job.directory / "partition").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n")
    output = job.run(worker=1)[1]
    assert job.was_requeued()
    assert job.updates() == []
    assert "127.0.0.2 failed and may be used again: the partition has no other node" in output


def test_names_beside_the_checkpoints_are_no_checkpoints(job):
    for name in ("step_000007", "step_000009.bak", "step_x"):
        (job.directory / "run" / "checkpoints" / name).mkdir(parents=True)
    assert "saved no new checkpoint (newest: step_000007)" in job.run(driver=75)[1]


def test_a_lost_node_is_named_and_the_requeue_left_to_slurm(job):
    job.slurmd.close()
    job.ends(driver=1)
    process = job.start()
    wait_for_driver(job, process)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "for Slurm to notice" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 1
    assert sum("is lost: no slurmd answers there" in line for line in lines) == 3
    assert "Slurm ends this start" in lines[-1]
    assert not job.was_requeued()


def test_a_lost_node_that_slurm_does_not_notice_is_left_out_of_the_next_start(job):
    job.slurmd.close()
    output = job.run(driver=1, environment={"DOWN_MARGIN_SECONDS": "0"})[1]
    assert "Slurm has not noticed" in output
    assert job.requeues() == 1
    assert "lost 127.0.0.1 127.0.0.2 127.0.0.3, restart 1 of at most 3" in output


def test_a_probe_that_finds_not_even_its_own_node_finds_no_lost_ones(job):
    job.slurmd.close()
    output = job.run(driver=1, environment={"SLURMD_NODENAME": "127.0.0.1"})[1]
    assert "is lost" not in output
    assert "not restarted: this start saved no new checkpoint" in output


def test_a_lost_node_is_not_waited_for_after_the_last_restart(job):
    job.slurmd.close()
    output = job.run(driver=1, environment={"SLURM_RESTART_COUNT": "3"})[1]
    assert "waiting" not in output
    assert "restart 3 of at most 3 (MAX_RESTARTS)" in output
    assert not job.was_requeued()


def test_the_next_start_says_which_node_slurm_lost(job):
    """Slurm may end the job file with the node, before it can say anything."""
    job.run(worker=0)
    (job.directory / "worker").unlink()  # of the second start, only the driver ends
    code, output = job.run(driver=0, environment={"SLURM_RESTART_COUNT": "1"})
    assert code == 0
    assert output.count("srun: error: Node failure on n9") == 1
