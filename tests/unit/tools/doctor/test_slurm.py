"""What Slurm says about partitions and nodes, as it prints it, and what follows for a job."""

from __future__ import annotations

import subprocess

import pytest

from tools.doctor.slurm import NodeGroup, node_findings, node_group, preemption_findings
from tools.draft import slurm


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("4|gpu:8|idle", NodeGroup(count=4, gpus=8, is_up=True)),
        ("12|gpu:h100:8(S:0-1)|mix", NodeGroup(count=12, gpus=8, is_up=True)),
        ("1|gpu:a:4,gpu:b:2,shard:16|alloc", NodeGroup(count=1, gpus=6, is_up=True)),
        ("3|(null)|idle", NodeGroup(count=3, gpus=0, is_up=True)),
        ("1|gpu:no_consume:4|idle", NodeGroup(count=1, gpus=4, is_up=True)),
        ("1|gpu:h200:no_consume:8(S:0-1),shard:32|idle", NodeGroup(count=1, gpus=8, is_up=True)),
        ("1|gpu:4090:2(S:0,1),gpu:1g.10gb:7|idle", NodeGroup(count=1, gpus=9, is_up=True)),
        ("1|vgpu:4,mygpu:a:2,gpus:8|idle", NodeGroup(count=1, gpus=0, is_up=True)),
        ("2|gpu:8|idle*", NodeGroup(count=2, gpus=8, is_up=False)),
        ("2|gpu:8|drng", NodeGroup(count=2, gpus=8, is_up=False)),
        ("2|gpu:8|drain", NodeGroup(count=2, gpus=8, is_up=False)),
        ("1|gpu:8|down*", NodeGroup(count=1, gpus=8, is_up=False)),
        ("1|gpu:8|comp", NodeGroup(count=1, gpus=8, is_up=True)),
    ],
)
def test_groups_of_nodes(line, expected):
    assert node_group(line) == expected


def group(count: int, *, gpus: int = 8, is_up: bool = True) -> NodeGroup:
    return NodeGroup(count=count, gpus=gpus, is_up=is_up)


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        ([group(20)], None),
        ([group(12), group(8)], None),
        ([group(19)], "SLM002"),
        ([], "SLM002"),
        ([group(19), group(10, gpus=4)], "SLM003"),
        ([group(30, gpus=4)], "SLM003"),
        ([group(19), group(4, is_up=False)], "SLM007"),
    ],
)
def test_twenty_nodes_of_eight_gpus(groups, code):
    findings = list(node_findings("batch", groups, 20, 8))
    assert [finding.code for finding in findings] == ([code] if code else [])


def test_a_cluster_that_counts_no_gpus_is_told_how_to_ask_for_none():
    (finding,) = node_findings("batch", [group(32, gpus=0)], 20, 8)
    assert finding.code == "SLM003" and "set SBATCH_GRES=" in finding.problem.fix
    assert list(node_findings("batch", [group(32, gpus=0)], 20, 0)) == []


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ("gpu:8(S:0-1)\n", 0, "gpu"),
        ("(null)\n", 0, ""),
        ("(null)\nnvme:1,tmpdisk:2\n", 0, ""),
        ("(null)\nnvme:1,gpu:h100:4\n", 0, "gpu"),  # another partition has them, so this one was chosen by mistake
        ("", 0, "gpu"),
        ("", 1, "gpu"),
    ],
)
def test_gpus_are_asked_for_where_slurm_counts_any(monkeypatch, said, status, expected):
    monkeypatch.setattr(slurm, "ask", lambda *_command: subprocess.CompletedProcess([], status, said, ""))
    assert slurm.asked_gres("auto") == expected
    assert [slurm.asked_gres(given) for given in ("", "gpu", "gpu:h100:4")] == ["", "gpu", "gpu:h100:4"]


@pytest.mark.parametrize(
    ("mode", "grace", "parameters", "is_noted"),
    [
        ("OFF", "0", "", False),
        ("REQUEUE", "20", "", True),
        ("CANCEL", "0", "send_user_signal", True),
        ("REQUEUE", "600", "min_exempt_priority=5,send_user_signal", False),
    ],
)
def test_a_partition_that_takes_nodes_back_without_asking_is_noted(mode, grace, parameters, is_noted):
    settings = f"PreemptMode             = REQUEUE\nPreemptParameters       = {parameters}\nPriorityType = x\n"
    findings = list(preemption_findings("batch", {"PreemptMode": mode, "GraceTime": grace}, settings))
    assert [(finding.code, finding.severity) for finding in findings] == ([("SLM009", "note")] if is_noted else [])
