"""`python -m tools.bench.sandbox`: how many programs a second run in the sandbox, beside plain processes.

Each program prints one line. Both sides start as many at the same time, in turn, and the median of the rounds counts.
On two quiet cores the sandbox should reach 120 programs a second, which is a little less than half of plain processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import Execution
from recipes.environments.sandbox.client import SandboxClient, client_of
from recipes.environments.sandbox.server import SandboxFailedError, SandboxServer
from recipes.files import write_atomically
from tools.bench.verdict import Check, load_warning, machine, median_ratio, table

SANDBOX_LIMIT = 0.45  # of the number of plain processes a second
PROGRAM = "print(6 * 7)"
EXPECTED = "42\n"
PATH = "/usr/local/bin:/usr/bin:/bin"  # where the sandbox finds Python
SECONDS = 60.0  # for one program, on a machine that is not quiet


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return 0 when the limit is kept, 1 when it is not or no sandbox can be started."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.sandbox", description=__doc__)
    parser.add_argument("--programs", type=int, default=400, help="programs of each side in one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each runs both sides once")
    parser.add_argument("--out", type=Path, default=Path("results/bench_sandbox.json"), help="JSON result")
    args = parser.parse_args(argv)
    found = machine()
    try:
        ours, plain = asyncio.run(measure(args.programs, args.rounds))
    except SandboxFailedError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    check = Check(
        name="programs in the sandbox over plain processes",
        ratio=median_ratio(ours, plain),
        limit=SANDBOX_LIMIT,
        detail=f"{statistics.median(plain):.0f} -> {statistics.median(ours):.0f} programs a second",
    )
    print("\n".join([load_warning(found), table([check], [])]).strip())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": found, "check": asdict(check), "sandbox": ours, "plain": plain}
    write_atomically(args.out, json.dumps(result, indent=1).encode())
    return 0 if check.is_kept else 1


async def measure(num_programs: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Return programs a second in the sandbox and as plain processes, one value per round."""
    server, http = SandboxServer(), JsonClient()
    client = client_of({}, server, http)
    ours, plain = [], []
    try:
        await run_in_sandbox(client, server.places)
        for _ in range(num_rounds):
            start = time.perf_counter()
            await run_in_sandbox(client, num_programs)
            middle = time.perf_counter()
            await asyncio.to_thread(run_plainly, num_programs, server.places)
            ours.append(num_programs / (middle - start))
            plain.append(num_programs / (time.perf_counter() - middle))
    finally:
        await http.close()
        server.close()
    return ours, plain


async def run_in_sandbox(client: SandboxClient, num_programs: int) -> None:
    """Run programs in the sandbox; raises `SandboxFailedError` for one that does not print what it should."""
    program = Execution(language="python3", code=PROGRAM, seconds=SECONDS)
    for reply in await client.run([program] * num_programs):
        if reply["stdout"] != EXPECTED:
            raise SandboxFailedError(f"a program of the bench failed: {reply}")


def run_plainly(num_programs: int, at_once: int) -> None:
    """Run programs as processes of this machine's Python."""

    def run(_: int) -> None:
        subprocess.run(["python3", "-I", "-c", PROGRAM], env={"PATH": PATH}, stdout=subprocess.PIPE, check=True)

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(run, range(num_programs)))


if __name__ == "__main__":
    sys.exit(main())
