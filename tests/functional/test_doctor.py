"""The doctor against a real Slurm: what it reads there is what Slurm says; eight defects at once are eight codes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm.cluster import ROOT, Cluster

from recipes.cluster.ports import ray_ports
from tests.unit.tools.launch_case import PLACEHOLDER_ROW, LaunchCase, write_case

pytestmark = [pytest.mark.functional, pytest.mark.timeout(180)]

# Holds a port while the doctor looks; started on a node.
SQUATTER = """
import socket, subprocess, sys
held = socket.socket()
held.bind(("", int(sys.argv[1])))
held.listen()
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with two fake GPUs each, which is what scale tiny asks for."""
    with Cluster(gpus=2, shared=[tmp_path_factory.getbasetemp()]) as started:
        yield started


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    return write_case(tmp_path)


@pytest.fixture
def partition(cluster: Cluster) -> Iterator[Any]:
    """A function that changes the partition; it is as before when the test ends."""
    yield lambda *settings: cluster.run(["scontrol", "update", "PartitionName=batch", *settings])
    cluster.run(["scontrol", "update", "PartitionName=batch", "MaxTime=INFINITE", "State=UP", "AllowAccounts=ALL"])


def doctor(cluster: Cluster, case: LaunchCase, *overrides: str, **variables: str) -> list[tuple[str, str]]:
    """Return (code, severity) of what the doctor finds about Slurm, asked on the login side of the cluster."""
    env = {**case.env, "PATH": os.environ["PATH"], **variables}
    command = [sys.executable, "-m", "tools.doctor", "--json", *overrides]
    done = cluster.run(command, env=env, check=False)
    assert done.stderr == ""
    return [pair for pair in found(done.stdout, status=done.returncode) if pair[0].startswith("SLM")]


def found(report_text: str, *, status: int) -> list[tuple[str, str]]:
    """Read a report and check that the exit status fits it."""
    report = json.loads(report_text)
    pairs = [(entry["code"], entry["severity"]) for entry in report["findings"]]
    assert report["exit_status"] == status == (2 if "error" in [severity for _, severity in pairs] else 0)
    return pairs


def test_a_launch_that_fits_the_cluster_has_no_finding(cluster, case):
    assert doctor(cluster, case) == []


@pytest.mark.parametrize(
    ("code", "overrides", "variables"),
    [
        ("SLM001", (), {"SLURM_PARTITION": "nope"}),
        ("SLM002", (), {"SBATCH_NUM_NODES": "3"}),
        ("SLM003", ("cluster.gpus_per_node=5",), {}),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(cluster, case, code, overrides, variables):
    assert doctor(cluster, case, *overrides, **variables) == [(code, "error")]
    assert doctor(cluster, case, "--force", *overrides, **variables) == [(code, "note")]


def test_one_suitable_partition_of_several_is_enough(cluster, case):
    assert doctor(cluster, case, SLURM_PARTITION="nope,batch") == []


@pytest.mark.parametrize(
    ("code", "setting"),
    [("SLM004", "MaxTime=3:00:00"), ("SLM001", "State=DOWN"), ("SLM005", "AllowAccounts=others")],
)
def test_limits_of_the_partition_are_read(cluster, case, partition, code, setting):
    partition(setting)
    assert doctor(cluster, case) == [(code, "error")]


def test_a_drained_node_is_waited_for(cluster, case):
    cluster.run(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"])
    assert doctor(cluster, case, SBATCH_NUM_NODES="2") == [("SLM007", "note")]
    cluster.run(["scontrol", "update", "NodeName=n2", "State=RESUME"])
    cluster.wait_for_nodes(["n2"])
    assert doctor(cluster, case, SBATCH_NUM_NODES="2") == []


def test_eight_defects_at_once_have_eight_codes(cluster, case):
    """An unset variable, a typo, a missing image, a placeholder, few nodes, a busy port, cut weights, no container."""
    case.write_task_rows()
    case.sif.unlink()
    case.write_rows(
        "train.jsonl", json.loads((case.directory / "train.jsonl").read_text(encoding="utf-8")), PLACEHOLDER_ROW
    )
    weights = case.export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    (case.directory / "training.sqsh").write_text("<html>404 Not Found</html>", encoding="utf-8")
    variables = {"SCALE": "small", "SBATCH_NUM_NODES": "19", "SLURM_CONF": f"{cluster.directory}/etc/slurm.conf"}
    env = {**case.env, "PATH": os.environ["PATH"], **variables}
    del env["CONFIG_PATH"], env["SLURM_ACCOUNT"]
    doctor_command = [sys.executable, "-m", "tools.doctor", "--json", "--stage", "stage2.2"]
    squatter = [sys.executable, "-c", SQUATTER, str(ray_ports().gcs)]
    words = [*squatter, *doctor_command, "grpo.num_prompt_per_step=8"]
    settings = [f"{name}={value}" for name, value in env.items()]
    done = cluster.on_node("n1", ["env", "-i", *settings, *words], check=False)
    assert done.stderr == ""
    errors = {code for code, severity in found(done.stdout, status=done.returncode) if severity == "error"}
    eight = {"ENV001", "CFG001", "SIF002", "DAT002", "ALC001", "PRT001", "MDL002", "IMG002"}
    assert eight <= errors
    assert "SLM002" in errors  # nor has the partition so many nodes


def test_the_launcher_refuses_what_the_doctor_finds(cluster, case):
    env = {**case.env, "PATH": os.environ["PATH"], "PYTHON": sys.executable, "SLURM_PARTITION": "nope"}
    done = cluster.run([str(ROOT / "super_launch.sh")], env=env, check=False)
    assert done.returncode == 2
    assert "SLM001 SLURM_PARTITION: got nope" in done.stderr
    dry = cluster.run([str(ROOT / "super_launch.sh"), "--dry-run"], env=env, check=False)
    assert dry.returncode == 2
    assert "would be refused: SLM001" in dry.stderr
    assert shlex.split(dry.stdout)[0] == "sbatch"


def test_accounts_are_compared_where_slurm_insists_on_them(tmp_path, case):
    with Cluster(num_nodes=1, gpus=2, accounting=True, shared=[tmp_path]) as cluster:
        assert doctor(cluster, case) == []
        assert doctor(cluster, case, SLURM_ACCOUNT="nobody") == [("SLM005", "error")]


def test_a_controller_that_is_gone_is_a_note_within_the_deadline(tmp_path, case):
    with Cluster(num_nodes=1, gpus=2, shared=[tmp_path]) as cluster:
        pid = (cluster.directory / "run" / "slurmctld.pid").read_text(encoding="utf-8").strip()
        cluster.run(["kill", "-STOP", pid])  # it does not even refuse
        codes = doctor(cluster, case)
        cluster.run(["kill", "-CONT", pid])
    assert set(codes) == {("SLM006", "note")}
