"""One Ray node of a job: check this machine, start Ray, stay until it ends, keep its logs.

    python -m tools.job.node --role head|worker --head HOST --num-nodes N --units N --log-dir DIR

Started by `ray_node.sh` on every node. USR2 ends the node in order; it ends with status 1 when a process of Ray ends
before that, and with 2 when this machine cannot be used, saying why.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from recipes.cluster.ports import ray_ports
from recipes.cluster.tuning import ray_environment
from recipes.errors import RecipeError, RunError
from tools.job.local import OBJECT_STORE_BYTES, count_gpus
from tools.job.node_check import Node, own_address, require_usable

HEAD_SECONDS = 1800.0  # for the head to listen: its container may have to be imported first; as in barrier.py
STOP_SECONDS = 10.0
_POLL_SECONDS = 0.25
_OPEN_FILES = 65536  # Ray keeps connections from every worker to every other; Slurm's soft limit is often 1024


def start_command(node: Node, temp: Path) -> list[str]:
    """Return the `ray start` of this node; it never guesses what the job has decided."""
    ports = ray_ports()
    address = own_address()
    gpus = node.units if count_gpus() else 0
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(("--head", "--include-dashboard=false") if node.is_head else (f"--address={node.head}:{ports.gcs}",)),
        *((f"--node-ip-address={address}",) if address else ()),
        *((f"--temp-dir={temp}",) if node.is_head else ()),  # the others take the head's
        f"--num-cpus={node.units}",
        f"--num-gpus={gpus}",
        f"--resources={json.dumps({'worker_units': node.units})}",
        *(() if gpus else (f"--object-store-memory={OBJECT_STORE_BYTES}",)),
        *ports.flags(head=node.is_head),
    ]


def wait_for_head(head: str) -> None:
    """Wait until the head listens; Ray's own attempt gives up too early."""
    port = ray_ports().gcs
    end = time.monotonic() + HEAD_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((head, port), timeout=5):
            return
        time.sleep(_POLL_SECONDS)
    raise RunError(f"the head does not answer at {head}:{port} after {HEAD_SECONDS:g} s; see ray_head_{head}.log")


def run(node: Node) -> int:
    """Start Ray and return the exit status when it has ended."""
    require_usable(node)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _OPEN_FILES) if hard > 0 else _OPEN_FILES, hard))
    if not node.is_head:
        wait_for_head(node.head)
    stop_requested = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stop_requested
        stop_requested = True

    signal.signal(signal.SIGUSR2, stop)
    # The same on every node, and not TMPDIR: the paths of Ray's sockets below it may have at most 107 bytes.
    temp = Path("/tmp", f"ray-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    tuned = ray_environment(node.num_nodes, os.cpu_count() or 1)
    # Slurm's own variables would make libraries in the actors think that they are its tasks.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_"))}
    threads = {} if count_gpus() else {"OMP_NUM_THREADS": "1"}  # idle ones spin, and the actors share the cores
    ray = subprocess.Popen(start_command(node, temp), env=tuned | threads | env, stdin=subprocess.DEVNULL)
    try:
        while ray.poll() is None and not stop_requested:
            time.sleep(_POLL_SECONDS)
        if stop_requested:
            return 0
        print(f"node: Ray ended with status {ray.returncode} on {socket.gethostname()}", file=sys.stderr)
        return 1
    finally:
        end_ray(ray)
        keep_logs(temp, node.log_dir / f"ray_{socket.gethostname()}")


def end_ray(ray: subprocess.Popen[bytes]) -> None:
    """End `ray start --block`, which ends the node's processes; kill it when that takes long."""
    if ray.poll() is None:
        ray.terminate()
    try:
        ray.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        ray.kill()
        ray.wait()


def keep_logs(temp: Path, target: Path) -> None:
    """Copy the logs of Ray and its workers off the node, and remove the rest."""
    for logs in temp.glob("session_2*/logs"):
        try:
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except (OSError, shutil.Error) as error:  # a full disk must not hide how the run ended
            print(f"node: logs in {logs} were not all copied: {error}", file=sys.stderr)
    shutil.rmtree(temp, ignore_errors=True)


def parse(argv: Sequence[str] | None) -> Node:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run one Ray node of a job.")
    parser.add_argument("--role", choices=("head", "worker"), required=True)
    parser.add_argument("--head", required=True, help="host name of the head")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--units", type=int, required=True, help="accelerators per node")
    parser.add_argument("--log-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    return Node(
        is_head=args.role == "head",
        head=args.head,
        num_nodes=args.num_nodes,
        units=args.units,
        log_dir=args.log_dir,
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
