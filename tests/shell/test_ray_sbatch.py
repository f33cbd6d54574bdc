"""The Slurm job file with shims for Slurm's programs: whose end decides, with which status, and what follows.

The shim of srun runs no program; what each step does (end with a status, or stay) is chosen by the test. Real Slurm is
for the functional tier.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB_FILE = ROOT / "tools" / "job" / "ray.sbatch"
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"${SHIM_DIR}/calls" # one write: the steps are started at the same time
case "$*" in
  *'podman rm'*) exit ;;
  *ray_node.sh*--role=head*) name=head ;;
  *ray_node.sh*--role=worker*) name=worker ;;
  *tools.job.barrier*) name=driver ;;
  *) name=sandbox ;;
esac
printf '%s' "$$" >"${SHIM_DIR}/${name}.pid"
trap 'exit 75' USR1
trap 'exit 137' TERM
trap 'exit 0' USR2
# Nothing ends before every step has been started.
for ((i = 0; i < 100; i++)); do
  (($(wc -l <"${SHIM_DIR}/calls") % SHIM_STEPS == 0)) && break
  sleep 0.05
done
if [[ -e ${SHIM_DIR}/${name} ]]; then
  if [[ -e ${SHIM_DIR}/saves ]]; then
    mkdir -p "${SHIM_DIR}/run/checkpoints"
    ln -sfn "step_${SLURM_RESTART_COUNT:-0}5" "${SHIM_DIR}/run/checkpoints/latest"
  fi
  [[ ! $* =~ --output=([^ ]+/driver\\.log) ]] || printf 'begin: what was wrong\\n' >"${BASH_REMATCH[1]}"
  [[ ${name} != worker ]] || printf 'srun: error: 127.0.0.2: task 0: Exited\\nsrun: error: Node failure on n9\\n' >&2
  exit "$(<"${SHIM_DIR}/${name}")"
fi
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""
SCONTROL = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"${SHIM_DIR}/control"
if [[ $* == requeue* && -s ${SHIM_DIR}/away ]]; then # for so many calls
  sed -i 1d "${SHIM_DIR}/away"
  exit 1
fi
case "$1 $2" in
  'show hostnames') if [[ $3 == n* ]]; then printf '127.0.0.%s\\n' 1 2 3; else tr , '\\n' <<<"$3"; fi ;;
  'show config') printf 'SlurmdPort = %s\\nSlurmdTimeout = 0 sec\\n' "$(<"${SHIM_DIR}/port")" ;;
  'show job')
    [[ -z ${SLURM_TIME_FORMAT:-} ]] || echo 'JobId=7 StartTime=Today 03:04 EndTime=Tomorr 02:00 '
    printf 'JobId=7 ExcNodeList=%s JobState=%s StartTime=2026-01-02T03:04:05 EndTime=%s Deadline=N/A\\n' \\
    "$(cat "${SHIM_DIR}/excluded" 2>/dev/null || echo '(null)')" \\
    "$(cat "${SHIM_DIR}/state" 2>/dev/null || echo RUNNING)" \\
    "$(cat "${SHIM_DIR}/end" 2>/dev/null || echo 2026-01-02T04:04:05)" ;;
esac
"""

# The partition has a node more than the job, unless the test writes another list.
SINFO = """#!/usr/bin/env bash
case "$*" in
  *--partition=batch*) cat "${SHIM_DIR}/partition" 2>/dev/null || printf '127.0.0.%s\\n' 1 2 3 4 ;;
  *) echo n2 is down ;;
esac
"""


class Job:
    """One job file with its shims; all its nodes are addresses of this machine, on which a socket stands for slurmd."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "run" / "logs").mkdir(parents=True)
        self.slurmd = socket.create_server(("0.0.0.0", 0))
        (directory / "port").write_text(str(self.slurmd.getsockname()[1]))
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
            shim = directory / "bin" / name
            shim.parent.mkdir(exist_ok=True)
            shim.write_text(text)
            shim.chmod(0o755)

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        env = {
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "SHIM_DIR": str(self.directory),
            "SHIM_STEPS": "4" if any("--sandbox-command=/" in option for option in options) else "3",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_PARTITION": "batch",
            "SLURM_TIME_FORMAT": "relative",
            "REQUEUE_SECONDS": "0",
        }
        return subprocess.Popen(
            [
                *(str(JOB_FILE), f"--run-dir={self.directory}/run", f"--checkpoints={self.directory}/run/checkpoints"),
                *("--units=8", "--cache=/cache", "--max-restarts=3", *options),
                *("--", "python", "run_grpo.py", "key=two words"),
            ],
            env=env | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ends(self, **ends: int) -> None:
        """Let each step in `ends` end at once with that status; the others stay."""
        for name, status in ends.items():
            (self.directory / name).write_text(str(status))

    def run(self, *options: str, environment: dict[str, str] | None = None, **ends: int) -> tuple[int, str]:
        self.ends(**ends)
        process = self.start(*options, **(environment or {}))
        output, _ = process.communicate(timeout=40)
        return process.returncode, output

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    def updates(self) -> list[str]:
        return [line for line in (self.directory / "control").read_text().splitlines() if line.startswith("update")]

    def was_requeued(self) -> bool:
        return self.requeues() > 0

    def requeues(self) -> int:
        return (self.directory / "control").read_text().splitlines().count("requeue 7")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.slurmd.close()


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


@pytest.mark.parametrize(("step", "status"), [("worker", 3), ("head", 0), ("worker", 75)])
def test_a_step_that_ends_before_the_driver_ends_the_job_with_its_name(job, step, status):
    code, output = job.run(**{step: status})
    assert code == 1
    assert f"{step} ended with status {status} before the driver" in output.replace("Ray ", "")
    assert not job.was_requeued()
    if step == "worker":
        assert "on 127.0.0.2: srun: error: 127.0.0.2: task 0: Exited" in output
        assert output.count("Node failure on n9") == 1


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # for its trap


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_reaches_the_driver_as_one_that_srun_forwards(job, number):
    process = job.start()
    wait_for(job.directory / "driver.pid")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output  # the shim's answer to USR1; to TERM it would be 137
    assert f"got {number.name.removeprefix('SIG')}" in output
    assert "n2 is down" in output


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


@pytest.mark.parametrize(("end", "is_requeued"), [("Unknown", True), ("2126-01-02T04:04:05", True), (None, False)])
def test_a_start_that_was_interrupted_before_its_first_save_is_followed_by_another(job, end, is_requeued):
    """Unless its time was up: the end that the shim gives by default is long past."""
    if end is not None:
        (job.directory / "end").write_text(end)
    process = job.start()
    wait_for(job.directory / "driver.pid")
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
    wait_for(job.directory / "driver.pid")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "for Slurm to notice" in line:
            time.sleep(0.3)  # for its trap
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 1
    assert sum("is lost: no slurmd answers there" in line for line in lines) == 3
    assert "Slurm ends this start" in lines[-1]
    assert not job.was_requeued()


def test_times_of_the_job_reach_its_programs(job):
    (job.directory / "bin" / "srun").write_text(
        SRUN.replace("#!/usr/bin/env bash\n", "#!/usr/bin/env bash\nenv >>${SHIM_DIR}/env\n", 1)
    )
    job.run(driver=0, environment={"TZ": "UTC"})
    lines = (job.directory / "env").read_text().splitlines()
    assert "SLURM_JOB_START_TIME=1767323045" in lines
    assert "SLURM_JOB_END_TIME=1767326645" in lines


def test_every_start_logs_to_a_directory_of_its_own(job):
    job.run(driver=0)
    job.run(driver=0)
    logs = job.directory / "run" / "logs"
    # `latest` is not moved before begin.py has locked the run: this start may be refused.
    assert sorted(path.name for path in logs.iterdir()) == ["attempt_1", "attempt_2"]
    assert (logs / "attempt_2" / "nodes").read_text().split() == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    (driver,) = [call for call in job.calls() if "tools.job.begin" in call][1:]
    assert f"tools.job.begin --log-dir={logs}/attempt_2 -- " in driver


def test_missing_arguments_are_refused():
    for arguments in ([], ["--run-dir=x", "--", "python"], ["--what"], ["--what=x", "--", "python"]):
        command = [str(JOB_FILE), *arguments]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=10, check=False).returncode == 2
