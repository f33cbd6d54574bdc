"""The cost of starting a job on 64 or 183 nodes, measured without the nodes: controller calls, barrier time, logs.

    python -m tools.bench.bring_up_cost [--nodes 64 183]

It starts a real Ray head on this machine with the settings for that many nodes. For each worker of the job a light node
registers with the head's GCS, all at once; light nodes speak the control protocol and do nothing else. Then the barrier
of a real job waits for all of them. The output separates measured from assumed numbers.

    who                 asks whom           what, how often
    sbatch, 3 x srun    slurmctld           CONTROLLER_CALLS in all: one step for all workers, whatever their number
    srun                slurmds             a tree of launches; at 183 nodes the last one began after 3 s on two cores
    a worker            the head's port     4 connects per second until it listens
    a raylet            GCS                 registers once; then reports resources
    GCS                 raylets             health checks and loads, see the table that the command prints
    the barrier         GCS                 the list of nodes, 4 times per second, from one process
    the barrier         driver.log          one line per node that joined, and per sandbox

tests/functional/test_bringup.py counts the calls to a real slurmctld at 2 and at 64 nodes: their number and kinds are
the same, as they were by hand with 183 slurmds on two cores. Slurm's own messages are not counted: at the end of a job
each node sends MESSAGE_EPILOG_COMPLETE.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

from recipes.cluster.tuning import ray_environment
from recipes.errors import RunError
from tools.command_line import exit_status
from tools.job.barrier import Nodes, Timeline, wait_for_nodes

CONTROLLER_CALLS = 13  # without containers and sandbox: 3 for each of 3 steps, submission, 2 queries, end
NODE_LOG_BYTES = 1264  # ray_worker_NODE.log of a healthy node, measured on the two-node test cluster
RAY_LOG_BYTES, RAY_LOG_FILES = 81211, 19  # ray_NODE, copied from each node when the job ends; the same cluster
GPUS_PER_NODE, CORES_PER_NODE = 8, 112
_STEADY_SECONDS = 10.0
_DEADLINE_SECONDS = 120.0
_ATTEMPT_SECONDS = 300.0  # for one cluster, from its head to its figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements with one number of nodes."""

    num_nodes: int
    register_seconds: float  # for all light nodes at once, until GCS has answered the last
    barrier_seconds: float  # from the barrier's connection to the head until it has seen the last node
    poll_seconds: float  # of one request for the list of nodes
    reply_bytes: int  # of its answer
    barrier_log_bytes: int
    checks_per_second: float  # health checks from GCS, all nodes together
    loads_per_second: float  # requests for the load


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Assumed numbers, which nothing on this machine can measure; each field is an option of the command."""

    slurm_seconds: float = (
        4.0  # from the submission until the last node's program runs; 3.9 s at 183 nodes on two cores
    )
    image_gb: float = 3.0  # read by each node from its container image before Python runs
    file_system_gb_per_second: float = 50.0  # for all nodes together
    ray_seconds: float = 10.0  # from Python's start until a node has registered; 8 s on two cores for two nodes


def measure(num_nodes: int) -> Figures:
    """Measure one number of nodes in a process of its own; raises `RunError` when that fails."""
    return Figures(**beside_head("tools.bench.bring_up_cost", num_nodes))


def beside_head(module: str, num_nodes: int, *options: str) -> dict[str, Any]:
    """Run a module beside a Ray head for that many nodes; returns what it writes to its file --inside, JSON."""
    with tempfile.TemporaryDirectory(prefix="bringup-") as directory:
        out = Path(directory) / "figures.json"
        inside = (sys.executable, "-m", module, "--inside", str(out), "--nodes", str(num_nodes), *options)
        command = (
            *(sys.executable, "-m", "tools.job.local", f"--run-dir={directory}/run"),
            *(f"--num-units={GPUS_PER_NODE}", "--", *inside),
        )
        env = ray_environment(num_nodes, os.cpu_count() or 1) | os.environ
        try:
            done = subprocess.run(
                command,
                env=env,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_ATTEMPT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise RunError(f"bring-up of {num_nodes} nodes was not measured within {_ATTEMPT_SECONDS:g} s") from late
        if done.returncode:
            raise RunError(f"bring-up of {num_nodes} nodes failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


class LightNodes:
    """Nodes that register with a GCS and answer its health checks; one server answers for all of them."""

    def __init__(self, address: str, token: str) -> None:
        # Imported here: `make plan` on a login node has no Ray.
        from ray.core.generated import gcs_service_pb2_grpc

        grpc: Any = importlib.import_module("grpc")  # has no types
        self.asked: Counter[str] = Counter()  # number of requests by method
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        self._server.add_generic_rpc_handlers((self._handler(grpc),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(address)
        self._gcs = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(self._channel)

    def _handler(self, grpc: Any) -> Any:
        asked = self.asked

        class Raylet(grpc.GenericRpcHandler):  # type: ignore[misc]
            """Answers health checks; every other method is not implemented."""

            def service(self, details: Any) -> Any:
                asked[details.method.rsplit("/", 1)[-1]] += 1
                if not details.method.endswith("Health/Check"):
                    return None
                return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x08\x01")  # SERVING

        return Raylet()

    def register(self, names: Sequence[str], units: int = GPUS_PER_NODE) -> float:
        """Register all nodes at once; return the seconds until GCS has answered the last."""
        start = time.monotonic()
        with ThreadPoolExecutor(max_workers=64) as pool:
            list(pool.map(self._register, names, [units] * len(names)))
        return time.monotonic() - start

    def _register(self, name: str, units: int) -> None:
        from ray.core.generated import gcs_pb2, gcs_service_pb2

        info = gcs_pb2.GcsNodeInfo(
            node_id=secrets.token_bytes(28),
            node_manager_address="127.0.0.1",
            node_manager_port=self._port,
            object_manager_port=self._port,
            node_manager_hostname=name,
            node_name=name,
            state=gcs_pb2.GcsNodeInfo.ALIVE,
            start_time_ms=int(time.time() * 1000),
        )
        resources = {"worker_units": units, "GPU": units, "CPU": CORES_PER_NODE}
        for resource, count in resources.items():
            info.resources_total[resource] = float(count)
        request = gcs_service_pb2.RegisterNodeRequest(node_info=info)
        self._gcs.RegisterNode(request, metadata=self._metadata, timeout=_DEADLINE_SECONDS)

    def reply_bytes(self) -> int:
        """Return the size of the answer to the barrier's request."""
        from ray.core.generated import gcs_service_pb2

        request = gcs_service_pb2.GetAllNodeInfoRequest()
        reply = self._gcs.GetAllNodeInfo(request, metadata=self._metadata, timeout=_DEADLINE_SECONDS)
        return int(reply.ByteSize())

    def close(self) -> None:
        """Stop the server."""
        self._channel.close()
        self._server.stop(None).wait()


def measure_inside(num_nodes: int) -> Figures:
    """Measure with the head at RAY_ADDRESS."""
    import ray

    address = os.environ["RAY_ADDRESS"]
    nodes = LightNodes(address, os.environ["RAY_AUTH_TOKEN"])
    try:
        names = [f"node{number:03d}" for number in range(1, num_nodes)]
        registered = nodes.register(names)
        said = StringIO()
        start = time.monotonic()
        with redirect_stdout(said):
            timeline = Timeline(job_start=time.time())
            everyone = [socket.gethostname(), *names]
            waiting = Nodes(everyone, 0, Path(os.devnull), start + _DEADLINE_SECONDS, grace_seconds=0.0)
            wait_for_nodes(address, waiting, GPUS_PER_NODE, timeline)
        waited = time.monotonic() - start
        if missing := waiting.missing:
            raise RunError(f"{len(missing)} of {num_nodes} nodes are missing: {', '.join(missing[:5])}")
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        start = time.monotonic()
        for _ in range(20):
            ray.nodes()
        poll = (time.monotonic() - start) / 20
        before = Counter(nodes.asked)
        time.sleep(_STEADY_SECONDS)
        gained = nodes.asked - before
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        if alive != num_nodes:
            raise RunError(f"{num_nodes - alive} of {num_nodes} nodes were given up by the head")
        return Figures(
            num_nodes=num_nodes,
            register_seconds=registered,
            barrier_seconds=waited,
            poll_seconds=poll,
            reply_bytes=nodes.reply_bytes(),
            barrier_log_bytes=len(said.getvalue()),
            checks_per_second=gained["Check"] / _STEADY_SECONDS,
            loads_per_second=gained["GetResourceLoad"] / _STEADY_SECONDS,
        )
    finally:
        nodes.close()


def start_seconds(found: Figures, assumed: Assumed) -> float:
    """Return the expected seconds from the submission of a job that starts at once to its driver."""
    image = found.num_nodes * assumed.image_gb / assumed.file_system_gb_per_second
    return assumed.slurm_seconds + image + assumed.ray_seconds + found.register_seconds + found.barrier_seconds


def table(found: Sequence[Figures], assumed: Assumed) -> str:
    """Return the measurements of all sizes side by side."""
    rows = [
        ("nodes", [f"{one.num_nodes}" for one in found]),
        ("calls to slurmctld", [f"{CONTROLLER_CALLS}" for _ in found]),
        ("all nodes registered with GCS in", [f"{one.register_seconds:.2f} s" for one in found]),
        ("barrier, after all have registered", [f"{one.barrier_seconds:.2f} s" for one in found]),
        ("one poll of the barrier", [f"{1000 * one.poll_seconds:.1f} ms" for one in found]),
        ("its answer", [f"{one.reply_bytes / 1000:.1f} kB" for one in found]),
        ("health checks of GCS", [f"{one.checks_per_second:.0f}/s" for one in found]),
        ("load questions of GCS", [f"{one.loads_per_second:.0f}/s" for one in found]),
        ("barrier's lines in driver.log", [f"{one.barrier_log_bytes / 1000:.1f} kB" for one in found]),
        ("logs of all nodes", [f"{one.num_nodes * NODE_LOG_BYTES / 1000:.0f} kB" for one in found]),
        ("Ray's logs, copied at the end", [f"{one.num_nodes * RAY_LOG_BYTES / 1e6:.1f} MB" for one in found]),
        ("... files", [f"{one.num_nodes * RAY_LOG_FILES:,}" for one in found]),
        ("expected until the driver starts", [f"{start_seconds(one, assumed):.0f} s" for one in found]),
    ]
    lines = [f"{label:<36}" + "".join(f"{cell:>12}" for cell in cells) for label, cells in rows]
    given = ", ".join(f"{name} {value:g}" for name, value in asdict(assumed).items())
    lines += [
        "",
        "Measured here: GCS and barrier, with a real head and light nodes. Counted in tests: calls to slurmctld.",
        "Measured on the two-node test cluster and multiplied: logs, of an idle job; engines write more.",
        f"Assumed, for the last line: {given}.",
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 183], help="numbers of nodes to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # the file to write to
    for field in fields(Assumed):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, default=field.default)
    return parser.parse_args(argv)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size and print the table."""
    args = parse(argv)
    assumed = Assumed(**{field.name: getattr(args, field.name) for field in fields(Assumed)})
    if args.inside:
        args.inside.write_text(json.dumps(asdict(measure_inside(args.nodes[0]))), encoding="utf-8")
        return 0
    found = [measure(num_nodes) for num_nodes in args.nodes]
    print(json.dumps([asdict(one) for one in found], indent=1) if args.json else table(found, assumed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
