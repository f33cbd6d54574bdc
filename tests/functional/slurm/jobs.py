"""One job on the throw-away cluster: submit it, watch it, read what it left."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speed import patiently

from slurm.cluster import ROOT, Cluster

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_POLL_SECONDS = 0.2


class Job:
    """A job of the run in `run_dir`."""

    def __init__(self, cluster: Cluster, run_dir: Path, job_id: str) -> None:
        self.cluster = cluster
        self.run_dir = run_dir
        self.id = job_id

    def show(self, field: str) -> str:
        """Return one field of `scontrol show job`."""
        text = self.cluster.run(["scontrol", "show", "job", "--oneliner", self.id]).stdout
        found = re.search(rf"(?:^| ){field}=(\S*)", text)
        assert found is not None, text
        return found[1]

    @property
    def restarts(self) -> int:
        return int(self.show("Restarts"))

    @property
    def log(self) -> str:
        """What the job file has written, over all starts."""
        path = self.run_dir / "logs" / f"slurm-{self.id}.log"
        return path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""

    def driver_log(self, attempt: int) -> str:
        """What the driver of the start `attempt` (from 1) has written."""
        path = self.run_dir / "logs" / f"attempt_{attempt}" / "driver.log"
        return path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Poll until `condition` holds; fails at the deadline, and when the job is over before.

        `seconds` are those of a quiet machine, here and below.
        """
        end = time.monotonic() + patiently(seconds)
        while not condition():
            if self.show("JobState") in OVER and not condition():
                raise AssertionError(f"the job ended while waiting for {what}:\n{self.everything()}")
            assert time.monotonic() < end, f"no {what} within {patiently(seconds):.0f} s:\n{self.everything()}"
            time.sleep(_POLL_SECONDS)

    def wait(self, *, seconds: float) -> str:
        """Wait until the job is over and return its state."""
        end = time.monotonic() + patiently(seconds)
        while (state := self.show("JobState")) not in OVER:
            assert time.monotonic() < end, f"still {state} after {patiently(seconds):.0f} s:\n{self.everything()}"
            time.sleep(_POLL_SECONDS)
        return state

    def everything(self) -> str:
        """Return the ends of all logs, for a message."""
        parts = [f"== job log\n{self.log[-3000:]}"]
        for path in sorted((self.run_dir / "logs").glob("attempt_*/*.log")):
            parts.append(
                f"== {path.parent.name}/{path.name}\n{path.read_text(errors='replace', encoding='utf-8')[-1500:]}"
            )
        return "\n".join(parts)


def minutes(quiet: float) -> str:
    """Return the time limit of a job that has `quiet` minutes of work on a quiet machine."""
    return str(math.ceil(patiently(quiet)))


def slurm_environment(directory: Path) -> dict[str, str]:
    """Return what a launch on the throw-away cluster needs besides `launch_environment`."""
    return {
        "LAUNCHER": "slurm",
        "SLURM_PARTITION": "batch",
        "SLURM_ACCOUNT": "lab",
        "SLURM_TIME_LIMIT": minutes(20),
        "PERSISTENT_CACHE": str(directory / "cache"),
        "CODE_SNAPSHOT_DIRNAME": str(directory / "snapshots"),
        "MODEL_PATH": str(directory / "model"),
        "EXP_NAME": "run",
    }


def submit(cluster: Cluster, run_dir: Path, *options: str, driver: Sequence[str], **sbatch: str) -> Job:
    """Submit the job file as super_launch.sh does, with `driver` (words after `python`) for the real one."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    defaults = {"nodes": "2", "gres": "gpu:1", "time": minutes(10), "open-mode": "append", "chdir": str(ROOT)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (defaults | sbatch).items()]
    words = [
        *("sbatch", "--parsable", "--exclusive", "--requeue", f"--output={run_dir}/logs/slurm-%j.log", *flags),
        *(str(ROOT / "tools" / "job" / "ray.sbatch"), f"--run-dir={run_dir}", f"--cache={run_dir}/cache"),
        *(f"--checkpoints={run_dir}/checkpoints", "--units=1", "--max-restarts=3", *options),
        *("--", sys.executable, *driver),
    ]
    return Job(cluster, run_dir, cluster.run(words).stdout.strip())


def launch(cluster: Cluster, stage: str, env: Mapping[str, str]) -> Job:
    """Submit a stage with `make`, as a user does."""
    done = cluster.run(["make", "--directory", str(ROOT), stage], env=env, seconds=120)
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return Job(cluster, Path(env["RESULTS_DIR"]) / env["EXP_NAME"], found[1])
