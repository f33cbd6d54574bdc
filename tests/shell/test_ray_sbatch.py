"""The Slurm job file with shims for Slurm's programs: whose end decides, with which status, and what steps are given.

The shim of srun runs no program; what each step does (end with a status, or stay) is chosen by the test.
"""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from tests.shell.job_shims import JOB_FILE, ROOT, SRUN, wait_for_driver


@pytest.mark.parametrize("status", [0, 2, 75])
def test_ends_with_the_drivers_status(job, status):
    assert job.run(driver=status)[0] == status


def test_one_step_per_role_however_many_nodes(job):
    job.run(
        "--runtime=pyxis", "--container=image", "--sandbox=box", "--sandbox-command=/start", "--mounts=/a:/a", driver=0
    )
    calls = job.calls()
    assert len(calls) == 4
    worker = next(call for call in calls if "--role=worker" in call)
    assert "--nodes=2 --ntasks-per-node=1 --exclude=127.0.0.1" in worker
    assert all("--container-image=image" in call for call in calls if "/start" not in call)
    sandbox = next(call for call in calls if "/start" in call)
    assert "--container-image=box" in sandbox
    assert "--container-mounts" not in sandbox
    driver = next(call for call in calls if "barrier" in call)
    assert "--sandboxes" in driver
    assert driver.rstrip().endswith("-- python run_grpo.py key=two words")
    assert "--container-name" not in " ".join(calls)  # a node would keep it when the job is cancelled


@pytest.mark.parametrize("spares", [0, 2])
def test_with_spare_nodes_a_worker_that_ends_leaves_the_others(job, spares):
    """Of srun's options the last wins. Without its head a job has nothing to go on with."""
    job.run(f"--spares={spares}", driver=0)
    [head], [worker] = ([call for call in job.calls() if f"--role={role}" in call] for role in ("head", "worker"))
    last = [re.findall(r"--kill-on-bad-exit=(\d) |--wait=(\d+) ", call)[-2:] for call in (head, worker)]
    ends, stays = [("1", ""), ("", "60")], [("0", ""), ("", "0")]
    assert last == [ends, stays if spares else ends]


def test_the_last_call_removes_what_a_killed_podman_has_left(job):
    job.run("--runtime=podman", "--container=image", driver=0)
    assert "podman rm --force --ignore --time=10 ray-head-7-0" in job.calls()[-1]


def test_steps_get_the_variables_of_the_profile(job):
    job.run("--runtime=podman", "--container=image", "--variables=MIRROR", driver=0, environment={"MIRROR": "x"})
    assert [call for call in job.calls() if "--role=head" in call and "--env=MIRROR" in call]


def test_every_node_gets_the_same_temporary_directory_and_every_start_another(job):
    found = []
    for _ in range(2):
        job.run(driver=0)
        nodes = [call for call in job.calls()[-3:] if "--role=" in call]
        (words,) = {re.search(r"--temp-dir=(\S+)", call)[1] for call in nodes}
        found.append(words)
    assert found[0] != found[1]
    assert all(re.fullmatch(r"/tmp/rl-7-0-[0-9a-f]{8}", path) for path in found)


def test_no_container_options_without_a_container(job):
    job.run(driver=0)
    assert len(job.calls()) == 3
    assert not [call for call in job.calls() if "--container" in call]


@pytest.mark.parametrize(
    ("step", "status", "of_job"),
    [("worker", 3, 1), ("head", 0, 1), ("worker", 75, 1), ("worker", 2, 1), ("worker", 69, 69)],
)
def test_a_step_that_ends_before_the_driver_ends_the_job_with_its_name(job, step, status, of_job):
    code, output = job.run(**{step: status})
    assert code == of_job
    assert f"{step} ended with status {status} before the driver" in output.replace("Ray ", "")
    assert job.was_requeued() == (step == "worker")  # where a node is named
    if step == "worker":
        assert "on 127.0.0.2: srun: error: 127.0.0.2: task 0: Exited" in output
        assert output.count("Node failure on n9") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_reaches_the_driver_as_one_that_srun_forwards(job, number):
    process = job.start()
    wait_for_driver(job, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output  # the shim's answer to USR1; to TERM it would be 137
    assert f"got {number.name.removeprefix('SIG')}" in output
    assert "n2 is down" in output


def test_times_of_the_job_reach_its_programs(job):
    (job.directory / "bin" / "srun").write_text(
        SRUN.replace("#!/usr/bin/env bash\n", "#!/usr/bin/env bash\nenv >>${SHIM_DIR}/env\n", 1), encoding="utf-8"
    )
    job.run(driver=0, environment={"TZ": "UTC"})
    lines = (job.directory / "env").read_text(encoding="utf-8").splitlines()
    assert "SLURM_JOB_START_TIME=1767323045" in lines
    assert "SLURM_JOB_END_TIME=1767326645" in lines


def test_what_the_shell_of_an_interactive_job_passes_on_is_no_option_of_the_steps(job):
    """With SLURM_EXPORT_ENV=NONE no step would find its program, with SLURM_STEP_GRES no step would be made."""
    (job.directory / "bin" / "srun").write_text(
        SRUN.replace("#!/usr/bin/env bash\n", "#!/usr/bin/env bash\nenv >>${SHIM_DIR}/env\n", 1), encoding="utf-8"
    )
    job.run(driver=0, environment={"SLURM_EXPORT_ENV": "NONE", "SLURM_STEP_GRES": "gpu:1", "SLURM_GPUS": "1"})
    lines = (job.directory / "env").read_text(encoding="utf-8")
    assert "SLURM_EXPORT_ENV=ALL\n" in lines
    assert "SLURM_STEP_GRES" not in lines
    assert "SLURM_GPUS" not in lines


def test_every_start_logs_to_a_directory_of_its_own(job):
    job.run(driver=0)
    job.run(driver=0)
    logs = job.directory / "run" / "logs"
    # `latest` is not moved before begin.py has locked the run: this start may be refused.
    assert sorted(path.name for path in logs.iterdir()) == ["attempt_1", "attempt_2"]
    assert (logs / "attempt_2" / "nodes").read_text(encoding="utf-8").split() == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    (driver,) = [call for call in job.calls() if "tools.job.begin" in call][1:]
    assert f"tools.job.begin --log-dir={logs}/attempt_2 -- " in driver


def test_missing_arguments_are_refused():
    for arguments in ([], ["--run-dir=x", "--", "python"], ["--what"], ["--what=x", "--", "python"]):
        command = [str(JOB_FILE), *arguments]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=10, check=False).returncode == 2
