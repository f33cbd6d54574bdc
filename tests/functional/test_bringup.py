"""Bring-up without the nodes: the real job file on 2 and on 64 real slurmds, the real barrier before 183 light nodes.

The programs that the job starts on its nodes are replaced by ones that say that they are there and wait; job file,
steps, slurmctld, slurmds and srun are the real ones, and so are Ray's head and GCS.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from slurm.cluster import ROOT, Cluster

from tools.bench.bring_up_cost import CONTROLLER_CALLS, measure

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

SMALL, LARGE = 2, 64
# Nodes answer late when two cores run all of them: Slurm must not give them up.
SLOW_NODES = "SlurmdTimeout=300\nMessageTimeout=100\nTCPTimeout=60"
NODE = """\
#!/usr/bin/env bash
# A node that joins by a file and stays until the job ends it.
trap 'exit 0' USR2
echo "$(hostname) is there"
touch '{joined}'/"$(hostname)"
for ((tries = 0; tries < 600; tries++)); do sleep 0.2 & wait "$!"; done
"""
DRIVER = """\
#!/usr/bin/env bash
# A driver, behind a barrier that counts files.
for ((tries = 0; tries < 600; tries++)); do
  (($(find '{joined}' -type f | wc -l) == {num_nodes})) && exit 0
  sleep 0.2
done
exit 1
"""
_CALL = re.compile(r"^\s*(\w+)\s*\(\s*\d+\)\s*count:(\d+)", re.MULTILINE)


def program(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def light_code(directory: Path, joined: Path) -> Path:
    """Return a code directory with the real job file, whose node program is light."""
    launch = directory / "code" / "tools" / "job"
    launch.mkdir(parents=True)
    for file in [*(ROOT / "tools" / "job").glob("*.sh"), ROOT / "tools" / "job" / "ray.sbatch"]:
        shutil.copy(file, launch)
    program(launch / "ray_node.sh", NODE.format(joined=joined))
    return directory / "code"


def controller_calls(cluster: Cluster) -> Counter[str]:
    """Return what slurmctld was asked since the counters were reset, besides sdiag's questions.

    MESSAGE_* is what slurmds tell it by themselves: that they are there, and at the end of a job that it is gone.
    """
    by_type = cluster.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
    found = {name: int(count) for name, count in _CALL.findall(by_type)}
    return Counter(
        {name: count for name, count in found.items() if name != "REQUEST_STATS_INFO" and "MESSAGE" not in name}
    )


def bring_up(directory: Path, num_nodes: int) -> tuple[Counter[str], Path]:
    """Run a job of light programs on that many nodes; return the controller's calls and the job's logs."""
    joined = directory / "joined"
    joined.mkdir(parents=True)
    code = light_code(directory, joined)
    python = program(directory / "python", DRIVER.format(joined=joined, num_nodes=num_nodes))
    (directory / "run" / "logs").mkdir(parents=True)
    cluster = Cluster(num_nodes=num_nodes, shared=[directory])
    conf = cluster.directory / "etc" / "slurm.conf"
    conf.write_text(
        re.sub(r"^SlurmdTimeout=.*$", SLOW_NODES, conf.read_text(encoding="utf-8"), flags=re.MULTILINE),
        encoding="utf-8",
    )
    log = directory / "job.log"
    with cluster:
        cluster.run(["sdiag", "--reset"])
        cluster.run(
            [
                *("sbatch", f"--nodes={num_nodes}", "--gres=gpu:1", "--exclusive", "--time=60", f"--output={log}"),
                *(f"--chdir={code}", str(code / "tools/job/ray.sbatch"), f"--run-dir={directory}/run"),
                *(f"--checkpoints={directory}/run/checkpoints", "--units=1", f"--cache={directory}"),
                *("--max-restarts=0", "--", str(python), "the driver's words"),
            ]
        )
        # Not asked of Slurm: that would count.
        cluster.wait_until(
            lambda: log.exists() and "the job ends with status" in log.read_text(encoding="utf-8"),
            "end of the job",
            seconds=120,
        )
        for name, count in (("REQUEST_STEP_COMPLETE", 3), ("REQUEST_COMPLETE_BATCH_SCRIPT", 1)):
            cluster.wait_until(lambda n=name, c=count: controller_calls(cluster)[n] >= c, name, seconds=30)  # type: ignore[misc]
        calls = controller_calls(cluster)
    assert "the job ends with status 0" in log.read_text(encoding="utf-8"), log.read_text(encoding="utf-8")
    return calls, directory / "run" / "logs" / "attempt_1"


def test_calls_to_the_controller_do_not_grow_with_the_nodes(tmp_path: Path) -> None:
    small, _ = bring_up(tmp_path / "small", SMALL)
    large, logs = bring_up(tmp_path / "large", LARGE)
    print(f"{SMALL} nodes: {dict(small)}\n{LARGE} nodes: {dict(large)}")
    assert small["REQUEST_SUBMIT_BATCH_JOB"] == 1 and small["REQUEST_JOB_STEP_CREATE"] == 3
    assert large == small
    assert small.total() == CONTROLLER_CALLS
    workers = sorted(logs.glob("ray_worker_n*.log"))
    assert len(workers) == LARGE - 1  # each node has a log of its own
    assert all(
        log.read_text(encoding="utf-8") == f"{log.stem.removeprefix('ray_worker_')} is there\n" for log in workers
    )


def test_the_barrier_sees_183_nodes_that_register_with_a_real_head() -> None:
    found = measure(183)
    print(found)
    assert found.num_nodes == 183
    # One line per node and three of the barrier itself, each short: a log that a person can read.
    assert 183 * 20 < found.barrier_log_bytes < 183 * 60
    assert found.reply_bytes < 1_000_000
    assert found.checks_per_second > 0  # the head did check its nodes, and none was given up
