"""One Ray node of a job: check this machine, start Ray, stay until it ends, keep its logs.

    python -m tools.job.node --role head|worker --head HOST --num-nodes N --units N --log-dir DIR --temp-dir DIR
        --cache DIR [--task-image FILE]

`ray_node.sh` starts it on every node. USR2 and TERM end it in order. It ends with status 1 when a process of Ray ends
before that; in a job with spare nodes only the head's end is then the job's. When this machine cannot be used it says
why, tells the barrier and stands by, so that the job can go on without it; where it cannot tell the barrier it ends
with status 69.

`ray start` on one node of a job: its words, a second try when it does not start, and its end.

Whether a Ray node can start on its machine (ports, GPUs, run directory, containers), and that machine's address.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from recipes.cluster.ports import (
    EPHEMERAL_RANGE,
    address_of,
    busy_ports,
    connect,
    ephemeral_overlap,
    host_port,
    ray_ports,
)
from recipes.cluster.tuning import ray_environment
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.errors import LaunchError, Problem, RecipeError, RunError, memory_cause, memory_kills
from tools.job.barrier import EXIT_NODE, NODES_FILE, bring_up_seconds, note_unusable
from tools.job.compile_cache import close_cache, open_cache, seed_path
from tools.job.local import (
    NCCL_BYTES,
    OBJECT_STORE_BYTES,
    RAY_STARTED,
    SHARED_MEMORY,
    count_devices,
    count_gpus,
    limit_problems,
    shared_memory_problems,
)
from tools.job.ray_temp import RAY, clear_abandoned, keep_logs, make_private, remove_sessions
from tools.processes import adopt_orphans, allow_open_files, children, kill_descendants, reap_orphans

CONTAINER_SECONDS = 300.0  # in which a container of a task starts, works and ends
SIGHT_SECONDS = 60.0  # in which a shared file system shows what another node has written
PORT_SECONDS = 90.0  # in which the processes of a requeued job's last start free their ports
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
    has_spares: bool = False  # the job can go on without this node
    deadline: float | None = None  # seconds for all nodes to come up; None: by their number


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
    problems = ephemeral_overlap(EPHEMERAL_RANGE.read_text(encoding="utf-8"))
    problems += sight_problems(node.log_dir)
    problems += gpu_problems(node.units, count_devices(), has_driver=_NVIDIA_DRIVER.exists())
    host, gpus = socket.gethostname(), node.units if count_gpus() else 0
    problems += limit_problems(node.units, where=host)
    parts = {"Ray's object store": OBJECT_STORE_BYTES, "NCCL": NCCL_BYTES * gpus}  # at least
    problems += shared_memory_problems(parts, where=f"{host}: {SHARED_MEMORY}")
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
        address = address_of(name)
        return "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return ""


STOP_SECONDS = 5.0  # Slurm kills a cancelled job after KillWait, 30 s or less, and the logs are to be copied then
_POLL_SECONDS = 0.25
_LAST_LINE_SECONDS = 1.0  # for what Ray printed before it ended and nobody has read yet


def start_command(node: Node) -> list[str]:
    """Return the `ray start` of this node, with everything that the job has decided."""
    ports = ray_ports()
    address, head = own_address(), host_port(node.head, ports.gcs)
    gpus = node.units if count_gpus() else 0
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(("--head", "--include-dashboard=false") if node.is_head else (f"--address={head}",)),
        *((f"--node-ip-address={address}",) if address else ()),
        *((f"--node-name={name}",) if (name := os.environ.get("SLURMD_NODENAME")) else ()),  # by which errors name it
        *((f"--temp-dir={node.temp / RAY}",) if node.is_head else ()),  # the others take the head's path
        f"--num-cpus={node.units}",
        f"--num-gpus={gpus}",
        f"--resources={json.dumps({'worker_units': node.units})}",
        *(() if gpus else (f"--object-store-memory={OBJECT_STORE_BYTES}",)),
        *ports.flags(head=node.is_head),
    ]


def run_ray(node: Node, variables: Mapping[str, str]) -> int:
    """Run Ray and return its status; try once more when it ends before it has started, as on a very busy machine.

    `variables` are for everything that Ray starts on this node.
    """
    allow_open_files()
    tuned = ray_environment(node.num_nodes, os.cpu_count() or 1)
    # Slurm's own variables would make libraries in the actors think that they are its tasks.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_"))}
    threads = {} if count_gpus() else {"OMP_NUM_THREADS": "1"}  # idle ones spin, and the actors share the cores
    for is_last in (False, True):
        ray = subprocess.Popen(
            start_command(node),
            env={**tuned, **threads, **env, **variables, **ray_ports().variables()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        started = threading.Event()
        threading.Thread(target=copy_output, args=(ray, started), daemon=True).start()
        while ray.poll() is None:
            reap_orphans(besides={ray.pid})
            time.sleep(_POLL_SECONDS)
        if started.wait(_LAST_LINE_SECONDS) or is_last:
            break
        print(f"node: Ray ended with status {ray.returncode} before it had started; once more", file=sys.stderr)
        kill_descendants(deadline_seconds=STOP_SECONDS)
        remove_sessions(node.temp)
    return ray.returncode


def copy_output(ray: subprocess.Popen[bytes], started: threading.Event) -> None:
    """Copy what `ray start` prints to standard output; set `started` when it says so."""
    assert ray.stdout is not None
    for line in ray.stdout:
        if RAY_STARTED in line:
            started.set()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def end_ray() -> None:
    """End `ray start --block`, which ends the processes of this node; kill what is left."""
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while children(os.getpid()) and time.monotonic() < end:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(_POLL_SECONDS)
    kill_descendants(deadline_seconds=STOP_SECONDS)


STOPS = (signal.SIGUSR2, signal.SIGTERM)


def wait_for_head(node: Node) -> None:
    """Wait until the head listens: Ray's own attempt gives up too early. Raises `RunError` at the deadline."""
    port, seconds = ray_ports().gcs, node.deadline or bring_up_seconds(node.num_nodes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), connect(node.head, port, seconds=5):
            return
        time.sleep(_POLL_SECONDS)
    where = host_port(node.head, port)
    raise RunError(f"no answer of the head at {where} after {seconds:g} s; see ray_head_{node.head}.log")


def run(node: Node) -> int:
    """Start Ray and return the exit status when it has ended; its logs leave the node in every case."""
    for number in STOPS:
        signal.signal(number, stop)
    adopt_orphans()
    host = socket.gethostname()
    logs = node.log_dir / f"ray_{host}"
    clear_abandoned(node.temp.parent)
    try:
        require_usable(node)
        lock = make_private(node.temp, logs=logs)
    except LaunchError as error:
        return stand_by(node, error)
    cache, kills = None, memory_kills()
    try:
        cache = open_cache(node.temp.parent, seed_path(node.cache))
        if not node.is_head:
            wait_for_head(node)
        status = run_ray(node, cache.variables() if cache else {})
        print(f"node: Ray ended with status {status} on {host}", file=sys.stderr)
        if node.has_spares:
            note_unusable(node.log_dir, [f"Ray ended with status {status}"])
        return 1
    finally:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        if said := memory_cause(kills):
            print(f"node: on {host} {said}", file=sys.stderr, flush=True)
        end_ray()
        keep_logs(node.temp, logs)
        os.close(lock)
        if cache:
            close_cache(cache)


def stand_by(node: Node, unusable: LaunchError) -> int:
    """Say why this machine cannot be used, and stay until the job ends: it may go on with its other nodes.

    Returns a status when the barrier cannot be told, so that the job does not wait for this node.
    """
    problems = str(unusable).splitlines()
    sys.stderr.writelines(f"node: {line}\n" for line in problems)
    sys.stderr.flush()
    if not note_unusable(node.log_dir, problems) and not node.has_spares:
        return EXIT_NODE
    while True:
        signal.pause()


def stop(_number: int, _frame: FrameType | None) -> None:
    """End this program in order: `run` ends Ray and keeps its logs."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def parse(argv: Sequence[str] | None) -> Node:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run one Ray node of a job.")
    parser.add_argument("--role", choices=("head", "worker"), required=True)
    parser.add_argument("--head", required=True, help="host name of the head")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--units", type=int, required=True, help="accelerators per node")
    parser.add_argument("--log-dir", type=Path, required=True, help="of this start: results/EXP_NAME/logs/attempt_N")
    parser.add_argument("--temp-dir", type=Path, required=True, help="to be made on this node, the same on every node")
    parser.add_argument("--cache", type=Path, required=True, help="PERSISTENT_CACHE, the same on every node")
    parser.add_argument("--spares", type=int, default=0, help="nodes without which the job can go on")
    parser.add_argument("--deadline", type=float, help="seconds; without it they grow with the number of nodes")
    parser.add_argument("--task-image", default="", help="image of a task that must start here")
    args = parser.parse_args(argv)
    return Node(
        is_head=args.role == "head",
        head=args.head,
        num_nodes=args.num_nodes,
        units=args.units,
        log_dir=args.log_dir,
        temp=args.temp_dir,
        cache=args.cache,
        task_image=args.task_image,
        has_spares=args.spares > 0,
        deadline=args.deadline,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node and return the exit status."""
    try:
        return run(parse(argv))
    except RecipeError as error:
        sys.stderr.writelines(f"node: {line}\n" for line in str(error).splitlines())
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
