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
    (job.directory / "away").write_text("x\n" * num_failures, encoding="utf-8")
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
    srun.write_text(
        SRUN.replace("begin: what was wrong", says).replace('  exit "$(<', f'  {saves}\n  exit "$(<'), encoding="utf-8"
    )
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
    (job.directory / "end").write_text("Unknown", encoding="utf-8")
    control = job.directory / "bin" / "scontrol"
    control.write_text(control.read_text(encoding="utf-8") + "sleep 0.4\n", encoding="utf-8")
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
    (job.directory / "end").write_text("Unknown", encoding="utf-8")
    code, output = job.run(driver=status)
    assert code == 75
    assert job.was_requeued(), output


@pytest.mark.parametrize(("end", "is_requeued"), [("Unknown", True), ("2126-01-02T04:04:05", True), (None, False)])
def test_a_start_that_was_interrupted_before_its_first_save_is_followed_by_another(job, end, is_requeued):
    """Unless its time was up: the end that the shim gives by default is long past."""
    if end is not None:
        (job.directory / "end").write_text(end, encoding="utf-8")
    process = job.start()
    wait_for_driver(job, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert job.was_requeued() == is_requeued
    assert ("requeued: interrupted before its first save, restart 1 of at most 3" in output) == is_requeued
    assert ("saved no new checkpoint" in output) != is_requeued


def test_a_start_whose_time_to_save_had_come_is_not_followed_by_another(job):
    (job.directory / "end").write_text("2126-01-02T04:04:05", encoding="utf-8")
    srun = job.directory / "bin" / "srun"
    srun.write_text(
        SRUN.replace("begin: what was wrong", "stopping early: checkpointing.checkpoint_must_save_by"), encoding="utf-8"
    )
    code, output = job.run(driver=75)
    assert code == 75
    assert not job.was_requeued()
    assert "saved no new checkpoint" in output


def test_a_cancelled_job_stays_cancelled(job):
    (job.directory / "saves").touch()
    (job.directory / "state").write_text("CANCELLED", encoding="utf-8")
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
    (job.directory / "preempted").write_text("2026-01-02T03:30:00", encoding="utf-8")
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
        ("RunError: node 127x0.0.2 is not one of these", ""),
    ],
)
def test_the_next_start_runs_without_the_node_that_the_failure_names(job, message, left_out):
    (job.directory / "saves").touch()
    srun = job.directory / "bin" / "srun"
    srun.write_text(SRUN.replace("begin: what was wrong", message), encoding="utf-8")
    output = job.run(driver=1)[1]
    assert job.was_requeued()
    assert job.updates() == ([f"update JobId=7 ExcNodeList={left_out}"] if left_out else [])
    assert (f"the next start runs without {left_out}" in output) == bool(left_out)


@pytest.mark.parametrize("address", ["10.0.0.2", "fd00::2"])
def test_a_node_is_known_by_any_of_its_addresses(job, address):
    (job.directory / "saves").touch()
    getent = job.directory / "bin" / "getent"
    getent.write_text(
        '#!/bin/sh\nfor start in fd00:: 10.0.0.; do echo "$start${2##*.} STREAM"; done\n', encoding="utf-8"
    )
    getent.chmod(0o755)
    srun = job.directory / "bin" / "srun"
    srun.write_text(SRUN.replace("begin: what was wrong", f"PolicyError: rank 3 ({address}) died"), encoding="utf-8")
    assert job.run(driver=1)[1]
    assert job.updates() == ["update JobId=7 ExcNodeList=127.0.0.2"]


def test_a_step_that_failed_names_its_node_and_earlier_ones_stay_left_out(job):
    (job.directory / "saves").touch()
    (job.directory / "excluded").write_text("n[8-9]", encoding="utf-8")
    code, output = job.run(worker=1)
    assert code == 1
    assert "a Ray worker ended with status 1 before the driver" in output
    assert job.updates() == ["update JobId=7 ExcNodeList=127.0.0.2,n[8-9]"]
    assert "on 127.0.0.3: " not in output  # srun ended its task, for the other had failed


def test_a_node_is_used_again_where_the_partition_has_no_other(job):
    (job.directory / "saves").touch()
    (job.directory / "partition").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n", encoding="utf-8")
    output = job.run(worker=1)[1]
    assert job.was_requeued()
    assert job.updates() == []
    assert "127.0.0.2 failed and may be used again: the partition has no other node" in output


SAYS = "barrier: given up 9 s after the start of the job because of node 127.0.0.2"


def says(job, message: str) -> None:
    """Let the driver end with this last line."""
    srun = job.directory / "bin" / "srun"
    srun.write_text(SRUN.replace("begin: what was wrong", message), encoding="utf-8")


@pytest.mark.parametrize("checkpoint", ["", "step_000010"])
@pytest.mark.parametrize(
    ("ends", "status", "message", "left_out"),
    [
        ({"driver": 69}, 69, SAYS, "127.0.0.2"),
        ({"driver": 69}, 69, f"{SAYS}, node 127.0.0.3", "127.0.0.2,127.0.0.3"),
        ({"driver": 69}, 69, "RunError: 2 of 3 are up\\n  a: no memory\\n  on node 127.0.0.3", "127.0.0.3"),
        ({"worker": 69}, 69, "", "127.0.0.2"),  # it could not even say so
        ({"worker": 1}, 1, "", "127.0.0.2"),  # as when a mount is missing, or Ray does not start there
    ],
)
def test_a_bring_up_that_fails_for_a_node_is_followed_by_one_without_it(
    job, checkpoint, ends, status, message, left_out
):
    """Also where nothing was saved, ever or in this start."""
    if checkpoint:
        (job.directory / "run" / "checkpoints").mkdir()
        (job.directory / "run" / "checkpoints" / "latest").symlink_to(checkpoint)
    (job.directory / "partition").write_text("\n".join(f"127.0.0.{n}" for n in range(1, 6)), encoding="utf-8")
    says(job, message)
    code, output = job.run(**ends)
    assert code == status
    assert job.requeues() == 1
    assert f"requeued: {left_out.replace(',', ' ')} did not come up, restart 1 of at most 3" in output
    assert job.updates() == [f"update JobId=7 ExcNodeList={left_out}"]


def test_bring_ups_that_fail_are_followed_by_three_others_in_a_row(job):
    says(job, SAYS)
    for restart in range(4):
        code, output = job.run("--max-restarts=9", driver=69, environment={"SLURM_RESTART_COUNT": str(restart)})
        assert code == 69
        assert job.requeues() == min(restart + 1, 3)
    assert "not restarted: 127.0.0.2 did not come up, and 4 starts in a row have failed so" in output
    assert job.run("--max-restarts=9", driver=69, environment={"SLURM_JOB_ID": "8"})[0] == 69  # submitted again
    assert (job.directory / "control").read_text(encoding="utf-8").splitlines().count("requeue 8") == 1
    (job.directory / "saves").touch()
    job.run("--max-restarts=9", driver=75)
    (job.directory / "saves").unlink()
    job.run("--max-restarts=9", driver=69)
    assert job.requeues() == 5, "a start that came up ends the row"


@pytest.mark.parametrize(
    ("ends", "status", "message", "said"),
    [
        ({"driver": 2}, 2, SAYS, ""),  # a wrong input is wrong on every node
        ({"driver": 1}, 1, SAYS, "saved no new checkpoint"),
        ({"driver": 69}, 69, "barrier: because of node 127.0.0.1, node 127.0.0.2, node 127.0.0.3", "no new checkpoint"),
        ({"driver": 69}, 69, f"{SAYS}, node 127.0.0.3", "and the partition has no other node for the job"),
    ],
)
def test_what_no_other_node_mends_is_not_tried_again(job, ends, status, message, said):
    says(job, message)
    code, output = job.run(**ends)
    assert code == status
    assert job.requeues() == 0
    assert said in output


def test_a_worker_that_fails_once_the_driver_has_begun_is_no_bring_up(job):
    srun = job.directory / "bin" / "srun"
    begun = 'touch "${SHIM_DIR}"/run/logs/attempt_1/bring_up.json\n'
    place = "if [[ -e ${SHIM_DIR}/${name} ]]"
    srun.write_text(SRUN.replace(place, begun + place, 1), encoding="utf-8")
    output = job.run(worker=1)[1]
    assert job.requeues() == 0
    assert "saved no new checkpoint" in output


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
