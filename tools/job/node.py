"""One Ray node of a job: check this machine, start Ray, stay until it ends, keep its logs.

    python -m tools.job.node --role head|worker --head HOST --num-nodes N --units N --log-dir DIR --temp-dir DIR
        --cache DIR [--task-image FILE]

`ray_node.sh` starts it on every node. USR2 and TERM end it in order. It ends with status 1 when a process of Ray ends
before that, and with 2 when this machine cannot be used; it says why.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from recipes.cluster.ports import ray_ports
from recipes.errors import RecipeError, RunError
from tools.job.bring_up import bring_up_seconds
from tools.job.compile_cache import close_cache, open_cache, seed_path
from tools.job.node_check import Node, require_usable
from tools.job.ray_start import end_ray, run_ray
from tools.job.ray_temp import clear_abandoned, keep_logs, make_private
from tools.processes import adopt_orphans

STOPS = (signal.SIGUSR2, signal.SIGTERM)
_POLL_SECONDS = 0.25


def wait_for_head(node: Node) -> None:
    """Wait until the head listens: Ray's own attempt gives up too early. Raises `RunError` at the deadline."""
    port, seconds = ray_ports().gcs, bring_up_seconds(node.num_nodes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((node.head, port), timeout=5):
            return
        time.sleep(_POLL_SECONDS)
    raise RunError(f"no answer of the head at {node.head}:{port} after {seconds:g} s; see ray_head_{node.head}.log")


def run(node: Node) -> int:
    """Start Ray and return the exit status when it has ended; its logs leave the node in every case."""
    for number in STOPS:
        signal.signal(number, stop)
    adopt_orphans()
    host = socket.gethostname()
    clear_abandoned(node.temp.parent)
    require_usable(node)
    logs = node.log_dir / f"ray_{host}"
    lock = make_private(node.temp, logs=logs)
    cache = None
    try:
        cache = open_cache(node.temp.parent, seed_path(node.cache))
        if not node.is_head:
            wait_for_head(node)
        status = run_ray(node, cache.variables() if cache else {})
        print(f"node: Ray ended with status {status} on {host}", file=sys.stderr)
        return 1
    finally:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        end_ray()
        keep_logs(node.temp, logs)
        os.close(lock)
        if cache:
            close_cache(cache)


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
