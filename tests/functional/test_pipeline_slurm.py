"""`make pipeline` on a real Slurm: a failing stage cancels those after it, a second start is refused, it runs again."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from tiny_run import TWO_STEPS, launch_environment

from recipes.grpo.checkpoint import complete_checkpoints
from tools.draft.provenance import model_digest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"stage1.1": "stage1.1-rlvr1-tiny", "stage1.2": "stage1.2-rlvr2-tiny", "stage1.3": "stage1.3-rlvr3-tiny"}
STAGES, FIRST_TWO = f"STAGES={' '.join(RUNS)}", f"STAGES={' '.join(list(RUNS)[:2])}"
STAGE_SECONDS = 240.0  # from submission to the end of one stage, on a machine that does other things, too


class Site:
    """A cluster, and a user on its login node."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.env = {
            **launch_environment(directory, num_rows=40, overrides=TWO_STEPS),
            "LAUNCHER": "slurm",
            "MODEL_PATH": str(directory / "model"),
            "CONTAINER_RUNTIME": "none",
            "PERSISTENT_CACHE": str(directory / "cache"),
            "CODE_SNAPSHOT_DIRNAME": str(directory / "snapshots"),
            "SLURM_PARTITION": "batch",
            "SLURM_ACCOUNT": "lab",
            "SLURM_TIME_LIMIT": "30",
        }

    def make(self, *words: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        env: Mapping[str, str] = {**self.env, **variables}
        done = self.cluster.run(["make", "--no-print-directory", *words], env=env, cwd=ROOT, check=False)
        assert done.returncode == (2 if status else 0), done.stdout + done.stderr  # make's own status for any failure
        assert not status or f"Error {status}" in done.stderr
        return done

    def wait_for(self, job: str, state: str) -> dict[str, str]:
        """Wait for a job's end and return what Slurm says of it."""

        def fields() -> dict[str, str]:
            shown = self.cluster.run(["scontrol", "show", "job", "--oneliner", job]).stdout
            return dict(re.findall(r"(\w+)=(\S+)", shown))

        running = ("PENDING", "RUNNING", "COMPLETING")
        what = f"end of job {job}"
        self.cluster.wait_until(lambda: fields()["JobState"] not in running, what, seconds=STAGE_SECONDS)
        assert fields()["JobState"] == state, self.log(fields())
        return fields()

    def log(self, fields: Mapping[str, str]) -> str:
        files = [Path(fields["StdOut"]), *sorted(self.directory.glob(f"{fields['JobName']}/logs/latest/*.log"))]
        texts = [
            f"== {file}\n" + file.read_text(errors="replace", encoding="utf-8")[-3000:]
            for file in files
            if file.exists()
        ]
        return "\n".join([str(fields), *texts])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes, each large enough for one stage."""
    with Cluster(gpus=2, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield Site(cluster, tmp_path_factory.mktemp("results"))


def submitted(output: str) -> dict[str, str]:
    return dict(re.findall(r"^(stage[\d.]+): job (\d+)", output, re.MULTILINE))


def test_pipeline_from_a_failing_stage_to_its_end(site: Site) -> None:
    blocked = site.directory / RUNS["stage1.2"] / "checkpoints"
    blocked.parent.mkdir()
    blocked.write_text("a file where the driver needs a directory", encoding="utf-8")
    jobs = submitted(site.make("pipeline", STAGES).stdout)
    assert list(jobs) == list(RUNS)
    refuse_second_start(site, jobs)

    site.wait_for(jobs["stage1.1"], "COMPLETED")
    site.wait_for(jobs["stage1.2"], "FAILED")
    site.wait_for(jobs["stage1.3"], "CANCELLED")
    assert list((site.directory / RUNS["stage1.3"] / "logs").iterdir()) == []  # it has not begun

    blocked.unlink()
    again = site.make("pipeline", FIRST_TWO)
    assert f"{RUNS['stage1.1']} has reached its end, left out" in again.stderr
    rest = submitted(again.stdout)
    assert list(rest) == ["stage1.2"]
    site.wait_for(rest["stage1.2"], "COMPLETED")
    check_hand_over(site)
    assert "nothing to do" in site.make("pipeline", FIRST_TWO).stderr


def refuse_second_start(site: Site, jobs: Mapping[str, str]) -> None:
    """Start everything once more while the first stage runs: at submission, and past it, on another node."""
    lock = site.directory / RUNS["stage1.1"] / ".lock"
    site.cluster.wait_until(lambda: lock.exists() and lock.read_text(encoding="utf-8") != "", "the lock", seconds=60)
    refused = site.make("pipeline", STAGES, status=2).stderr
    for stage, state in (("stage1.1", "RUNNING"), ("stage1.2", "PENDING"), ("stage1.3", "PENDING")):
        assert f"{stage}: PTH003 EXP_NAME={RUNS[stage]}: job {jobs[stage]} of this run is {state}" in refused
    refused = site.make("stage1.1", status=2).stderr
    assert f"job {jobs['stage1.1']} of this run is RUNNING" in refused

    line = site.make("stage1.1", DRY_RUN="1", SKIP_CODE_SNAPSHOT="true", status=2).stdout.replace(
        "sbatch ", "sbatch --parsable ", 1
    )
    past = site.cluster.run(["bash", "-c", line], env=site.env, cwd=ROOT).stdout.strip()
    fields = site.wait_for(past, "FAILED")
    assert fields["ExitCode"] == "2:0"
    assert f"begin: EXP_NAME={lock.parent.name}: job {jobs['stage1.1']} of this run is RUNNING" in site.log(fields)
    assert json.loads(lock.read_text(encoding="utf-8"))["job_id"] == jobs["stage1.1"]
    assert (lock.parent / "logs" / "latest").readlink() == Path("attempt_1")  # the other has attempt_2 for its own
    assert (lock.parent / "logs" / "attempt_2" / "driver.log").exists()


def check_hand_over(site: Site) -> None:
    """Every stage has begun with its parent's last export, and has trained."""
    parent, seen = site.directory / "model", set()
    trained = list(RUNS.values())[:2]
    for run in trained:
        lock = json.loads((site.directory / run / "run.lock.json").read_text(encoding="utf-8"))
        assert lock["model"] == {"path": str(parent), **model_digest(parent)}
        seen.add(lock["model"]["weights_sha256"])
        used = json.loads((site.directory / run / "resolved.json").read_text(encoding="utf-8"))["config"]["policy"][
            "model_name"
        ]
        assert used == str(parent)  # the step, not `latest`
        assert list(complete_checkpoints(site.directory / run / "checkpoints")) == [2]
        parent = site.directory / run / "checkpoints" / "step_000002" / "hf"
    assert len(seen) == len(trained)
    snapshots = list((site.directory / "snapshots" / trained[-1]).iterdir())
    assert lock["git"]["commit"] in {
        (snapshot / "COMMIT").read_text(encoding="utf-8").strip() for snapshot in snapshots
    }
    assert not any((snapshot / ".venv").exists() for snapshot in snapshots)
