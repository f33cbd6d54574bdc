"""The Slurm job file with shims for Slurm's programs. Real Slurm is for the functional tier."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

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
trap 'exit 75' USR1
trap 'exit 137' TERM
trap 'exit 0' USR2
printf '%s' "$$" >"${SHIM_DIR}/${name}.pid"
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
  # The rest of the step is ended by srun itself.
  [[ ${name} != worker ]] || printf 'srun: %s\\nsrun: error: 127.0.0.3: task 1: Terminated\\n' \\
    'launch/slurm: _step_signal: Terminating StepId=7.1' >&2
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
    printf 'JobId=7 ExcNodeList=%s JobState=%s StartTime=2026-01-02T03:04:05 EndTime=%s PreemptTime=%s \\n' \\
    "$(cat "${SHIM_DIR}/excluded" 2>/dev/null || echo '(null)')" \\
    "$(cat "${SHIM_DIR}/state" 2>/dev/null || echo RUNNING)" \\
    "$(cat "${SHIM_DIR}/end" 2>/dev/null || echo 2026-01-02T04:04:05)" \\
    "$(cat "${SHIM_DIR}/preempted" 2>/dev/null || echo None)" ;;
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
        (directory / "port").write_text(str(self.slurmd.getsockname()[1]), encoding="utf-8")
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
            shim = directory / "bin" / name
            shim.parent.mkdir(exist_ok=True)
            shim.write_text(text, encoding="utf-8")
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
            (self.directory / name).write_text(str(status), encoding="utf-8")

    def run(self, *options: str, environment: dict[str, str] | None = None, **ends: int) -> tuple[int, str]:
        self.ends(**ends)
        process = self.start(*options, **(environment or {}))
        output, _ = process.communicate(timeout=40)
        return process.returncode, output

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text(encoding="utf-8").splitlines()

    def updates(self) -> list[str]:
        return [
            line
            for line in (self.directory / "control").read_text(encoding="utf-8").splitlines()
            if line.startswith("update")
        ]

    def was_requeued(self) -> bool:
        return self.requeues() > 0

    def requeues(self) -> int:
        return (self.directory / "control").read_text(encoding="utf-8").splitlines().count("requeue 7")


def wait_for_driver(job: Job, process: subprocess.Popen[str]) -> None:
    """Wait until the driver runs, and the job file passes TERM and USR1 on to it."""
    end = time.monotonic() + 20
    while not ((job.directory / "driver.pid").exists() and catches(process.pid, signal.SIGTERM, signal.SIGUSR1)):
        assert process.poll() is None and time.monotonic() < end, "the driver was not started"
        time.sleep(0.02)


def catches(pid: int, *numbers: signal.Signals) -> bool:
    """Whether a process has a handler for each of these signals."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return all(int(mask, 16) >> (number - 1) & 1 for number in numbers)
