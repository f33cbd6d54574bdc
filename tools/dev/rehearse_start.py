"""The start of a job with planted faults: the real barrier and a real Ray head with light nodes; engines on real Ray.

The engines are those of `tools.bench.scale`, which have no model: they are started, watched and started again as in a
run. They are fewer than those of a large stage, as each is a process of this machine.

    python -m tools.dev.rehearse_start --inside FILE --nodes 183      # beside a head; see `beside_head`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from recipes.config.load import load_config, require_valid
from recipes.errors import EngineError, RunError
from tools.bench import scale
from tools.bench.bring_up_cost import GPUS_PER_NODE, LightNodes, beside_head
from tools.job.barrier import NODES_FILE, Nodes, Timeline, note_unusable, wait_for_nodes

MOST_ENGINES, _FEW = 20, 3
_SIMPLEST_JOB = 3  # nodes: with fewer there is none that a fault can hit beside the head and another
_GIVEN_UP = "given up"
_FAULTS = "REHEARSED_FAULTS"  # variable of an engine: the directory with how many of its starts fail
_SHORT, _LONG, _GRACE = 4.0, 120.0, 2.0  # seconds: where the wait must end at its deadline, where before, grace time


@dataclass(frozen=True, slots=True, kw_only=True)
class BringUp:
    """What became of one bring-up."""

    what: str
    expected: str
    got: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether it ended as it must."""
        return self.got == self.expected


def bring_ups(num_nodes: int, num_engines: int, limits: tuple[int, float]) -> list[BringUp]:
    """Start a job of that size, without and with faults; raises `RunError` where Ray does not start.

    `limits` are how often an engine is started in a row, and the share that must be up.
    """
    engines = f"--engines={min(max(num_engines, 2), MOST_ENGINES)}"
    words = (f"--max-starts={limits[0]}", f"--min-share-up={limits[1]}")
    found = beside_head("tools.dev.rehearse_start", num_nodes, engines, *words)
    return [BringUp(**one) for one in found["bring_ups"]]


class _FailingEngine(scale.RandomEngine):
    """Fails in its first starts: as many as `FAULTS` says, which counts them down in a file of the engine."""

    async def start(self) -> Any:
        left = Path(os.environ[_FAULTS]) / str(self._index)
        if left.is_file() and (number := int(left.read_text(encoding="utf-8"))):
            left.write_text(str(number - 1), encoding="utf-8")
            raise EngineError(f"generation engine {self._index}: a planted fault")
        return await super().start()


def engine_starts(num_engines: int, max_starts: int, min_share_up: float) -> list[BringUp]:
    """Start engines of which one fails once and one always; then some that all fail."""
    needed = max(1, math.ceil(round(min_share_up * num_engines, 6)))
    begins = f"begins with {num_engines - 1} of {num_engines}"
    what = "an engine fails its first start, and another one all of them"
    one_fails = _engines_started(
        what,
        begins if num_engines > needed else _GIVEN_UP,
        {0: 1, 1: max_starts},
        num_engines=num_engines,
        limits=(max_starts, min_share_up),
    )
    faults = dict.fromkeys(range(_FEW), max_starts)
    what, limits = "all engines fail in all their starts", (max_starts, min_share_up)
    return [one_fails, _engines_started(what, _GIVEN_UP, faults, num_engines=_FEW, limits=limits)]


def _engines_started(
    what: str, expected: str, faults: Mapping[int, int], *, num_engines: int, limits: tuple[int, float]
) -> BringUp:
    overrides = [
        "policy.model_name=none",
        f"policy.generation.max_starts={limits[0]}",
        f"policy.generation.min_share_up={limits[1]}",
        f"cluster.gpus_per_node={num_engines + 1}",
        f"policy.generation.colocated.resources.gpus_per_node={num_engines}",
    ]
    config = require_valid(load_config(scale.TINY, overrides))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        for engine, number in faults.items():
            (Path(directory) / str(engine)).write_text(str(number), encoding="utf-8")
        generation, _ = scale.begin_engines(config, num_engines, kind=_FailingEngine, env={_FAULTS: directory})
        try:
            generation.starts.wait(_LONG)
            got = f"begins with {num_engines - len(generation.starts.missing())} of {num_engines}"
        except RunError:  # at once when too many have failed for good: others may be on their way
            got = _GIVEN_UP
        generation.shutdown()
    return BringUp(what=what, expected=expected, got=got, seconds=time.monotonic() - began)


def node_bring_ups(num_nodes: int, log_dir: Path) -> list[BringUp]:
    """Bring nodes up beside the head at RAY_ADDRESS."""
    address = os.environ["RAY_ADDRESS"]
    light = LightNodes(address, os.environ["RAY_AUTH_TOKEN"])
    names = [f"node{number:03d}" for number in range(1, num_nodes)]
    everyone, last = [socket.gethostname(), *names], names[-1]

    def brought_up(what: str, expected: str, *, spares: int, seconds: float) -> BringUp:
        began = time.monotonic()
        nodes = Nodes(everyone, spares, log_dir, began + seconds, grace_seconds=_GRACE)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            wait_for_nodes(address, nodes, GPUS_PER_NODE, Timeline(job_start=0.0))
        there = len(everyone) - len(nodes.missing)
        got = f"goes on with {there}" if nodes.suffice else f"given up because of {', '.join(nodes.blamed)}"
        return BringUp(what=what, expected=expected, got=got, seconds=time.monotonic() - began)

    try:
        light.register(names[:-1])
        without, given_up = f"goes on with {num_nodes - 1}", f"given up because of {last}"
        found = [
            brought_up("a node never joins, and none is spare", given_up, spares=0, seconds=_SHORT),
            brought_up("a node never joins, and one is spare", without, spares=1, seconds=_LONG),
        ]
        light.register([last], units=GPUS_PER_NODE - 1)
        what = f"a node joins with {GPUS_PER_NODE - 1} of {GPUS_PER_NODE} GPUs"
        found.append(brought_up(what, given_up, spares=0, seconds=_SHORT))
        os.environ["SLURMD_NODENAME"] = last
        note_unusable(log_dir, ["a port is taken"])
        found.append(brought_up("a node says that it cannot be used", given_up, spares=0, seconds=_LONG))
        (log_dir / f"unusable_{last}").unlink()
        light.register([last])
        found.append(brought_up("all nodes join", f"goes on with {num_nodes}", spares=0, seconds=_LONG))
        return found
    finally:
        light.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Bring nodes up, and write what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", type=Path, required=True, help="file to write")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--engines", type=int, required=True, help="number of engines")
    parser.add_argument("--max-starts", type=int, required=True, help="of one engine in a row")
    parser.add_argument("--min-share-up", type=float, required=True, help="of the engines, for the run to begin")
    args = parser.parse_args(argv)
    import ray

    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        (Path(directory) / NODES_FILE).touch()
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        found = engine_starts(args.engines, args.max_starts, args.min_share_up)
        ray.shutdown()  # before light nodes come, on which no actor can run
        if args.nodes >= _SIMPLEST_JOB:
            found += node_bring_ups(args.nodes, Path(directory))
    args.inside.write_text(json.dumps({"bring_ups": [asdict(one) for one in found]}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
