"""Nodes that do not come up, on a real Slurm cluster with real Ray: with spare nodes, and without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from slurm.cluster import ROOT, Cluster
from slurm.jobs import Job, submit
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

NUM_NODES = 4
DRIVER = """
import os, socket, sys
import ray
ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"worker_units": 1})
class Unit:  # takes a node's only worker unit, so that no two share a node
    def host(self):
        return socket.gethostname()

units = [Unit.remote() for _ in range(int(sys.argv[1]))]
print("hosts", *sorted(ray.get([unit.host.remote() for unit in units], timeout=60)), flush=True)
"""
WAITS = """
import os, socket, sys, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"worker_units": 1})
class Unit:
    def host(self):
        return socket.gethostname()

units = [Unit.options(resources={"worker_units": 1, "node:__internal_head__": 0.001}).remote(), Unit.remote()]
print("hosts", *ray.get([unit.host.remote() for unit in units]), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.2)
print("still", *ray.get([unit.host.remote() for unit in units], timeout=60), flush=True)
"""
STAYS_AWAY = """#!/usr/bin/env bash
trap 'exit 0' USR2
while true; do sleep 1 & wait "$!"; done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(num_nodes=NUM_NODES, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real barrier waits half an hour for a node that does not come; a quarter of a minute is a late one's."""
    monkeypatch.setenv("BRING_UP_SECONDS", f"{patiently(75):g}")


@contextmanager
def away(cluster: Cluster, node: str, tmp_path: Path) -> Iterator[None]:
    """Let the node's part of the job start, and never join Ray."""
    program = tmp_path / "stays_away.sh"
    program.write_text(STAYS_AWAY, encoding="utf-8")
    program.chmod(0o755)
    with mounted(cluster, node, ["--bind", str(program)], str(ROOT / "tools/job/ray_node.sh")):
        yield


@contextmanager
def without_gpus(cluster: Cluster, node: str, _tmp_path: Path) -> Iterator[None]:
    """Let the node have a driver of NVIDIA's and no device, as one whose GPU has failed has one too few."""
    with mounted(cluster, node, ["-t", "tmpfs", "tmpfs"], "/proc/driver"):
        cluster.on_node(node, ["mkdir", "/proc/driver/nvidia"])
        cluster.on_node(node, ["touch", "/proc/driver/nvidia/version"])
        yield


@contextmanager
def overlapping_ports(cluster: Cluster, node: str, _tmp_path: Path) -> Iterator[None]:
    """Let the kernel of the node give our ports to anybody."""
    cluster.on_node(node, ["sysctl", "-w", "net.ipv4.ip_local_port_range=1024 60999"])
    try:
        yield
    finally:
        cluster.on_node(node, ["sysctl", "-w", "net.ipv4.ip_local_port_range=32768 60999"])


@contextmanager
def mounted(cluster: Cluster, node: str, what: list[str], where: str) -> Iterator[None]:
    cluster.on_node(node, ["mount", *what, where])
    try:
        yield
    finally:
        cluster.on_node(node, ["umount", where])


Fault = Callable[[Cluster, str, Path], AbstractContextManager[None]]


def run(cluster: Cluster, tmp_path: Path, faults: dict[str, Fault], *, needs: int, spares: int, **sbatch: str) -> Job:
    """Run a job with these faults to its end; its driver takes the units of as many nodes as it needs."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER, encoding="utf-8")
    (tmp_path / "run").mkdir()
    with ExitStack() as planted:
        for node, fault in faults.items():
            planted.enter_context(fault(cluster, node, tmp_path))
        options = [f"--spares={spares}"] if spares else []
        nodes = {"nodes": str(needs + spares), **sbatch}
        job = submit(cluster, tmp_path / "run", *options, driver=[str(path), str(needs)], **nodes)
        job.wait(seconds=300)
    return job


def test_a_job_goes_on_with_its_spare_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """One node never joins, one has too few GPUs: of four, two are needed."""
    job = run(cluster, tmp_path, {"n2": away, "n4": without_gpus}, needs=2, spares=2)
    assert job.show("JobState") == "COMPLETED", job.everything()
    log = job.driver_log(1)
    assert "hosts n1 n3" in log
    assert "barrier: n4 cannot be used: n4: got 0 GPUs, expected 1" in log
    assert "barrier: n2 is not in Ray; ray_worker_n2.log: empty" in log
    assert "barrier: goes on with 2 of 4 nodes, 2 spare" in log
    assert job.restarts == 0


def test_all_at_once_without_enough_spares_is_requeued_without_them(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes cannot be used and one never joins: the first start blames them, and no other node is there."""
    faults: dict[str, Fault] = {"n2": away, "n3": overlapping_ports, "n4": without_gpus}
    job = run(cluster, tmp_path, faults, needs=3, spares=1)
    assert job.show("JobState") == "FAILED", job.everything()
    assert job.show("ExitCode") == "69:0"
    log = job.driver_log(1)
    assert "barrier: n3 cannot be used: " in log and "barrier: n4 cannot be used: " in log
    assert "because of node n3, node n4" in log
    assert "not restarted: n3 n4 did not come up, and the partition has no other node for the job" in job.log


@pytest.mark.parametrize("fault", [pytest.param(away, marks=pytest.mark.slow), without_gpus])
def test_without_spares_the_job_starts_again_without_the_node(cluster: Cluster, tmp_path: Path, fault: Fault) -> None:
    job = run(cluster, tmp_path, {"n2": fault}, needs=2, spares=0, exclude="n4")
    assert job.show("JobState") == "COMPLETED", job.everything()
    assert job.restarts == 1
    assert "requeued: n2 did not come up, restart 1 of at most 3" in job.log
    assert "the next start runs without n2" in job.log
    assert "hosts n1 n3" in job.driver_log(2)


def test_a_spare_node_that_fails_later_does_not_end_the_run(cluster: Cluster, tmp_path: Path) -> None:
    path, go_on = tmp_path / "driver.py", tmp_path / "go on"
    path.write_text(WAITS, encoding="utf-8")
    (tmp_path / "run").mkdir()
    job = submit(cluster, tmp_path / "run", "--spares=1", driver=[str(path), str(go_on)], nodes="3", exclude="n4")
    job.wait_until(lambda: "hosts " in job.driver_log(1), "driver", seconds=150)
    found = re.search("hosts n1 (n[23])\n", job.driver_log(1))
    assert found, job.driver_log(1)
    [spare] = {"n2", "n3"} - {found[1]}
    [raylet] = cluster.on_node(spare, ["pgrep", "-x", "raylet"]).stdout.split()
    cluster.on_node(spare, ["kill", "-9", raylet])
    log = tmp_path / "run" / "logs" / "attempt_1" / "srun_ray_worker.log"
    job.wait_until(lambda: f"srun: error: {spare}: task" in log.read_text(encoding="utf-8"), "its end", seconds=60)
    go_on.touch()
    assert job.wait(seconds=120) == "COMPLETED", job.everything()
    assert "still n1 n" in job.driver_log(1)
    assert job.restarts == 0
