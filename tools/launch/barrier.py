"""Wait until every node of a job has joined the Ray cluster, then become the driver.

Ends with the names of the missing nodes when the deadline passes: each has a log beside the driver's.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.cluster.ports import ray_ports

DEADLINE_SECONDS = 1800.0
_POLL_SECONDS = 2.0


def wait_for_nodes(address: str, expected: Sequence[str], *, units: int, deadline_seconds: float) -> list[str]:
    """Return the nodes that have not joined with all their worker units by the deadline."""
    import ray

    end = time.monotonic() + deadline_seconds
    wait_for_port(address, end)
    ray.init(address=address, logging_level="ERROR")
    try:
        while True:
            joined = {
                node["NodeManagerHostname"].split(".")[0]
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("worker_units", 0) >= units
            }
            missing = [name for name in expected if name.split(".")[0] not in joined]
            if not missing or time.monotonic() >= end:
                return missing
            time.sleep(_POLL_SECONDS)
    finally:
        ray.shutdown()


def wait_for_port(address: str, end: float) -> None:
    """Wait until the head listens; Ray's own connect gives up too early."""
    host, port = address.rsplit(":", 1)
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(_POLL_SECONDS / 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Wait, then execute the driver in place of this process."""
    parser = argparse.ArgumentParser(description="Wait for all nodes of a job, then become the driver.")
    parser.add_argument("--head", required=True)
    parser.add_argument("--nodes", type=Path, required=True, help="file with one host name per line")
    parser.add_argument("--units", type=int, required=True, help="worker units of each node")
    parser.add_argument("driver", nargs="+", help="command, after --")
    args = parser.parse_args(argv)
    address = f"{args.head}:{ray_ports().gcs}"
    names = args.nodes.read_text().split()
    if missing := wait_for_nodes(address, names, units=args.units, deadline_seconds=DEADLINE_SECONDS):
        logs = args.nodes.parent
        print(
            f"barrier: after {DEADLINE_SECONDS:g} s these nodes have not joined: {', '.join(missing)}", file=sys.stderr
        )
        print(f"barrier: see {logs}/ray_worker_NODE.log of each", file=sys.stderr)
        return 1
    os.environ["RAY_ADDRESS"] = address
    os.execvp(args.driver[0], args.driver)


if __name__ == "__main__":
    sys.exit(main())
