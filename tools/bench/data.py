"""`python -m tools.bench.data`: the speed of split, fill and validate, compared with plain commands on generated files.

Splitting copies and hashes a file, so it is compared with `cat` into a file and `sha256sum` together; the ratio to a
`cat` that writes nothing is printed too. Filling and validating on all cores are compared with one process. Each round
runs every command once; the files are in the page cache. CPU seconds depend least on other work on the machine. The
peak of a command is the sum of the peak memory of its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from recipes.errors import RecipeError, RunError
from recipes.files import write_atomically
from tools.bench.verdict import (
    FILL_LIMIT,
    FILL_MEMORY_LIMIT,
    SPLIT_LIMIT,
    VALIDATE_LIMIT,
    Check,
    load_warning,
    machine,
    median_ratio,
    table,
)
from tools.data.files.parallel import num_cores
from tools.processes import descendants

AGENTS = ("math_with_judge_simple_agent", "mcqa_simple_agent", "reasoning_gym_simple_agent")
NUM_QUESTIONS = 5_000
PATTERN_BYTES = 4 << 20  # the large file repeats rows of so many bytes
VAL_ROWS = 100
CAT, READ, SHA, SPLIT = "cat into a file", "cat", "sha256sum", "split"
FILL, PART, VALIDATE = "fill", "fill of a part", "validate"
SAMPLE_SECONDS = 0.1  # between two readings of the memory of a command
PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """A file that a command reads."""

    name: str
    num_bytes: int
    num_rows: int


@dataclass(slots=True, kw_only=True)
class Case:
    """One command on one file; every round adds its seconds."""

    name: str
    file: RowFile
    command: str  # for bash, in the directory of the files
    workers: int = 1
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # one value per round, too
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)

    def run(self, place: Path) -> None:
        """Run the command once, after the outputs of earlier commands are removed and all writes are on the disk."""
        for name in ("copy", "split", "filled.jsonl", "filled.jsonl.manifest.json"):
            subprocess.run(["rm", "-rf", name], cwd=place, check=True)
        os.sync()
        env = {**os.environ, "DATA_WORKERS": str(self.workers)}
        start = time.perf_counter()
        with subprocess.Popen(["bash", "-euc", self.command], cwd=place, env=env) as process:
            peak = peak_until_end(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            self.seconds.append(time.perf_counter() - start)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log = (place / "log").read_text(encoding="utf-8")[-2000:]
            raise RunError(f"`{self.command}` ended with status {process.returncode}: {log}")
        self.cpu_seconds.append(usage.ru_utime + usage.ru_stime)
        self.peak_bytes = max(self.peak_bytes, peak)


def peak_until_end(root: int) -> int:
    """Wait for the end of a process; return the sum of the peak memory of it and its descendants, in bytes."""
    peaks: dict[int, int] = {}
    end = os.pidfd_open(root)
    try:
        while not select.select([end], [], [], SAMPLE_SECONDS)[0]:
            for process in (root, *descendants(root)):
                with suppress(OSError):  # it has ended
                    if found := PEAK.search(Path(f"/proc/{process}/status").read_text(encoding="utf-8")):
                        peaks[process] = int(found[1]) * 1024
    finally:
        os.close(end)
    return sum(peaks.values())


def make_row(number: int, rng: Random, words: Sequence[str]) -> bytes:
    """Return one valid row of a few kilobytes; `number` makes it unique."""
    agent = AGENTS[number % len(AGENTS)]
    text = " ".join(rng.choices(words, k=rng.choice((70, 280, 850))))
    fields: dict[str, object] = {"question": "q", "expected_answer": "1"}
    if agent.startswith("mcqa"):
        fields = {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B"}
    elif agent.startswith("reasoning"):
        fields = {"question": "q", "answer": "1", "metadata": {"source_dataset": "chain_sum"}}
    request = {"input": [{"role": "user", "content": f"{number}: {text}"}]}
    row = {"responses_create_params": request, "agent_ref": {"type": "responses_api_agents", "name": agent}, **fields}
    return json.dumps(row).encode() + b"\n"


def make_placeholder(number: int) -> bytes:
    """Return one placeholder row."""
    reference = {"row": number % NUM_QUESTIONS, "question_template": "Solve it: {question}"}
    row = {"dataset": "bench", "agent_ref": {"name": AGENTS[0]}, "n": number, "_hf_placeholder": reference}
    return json.dumps(row).encode() + b"\n"


def write_rows(path: Path, num_bytes: int, *, seed: int, placeholder_every: int = 0) -> RowFile:
    """Write valid rows of random words; every `placeholder_every`-th one is a placeholder row."""
    rng = Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(4000)]
    size = number = 0
    with path.open("wb") as file:
        while size < num_bytes:
            is_placeholder = placeholder_every and number % placeholder_every == 0
            size += file.write(make_placeholder(number) if is_placeholder else make_row(number, rng, words))
            number += 1
    return RowFile(name=path.name, num_bytes=size, num_rows=number)


def repeat_rows(source: Path, path: Path, num_bytes: int) -> RowFile:
    """Write the first rows of `source` again and again, until the file has `num_bytes`."""
    with source.open("rb") as file:
        pattern = file.read(PATTERN_BYTES)
    pattern = pattern[: pattern.rindex(b"\n") + 1]
    repeats = -(-num_bytes // len(pattern))
    with path.open("wb") as file:
        for _ in range(repeats):
            file.write(pattern)
    return RowFile(name=path.name, num_bytes=repeats * len(pattern), num_rows=repeats * pattern.count(b"\n"))


def make_cases(place: Path, *, large_bytes: int, small_bytes: int) -> list[Case]:
    """Write the files of the bench; return the commands to measure."""
    rows = write_rows(place / "rows.jsonl", small_bytes, seed=0)
    blend = write_rows(place / "blend.jsonl", small_bytes, seed=1, placeholder_every=5)
    write_rows(place / "val.jsonl", 200_000, seed=2)
    large = repeat_rows(place / "rows.jsonl", place / "large.jsonl", large_bytes)
    large_blend = repeat_rows(place / "blend.jsonl", place / "large_blend.jsonl", large_bytes)
    record = {"prompt": [{"content": "What? " * 100}], "reward_model": {"ground_truth": "1"}}
    (place / "source.jsonl").write_text((json.dumps(record) + "\n") * NUM_QUESTIONS, encoding="utf-8")
    source = {"path": "source.jsonl", "style": "skywork", "question": ["prompt", 0, "content"]}
    source["answer"] = ["reward_model", "ground_truth"]
    (place / "sources.yaml").write_text(json.dumps({"sources": {"bench": source}}), encoding="utf-8")  # JSON is YAML

    python = f"{shlex.quote(sys.executable)} -m tools."
    split = f"{python}data.split --in large.jsonl --out-dir split --val-rows {VAL_ROWS} >log 2>&1"
    fill_all, fill_part = (
        f"{python}data.fill --in {file.name} --out filled.jsonl --sources sources.yaml >log 2>&1"
        for file in (large_blend, blend)
    )
    validate = f"{python}data.rows.validate --train rows.jsonl --val val.jsonl >log 2>&1"
    head = f"head -n -{VAL_ROWS} large.jsonl >split/t"
    tail = f"tail -n {VAL_ROWS} large.jsonl >split/v"
    counts = sorted({1, num_cores()})
    return [
        Case(name=CAT, file=large, command="cat large.jsonl >copy"),
        Case(name=READ, file=large, command="cat large.jsonl >/dev/null"),
        Case(name=SHA, file=large, command="sha256sum large.jsonl >log"),
        Case(name="head and tail", file=large, command=f"mkdir split && {head} && {tail}"),
        Case(name=SPLIT, file=large, command=split),
        *(Case(name=with_workers(FILL, n), file=large_blend, command=fill_all, workers=n) for n in counts),
        Case(name=PART, file=blend, command=fill_part, workers=counts[-1]),
        *(Case(name=with_workers(VALIDATE, n), file=rows, command=validate, workers=n) for n in counts),
    ]


def with_workers(name: str, count: int) -> str:
    """Return the name of a command with a number of processes."""
    return f"{name}, {count} processes"


def make_checks(cases: Sequence[Case]) -> list[Check]:
    """Return every ratio that has a limit. With one core, several processes are not compared with one."""
    seconds = {case.name: case.seconds for case in cases}
    plain, read = ([a + b for a, b in zip(seconds[cat], seconds[SHA], strict=True)] for cat in (CAT, READ))
    note = f"; over a {READ} that writes nothing {median_ratio(read, seconds[SPLIT]):.2f}"
    checks = [_speed_check(f"{SPLIT} over {CAT} and {SHA}", plain, seconds[SPLIT], SPLIT_LIMIT, note)]
    cores = num_cores()
    if cores == 1:
        return checks
    for name, limit in ((FILL, FILL_LIMIT), (VALIDATE, VALIDATE_LIMIT)):
        one, all_cores = (seconds[with_workers(name, count)] for count in (1, cores))
        checks.append(_speed_check(f"{with_workers(name, cores)} over one", one, all_cores, limit))
    part, whole = (next(case for case in cases if case.name == name) for name in (PART, with_workers(FILL, cores)))
    checks.append(
        Check(
            name=f"memory of {part.name} over all",
            ratio=part.peak_bytes / whole.peak_bytes,
            limit=FILL_MEMORY_LIMIT,
            detail=f"{part.peak_bytes / 2**20:.0f} MiB -> {whole.peak_bytes / 2**20:.0f} MiB",
        )
    )
    return checks


def _speed_check(name: str, over: Sequence[float], under: Sequence[float], limit: float, note: str = "") -> Check:
    detail = f"{statistics.median(over):.2f} s -> {statistics.median(under):.2f} s{note}"
    return Check(name=name, ratio=median_ratio(over, under), limit=limit, detail=detail)


def costs(cases: Sequence[Case]) -> str:
    """Return one line per command."""
    lines = [f"{'command':<26} {'file':>9} {'seconds':>8} {'CPU':>6} {'MB/s':>7} {'rows/s':>10} {'peak':>8}"]
    for case in cases:
        rate, rows = case.file.num_bytes / case.median / 1e6, case.file.num_rows / case.median
        size = f"{case.file.num_bytes / 1e6:.0f} MB"
        lines.append(
            f"{case.name:<26} {size:>9} {case.median:8.2f} {statistics.median(case.cpu_seconds):6.2f}"
            f" {rate:7.0f} {rows:10,.0f} {case.peak_bytes / 2**20:4.0f} MiB"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the bench: 0 when every limit is kept, 1 when one is not or a command failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.data", description=__doc__)
    parser.add_argument("--large-mb", type=int, default=2000, help="MB of the files to split and fill")
    parser.add_argument("--small-mb", type=int, default=200, help="MB of the files to validate")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each command")
    parser.add_argument("--place", type=Path, default=Path("build"), help="directory for the files")
    parser.add_argument("--out", type=Path, default=Path("results/bench_data.json"), help="JSON file of the result")
    args = parser.parse_args(argv)
    found = machine()
    args.place.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=args.place, prefix="bench-data-") as name:
            cases = make_cases(Path(name), large_bytes=args.large_mb * 10**6, small_bytes=args.small_mb * 10**6)
            for _ in range(args.rounds):
                for case in cases:
                    case.run(Path(name))
    except RecipeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    checks = make_checks(cases)
    print(f"{table(checks, ())}\n\n{costs(cases)}")
    result = {
        "machine": found,
        "checks": [{**asdict(check), "is_kept": check.is_kept} for check in checks],
        "cases": [asdict(case) for case in cases],
    }
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())
    if warning := load_warning(found):
        print(f"bench: {warning}")
    return 0 if all(check.is_kept for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
