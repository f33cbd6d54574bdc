"""Wait until every node of a job has joined the Ray cluster and its sandbox answers, then become the driver.

At the deadline the barrier names every node that is missing, with the last line of its log. `bring_up.json` beside
the logs, and the driver's log, say how many seconds after the job's start each part was there.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from recipes.cluster.ports import SANDBOX_PORT, ray_ports
from recipes.stop import EXIT_RESUME, SIGNALS
from tools.job.bring_up import Timeline, bring_up_seconds, joined_names, report_missing, short

_POLL_SECONDS = 0.25
_PROBE_SECONDS = 5.0


def wait_for_port(address: str, end: float) -> bool:
    """Wait until the head listens; Ray's own connect gives up too early."""
    host, port = address.rsplit(":", 1)
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def join(address: str, end: float) -> bool:
    """Connect to the head, also to one that failed and was started once more; False when `end` (monotonic) comes."""
    import ray  # takes as long as the head takes to listen

    while wait_for_port(address, end):
        with suppress(ConnectionError):
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            return True
        time.sleep(_POLL_SECONDS)
    return False


def wait_for_nodes(address: str, expected: Sequence[str], units: int, end: float, timeline: Timeline) -> list[str]:
    """Return the nodes that have not joined with all their worker units when `end` (monotonic) comes."""
    import ray

    missing = list(expected)
    if not join(address, end):
        return missing
    timeline.mark("the head listens")
    try:
        while True:
            joined = {
                short(node["NodeManagerHostname"]): str(node["NodeManagerAddress"])
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("worker_units", 0) >= units
            }
            for name in joined_names(missing, expected, joined):
                missing.remove(name)
                timeline.mark(f"{name} joined Ray")
            if not missing or time.monotonic() >= end:
                return missing
            time.sleep(_POLL_SECONDS)
    finally:
        ray.shutdown()


def wait_for_sandboxes(expected: Sequence[str], end: float, timeline: Timeline) -> list[str]:
    """Return the nodes whose sandbox does not answer its health request when `end` (monotonic) comes."""
    missing = list(expected)
    with ThreadPoolExecutor(max_workers=min(32, len(missing))) as pool:
        while True:
            for name, is_up in zip(tuple(missing), pool.map(sandbox_answers, tuple(missing)), strict=True):
                if is_up:
                    missing.remove(name)
                    timeline.mark(f"{name} has a sandbox")
            if not missing or time.monotonic() >= end:
                return missing
            time.sleep(_POLL_SECONDS)


def sandbox_answers(host: str) -> bool:
    """Ask a node's sandbox for its health."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), direct.open(f"http://{host}:{SANDBOX_PORT}/health", timeout=_PROBE_SECONDS) as answer:
        return bool(answer.status == 200)
    return False


def hold_signals() -> None:
    """Hold requests to stop until the driver's `StopRequest` takes them: it has no handler while Python starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Wait for all nodes of a job, then become the driver.")
    parser.add_argument("--nodes", type=Path, required=True, help="file with one host name per line, the head first")
    parser.add_argument("--units", type=int, required=True, help="worker units of each node")
    parser.add_argument("--sandboxes", action="store_true", help="also wait for the sandbox of every node")
    parser.add_argument("--deadline", type=float, help="seconds; without it they grow with the number of nodes")
    parser.add_argument("command", nargs="+", help="the driver, after --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Wait, then execute the driver in place of this process."""
    args = parse(argv)
    for number in SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_RESUME))  # nothing to save yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # begin.py has held them
    names, log_dir = args.nodes.read_text().split(), args.nodes.parent
    address = f"{names[0]}:{ray_ports().gcs}"
    timeline = Timeline(job_start=float(os.environ.get("SLURM_JOB_START_TIME", time.time())))
    timeline.mark("the barrier waits")
    seconds = bring_up_seconds(len(names)) if args.deadline is None else args.deadline
    end = time.monotonic() + seconds
    missing = wait_for_nodes(address, names, args.units, end, timeline)
    report_missing(names[:1] if names[0] in missing else (), "has no Ray head", log_dir, "ray_head_{node}.log")
    report_missing([name for name in missing if name != names[0]], "is not in Ray", log_dir, "ray_worker_{node}.log")
    closed = wait_for_sandboxes(names, end, timeline) if args.sandboxes else []
    report_missing(closed, "has no sandbox that answers", log_dir, "sandbox_{node}.log")
    if missing or closed:
        print(f"barrier: given up after {seconds:g} s", file=sys.stderr)
        return 1
    timeline.mark("the driver starts")
    timeline.write(log_dir / "bring_up.json")
    hold_signals()
    os.environ["RAY_ADDRESS"] = address
    sys.stdout.flush()
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    sys.exit(main())
