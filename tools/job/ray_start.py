"""`ray start` on one node of a job: its words, a second try when it does not start, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from recipes.cluster.ports import ray_ports
from recipes.cluster.tuning import ray_environment
from tools.job.local import OBJECT_STORE_BYTES, RAY_STARTED, count_gpus
from tools.job.node_check import Node, own_address
from tools.job.ray_temp import RAY, remove_sessions
from tools.processes import allow_open_files, children, kill_descendants, reap_orphans

STOP_SECONDS = 5.0  # Slurm kills a cancelled job after KillWait, 30 s or less, and the logs are to be copied then
_POLL_SECONDS = 0.25
_LAST_LINE_SECONDS = 1.0  # for what Ray printed before it ended and nobody has read yet


def start_command(node: Node) -> list[str]:
    """Return the `ray start` of this node, with everything that the job has decided."""
    ports = ray_ports()
    address = own_address()
    gpus = node.units if count_gpus() else 0
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(("--head", "--include-dashboard=false") if node.is_head else (f"--address={node.head}:{ports.gcs}",)),
        *((f"--node-ip-address={address}",) if address else ()),
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
