"""The job file on a real Slurm cluster, with small drivers in place of the training run: real Ray, no models."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import ROOT, Cluster
from slurm.jobs import Job, submit
from small_root import require
from swe_image import write_sif, write_task_root

from recipes.environments.swe.containers.runtime import BWRAP_PROGRAMS as PROGRAMS

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

NUM_NODES = 4
DRIVER = """
import os, signal, socket, sys, time
import ray

def save_and_stop(*_):
    os.makedirs(sys.argv[3])
    os.symlink("step_000001", os.path.join(sys.argv[3], "latest"))
    sys.exit(75)

signal.signal(signal.SIGUSR1, save_and_stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"worker_units": 1})
class Unit:  # takes a node's only worker unit, so that no two share a node
    def host(self):
        return socket.gethostname()

num_nodes, what = int(sys.argv[1]), sys.argv[2]
units = [Unit.remote() for _ in range(num_nodes)]
print("hosts", *sorted(ray.get([unit.host.remote() for unit in units])), flush=True)
end = time.monotonic() + 120
is_first = "SLURM_RESTART_COUNT" not in os.environ
if what == "fail" and is_first:
    os.makedirs(sys.argv[3])
    os.symlink("step_000001", os.path.join(sys.argv[3], "latest"))
    nodes = sorted(node["NodeManagerHostname"] for node in ray.nodes())
    sys.exit(f"policy worker 1 on node {nodes[-1]} died")
while (what == "stay" or (what == "save" and is_first)) and time.monotonic() < end:
    dead = [node["NodeManagerHostname"] for node in ray.nodes() if not node["Alive"]]
    if dead:
        print("dead", *dead, flush=True)
        sys.exit(1)
    time.sleep(0.2)
"""
SANDBOX = """#!{python}
import http.server, sys, time
time.sleep(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("", 6000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shared = [tmp_path_factory.getbasetemp()]
    with Cluster(num_nodes=NUM_NODES, shared=shared) as cluster:
        yield cluster


@pytest.fixture
def driver(tmp_path: Path) -> str:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER, encoding="utf-8")
    return str(path)


def start(cluster: Cluster, run_dir: Path, driver: str, *options: str, what: str = "stay", **sbatch: str) -> Job:
    """Start a job whose driver stays, and wait for it."""
    job = submit(cluster, run_dir, *options, driver=[driver, "2", what, f"{run_dir}/checkpoints"], **sbatch)
    job.wait_until(lambda: "hosts " in job.driver_log(job.restarts + 1), "driver", seconds=150)
    return job


def test_four_nodes_come_up_and_their_logs_are_kept(cluster, tmp_path, driver):
    job = submit(cluster, tmp_path, driver=[driver, str(NUM_NODES), "end"], nodes=str(NUM_NODES))
    assert job.wait(seconds=150) == "COMPLETED", job.everything()
    assert "hosts n1 n2 n3 n4" in job.driver_log(1)
    logs = tmp_path / "logs" / "attempt_1"
    events = json.loads((logs / "bring_up.json").read_text(encoding="utf-8"))
    assert [f"n{number} joined Ray" in events for number in range(1, NUM_NODES + 1)] == [True] * NUM_NODES
    for node, role in (("n1", "head"), ("n2", "worker"), ("n3", "worker"), ("n4", "worker")):
        assert (logs / f"ray_{role}_{node}.log").stat().st_size
        assert (logs / f"ray_{node}" / "raylet.out").stat().st_size  # Ray's own logs leave the node
        assert not cluster.on_node(node, ["find", "/tmp", "-maxdepth", "1", "-name", "rl-*"]).stdout


def test_a_node_whose_ephemeral_ports_overlap_is_named_with_the_fix(cluster, tmp_path, driver):
    cluster.on_node("n2", ["sysctl", "-w", "net.ipv4.ip_local_port_range=1024 60999"])
    try:
        job = submit(cluster, tmp_path, driver=[driver, "2", "end"], exclude="n3,n4")
        assert job.wait(seconds=60) == "FAILED"
    finally:
        cluster.on_node("n2", ["sysctl", "-w", "net.ipv4.ip_local_port_range=32768 60999"])
    assert "barrier: n2 cannot be used: " in job.log
    assert "not restarted: n2 did not come up, and the partition has no other node for the job" in job.log
    assert "sysctl -w net.ipv4.ip_local_port_range='32768 60999'" in job.log
    assert "is lost" not in job.log


def test_a_node_that_cannot_start_a_container_of_a_task_is_named_before_ray_starts(cluster, tmp_path, driver):
    require(*PROGRAMS)
    image, mounter = write_sif(write_task_root(tmp_path / "root"), tmp_path / "task.sif"), shutil.which("squashfuse")
    code = f"from tools.job.node import container_problems; print(*container_problems({str(image)!r}))"
    ask = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code]
    cluster.on_node("n2", ["mount", "--bind", "/bin/false", str(mounter)])
    try:
        assert cluster.on_node("n1", ask).stdout == "\n"
        job = submit(cluster, tmp_path, f"--task-image={image}", driver=[driver, "2", "end"], exclude="n3,n4")
        assert job.wait(seconds=90) == "FAILED", job.everything()
    finally:
        cluster.on_node("n2", ["umount", str(mounter)])
    assert job.show("ExitCode") == "69:0" and "hosts" not in job.driver_log(1)
    assert "because of node n2\n" in job.log, job.log
    assert (
        f"barrier: n2 cannot be used: n2: containers of tasks by bwrap: a container cannot start: the image {image}"
        in (job.log)
    )


@pytest.mark.parametrize(("node", "step"), [("n2", "a Ray worker"), ("n1", "the Ray head")])
def test_a_dead_raylet_ends_the_job_with_its_node(cluster, tmp_path, driver, node, step):
    job = start(cluster, tmp_path, driver, nodelist="n1,n2")
    pid = cluster.on_node(node, ["pgrep", "-x", "raylet"]).stdout.strip()
    cluster.on_node(node, ["kill", "-9", pid])
    assert job.wait(seconds=60) == "FAILED", job.everything()
    assert f"{step} ended with status" in job.log or f"dead {node}" in job.driver_log(1), job.everything()
    assert f"on {node}: " in job.log or f"dead {node}" in job.driver_log(1), job.everything()
    assert job.restarts == 0


@pytest.mark.promise
def test_a_node_that_is_switched_off_is_named_and_the_job_runs_again_without_it(cluster, tmp_path, driver):
    job = start(cluster, tmp_path, driver, nodelist="n3", nodes="2")
    lost = next(node for node in (tmp_path / "logs/latest/nodes").read_text(encoding="utf-8").split() if node != "n3")
    cluster.kill_node(lost)
    try:
        job.wait_until(lambda: job.restarts == 1, "requeue", seconds=90)
        named = (f"node {lost} is lost", f"{lost} is down", f"Node failure on {lost}")  # by this job, sinfo or srun
        job.wait_until(lambda: any(name in job.log for name in named), "the lost node's name", seconds=30)
        job.wait_until(lambda: "hosts " in job.driver_log(2), "second start", seconds=120)
        assert lost not in (tmp_path / "logs/latest/nodes").read_text(encoding="utf-8").split()
        cluster.run(["scancel", job.id])
        assert job.wait(seconds=60) == "CANCELLED"
    finally:
        cluster.start_node(lost)
        cluster.wait_for_nodes(cluster.nodes)
    assert (job.show("JobState"), job.restarts) == ("CANCELLED", 1)  # the user's word is the last
    assert (tmp_path / "logs" / "attempt_1" / "driver.log").stat().st_size  # not overwritten


def test_a_node_that_failed_is_left_out_of_the_next_start(cluster, tmp_path, driver):
    job = submit(cluster, tmp_path, driver=[driver, "2", "fail", f"{tmp_path}/checkpoints"])
    assert job.wait(seconds=200) == "COMPLETED", job.everything()
    first, second = ((tmp_path / f"logs/attempt_{n}/nodes").read_text(encoding="utf-8").split() for n in (1, 2))
    assert f"the next start runs without {first[-1]}" in job.log, job.everything()
    assert "requeued: failed with status 1 after it had saved step_000001, restart 1 of at most 3" in job.log
    assert len(second) == 2
    assert first[-1] not in second
    assert job.show("ExcNodeList") == first[-1]


def test_a_cancelled_job_leaves_its_logs_and_nothing_on_its_nodes(cluster, tmp_path, driver):
    """Slurm may kill the programs of a cancelled job at once; then the next job on a node clears up after them."""
    job = start(cluster, tmp_path, driver, nodelist="n1,n2")
    cluster.run(["scancel", job.id])
    assert job.wait(seconds=60) == "CANCELLED"
    next_job = submit(cluster, tmp_path / "next", driver=[driver, "2", "end"], nodelist="n1,n2")
    assert next_job.wait(seconds=150) == "COMPLETED", next_job.everything()
    for node in ("n1", "n2"):
        assert (tmp_path / "logs" / "attempt_1" / f"ray_{node}" / "raylet.out").stat().st_size
        assert not cluster.on_node(node, ["find", "/tmp", "-maxdepth", "1", "-name", "rl-*"]).stdout


def test_sandboxes_are_waited_for_and_a_dead_one_ends_the_job(cluster, tmp_path, driver):
    server = tmp_path / "sandbox.py"
    server.write_text(SANDBOX.format(python=sys.executable), encoding="utf-8")
    server.chmod(0o755)
    job = start(cluster, tmp_path, driver, f"--sandbox-command={server}", nodelist="n1,n2")
    events = json.loads((tmp_path / "logs" / "latest" / "bring_up.json").read_text(encoding="utf-8"))
    assert events["the driver starts"] >= max(events["n1 has a sandbox"], events["n2 has a sandbox"])
    pid = cluster.on_node("n2", ["pgrep", "-f", str(server)]).stdout.split()[0]
    cluster.on_node("n2", ["kill", "-9", pid])
    assert job.wait(seconds=60) == "FAILED", job.everything()
    assert re.search(r"a sandbox ended with status \d+ before the driver", job.log), job.log
    assert "on n2: srun: error: n2: task" in job.log


def test_a_start_that_is_interrupted_before_its_driver_is_followed_by_another(cluster, tmp_path, driver):
    words = [driver, "2", "end", f"{tmp_path}/checkpoints"]
    job = submit(cluster, tmp_path, driver=words, time="60")  # far from its end: somebody wants the nodes
    job.wait_until(lambda: "the barrier waits" in job.driver_log(1), "barrier", seconds=60)
    assert "the driver starts" not in job.driver_log(1)
    cluster.run(["scancel", "--signal=USR1", job.id])
    job.wait_until(lambda: job.restarts == 1, "requeue", seconds=120)
    assert "requeued: interrupted before its first save, restart 1 of at most 3" in job.log
    assert job.wait(seconds=150) == "COMPLETED", job.everything()
    assert (tmp_path / "logs" / "latest").readlink() == Path("attempt_2")


def test_usr1_to_the_whole_job_reaches_the_driver_alone_and_a_dependent_job_waits_on(cluster, tmp_path, driver):
    job = start(cluster, tmp_path, driver, what="save")
    words = ("sbatch", "--parsable", f"--dependency=afterok:{job.id}", "--kill-on-invalid-dep=yes", "--wrap=true")
    dependent = Job(cluster, tmp_path, cluster.run([*words, f"--output={tmp_path}/dependent.log"]).stdout.strip())
    cluster.run(["scancel", "--signal=USR1", job.id])
    job.wait_until(lambda: job.restarts == 1, "requeue", seconds=120)
    assert "requeued: saved step_000001, restart 1 of at most 3" in job.log
    assert "before the driver" not in job.log
    assert dependent.show("JobState") == "PENDING"
    assert job.wait(seconds=120) == "COMPLETED", job.everything()
    assert dependent.wait(seconds=60) == "COMPLETED"
    assert sorted(path.name for path in (tmp_path / "logs").glob("attempt_*")) == ["attempt_1", "attempt_2"]
