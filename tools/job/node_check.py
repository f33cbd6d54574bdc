"""Whether a Ray node can start on its machine (ports, GPUs, run directory, containers), and that machine's address."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.cluster.ports import EPHEMERAL_RANGE, busy_ports, ephemeral_overlap, ray_ports
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.errors import LaunchError, Problem
from tools.job.local import count_gpus

CONTAINER_SECONDS = 300.0  # in which a container of a task starts, works and ends
SIGHT_SECONDS = 60.0  # in which a shared file system shows what another node has written
PORT_SECONDS = 90.0  # in which the processes of a requeued job's last start free their ports
NODES_FILE = "nodes"  # in the log directory: the names of the job's nodes
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the job says about this node."""

    is_head: bool
    head: str  # host name
    num_nodes: int
    units: int  # accelerators of this node that the job uses
    log_dir: Path
    temp: Path  # to be made on this node: see ray_temp.py
    cache: Path  # PERSISTENT_CACHE
    task_image: str = ""  # of which a container must start here; empty: none is needed


def gpu_problems(units: int, devices: int, *, has_driver: bool) -> list[Problem]:
    """Compare the devices seen here with those the job counts on; a machine without a driver computes on its CPUs."""
    if devices >= units or not (has_driver or devices):
        return []
    fix = "have the container runtime pass the GPUs through, or take the node out of service"
    return [Problem(where=socket.gethostname(), got=f"{devices} GPUs", expected=str(units), fix=fix)]


def sight_problems(log_dir: Path) -> list[Problem]:
    """Return a problem when this node never sees the file that the job wrote before it started any node."""
    end = time.monotonic() + SIGHT_SECONDS
    while not (log_dir / NODES_FILE).is_file():
        if time.monotonic() >= end:
            break
        time.sleep(0.2)
    else:
        return []
    fix = "put RESULTS_DIR on a file system that all nodes share, or mount it there"
    wrong = f"no file {log_dir / NODES_FILE}, which the job's first node has written"
    return [Problem(where=socket.gethostname(), wrong=wrong, fix=fix)]


def require_usable(node: Node) -> None:
    """Raise `LaunchError` with everything that keeps a Ray node from starting here.

    Ports are waited for: processes of the job's last start may still have them.
    """
    problems = ephemeral_overlap(EPHEMERAL_RANGE.read_text())
    problems += sight_problems(node.log_dir)
    problems += gpu_problems(node.units, count_gpus(), has_driver=_NVIDIA_DRIVER.exists())
    end = time.monotonic() + PORT_SECONDS
    while busy := busy_ports(ray_ports().fixed(head=node.is_head)):
        if problems or time.monotonic() >= end:
            break
        time.sleep(1.0)
    problems += busy
    if node.task_image and not problems:
        problems += container_problems(node.task_image)
    if problems:
        raise LaunchError(problems)


def container_problems(image: str) -> list[Problem]:
    """Return why no container of a task can work on this node; empty where a real one was started and ended."""
    host = socket.gethostname()

    async def start() -> None:
        async with asyncio.timeout(CONTAINER_SECONDS):
            await check_runtime(runtime_of_machine(), image)

    try:
        asyncio.run(start())
    except LaunchError as error:
        return [replace(problem, where=f"{host}: {problem.where}") for problem in error.problems]
    except TimeoutError:
        wrong = f"a container of {image} did not start, work and end within {CONTAINER_SECONDS:g} s"
        return [Problem(where=host, wrong=wrong, fix="look at the node's disks and load, or take it out of service")]
    return []


def own_address() -> str:
    """Return the address that the other nodes know this host by; empty when its name means only itself here."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with suppress(OSError):
        address = socket.gethostbyname(name)
        return "" if address.startswith("127.") else address
    return ""
