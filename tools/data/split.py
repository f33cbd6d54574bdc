"""Split a blend into training and validation: the last rows are for validation, and the order is kept.

    python -m tools.data.split --in rows.jsonl --out-dir data/rlvr1 [--val-rows 100] [--test-rows 0] [--stratify agent]

Writes train-split.jsonl, val-split.jsonl and manifest.json; the splits are those of `head -n -100` and `tail -n 100`.
Blends are sorted by difficulty, so their last rows are no fair sample: the printed table shows how the agents' shares
differ. With `--stratify agent` each agent gives its own last rows, in proportion. With `--test-rows` the rows before
those for validation become test-split.jsonl, so that validation stays what it is. The file is read once, while it is
copied, hashed and checked: an empty line, a NUL byte or invalid UTF-8 is refused with its line.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer
from tools.command_line import exit_status, positive
from tools.data.files.manifest import (
    TOOL_VERSION,
    changes,
    describe,
    differences,
    lineage_of,
    manifest_of,
    read_manifest,
    write_manifest,
)
from tools.data.files.row_blocks import (
    TEST,
    TRAIN,
    VALIDATION,
    FileTotals,
    Lines,
    changed,
    read_blocks,
    read_lines,
    require_file,
    require_objects,
    start_of_last_lines,
)
from tools.locks import only_one

NAMES = {TRAIN: "train", TEST: "test", VALIDATION: "validation"}
DEFAULT_VAL_ROWS = 100
MAX_BLOCKS = 3  # blocks that wait to be hashed or written
LINES_AT_ONCE = 256  # lines per block of a stratified split


def split(
    rows_file: Path, out_dir: Path, *, val_rows: int = DEFAULT_VAL_ROWS, test_rows: int = 0, stratify: bool = False
) -> dict[str, Any]:
    """Write the splits and the manifest unless they are up to date; return the manifest."""
    require_file(rows_file, fix="give --in the filled blend")
    require_objects(rows_file)
    manifest_file = out_dir / "manifest.json"
    origin = lineage_of(manifest_of(rows_file))
    facts = {"made_by": origin} if origin else {}
    rule = "last rows of each agent" if stratify else "last rows"
    known = {
        "tool": "split",
        "tool_version": TOOL_VERSION,
        "parameters": {"val_rows": val_rows, "validation": rule} | ({"test_rows": test_rows} if test_rows else {}),
    }
    reasons = _reasons(manifest_file, known, rows_file, facts)
    if not reasons:
        print(f"split: {out_dir} is up to date")
        return read_manifest(manifest_file) or known
    held_out = (test_rows, val_rows) if test_rows else (val_rows,)  # in the order of the file
    files = (TRAIN, TEST, VALIDATION) if test_rows else (TRAIN, VALIDATION)
    parts = _parts(rows_file, held_out, stratify=stratify)
    with only_one(out_dir / ".split.lock"):
        whole, totals = _write(parts, [out_dir / name for name in files], manifest_file, is_prefix=not stratify)
        if not test_rows:
            (out_dir / TEST).unlink(missing_ok=True)  # of an earlier split: its rows may be for training now
        if whole.size != rows_file.stat().st_size:
            raise changed(rows_file)
        source = {key: value for key, value in whole.as_output(rows_file).items() if key != "rows"} | facts
        outputs = [part.as_output(out_dir / name) for name, part in zip(files, totals, strict=True)]
        agents = {NAMES[name]: part.rows_by_agent() for name, part in zip(files, totals, strict=True)}
        manifest = {**known, "inputs": [source], "outputs": outputs, "agents": agents}
        write_manifest(manifest_file, manifest)
    tested = f", {totals[1].rows} to test" if test_rows else ""
    counts = f"{totals[0].rows} rows to train on{tested}, {totals[-1].rows} to validate"
    print(f"split: {out_dir} ({', '.join(reasons)}): {counts}")
    print(compare(agents["train"], agents["validation"]))
    return manifest


def _reasons(manifest_file: Path, known: Mapping[str, Any], rows_file: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return why the split must be made again; the input is hashed only when its size is unchanged."""
    if reasons := changes(manifest_file, known):
        return reasons
    inputs = (read_manifest(manifest_file) or {}).get("inputs")
    size = inputs[0].get("bytes") if isinstance(inputs, list) and len(inputs) == 1 else None
    if size != rows_file.stat().st_size:
        return [f"inputs changed: {rows_file.name}.bytes was {size}, is {rows_file.stat().st_size}"]
    found = differences(inputs, [describe(rows_file, **facts)])
    return [f"inputs changed: {'; '.join(found)}"] if found else []


def _parts(rows_file: Path, held_out: Sequence[int], *, stratify: bool) -> Iterator[tuple[Lines, int, int]]:
    """Return (block, number of lines, which part it belongs to; 0 is for training) in file order.

    `held_out` has the rows of the parts after training. Raises `DataError` when no row would be left to train on.
    """
    cuts = [start_of_last_lines(rows_file, sum(held_out[part:])) for part in range(len(held_out))]
    if cuts[0] is None:
        total = sum(1 for _ in read_lines(rows_file))
        what, fix = "for validation", "lower --val-rows"
        if len(held_out) > 1:
            what, fix = "for test and validation", "lower --test-rows or --val-rows"
        got, expected = f"{total} rows", f"more than the {sum(held_out)} rows {what}"
        raise DataError(Problem(where=str(rows_file), got=got, expected=expected, fix=fix))
    if stratify:
        return _by_agent(rows_file, held_out)
    return read_blocks(rows_file, cuts=[cut for cut in cuts if cut is not None], num_buffers=MAX_BLOCKS + 1)


def _write(
    parts: Iterator[tuple[Lines, int, int]], files: Sequence[Path], manifest_file: Path, *, is_prefix: bool
) -> tuple[FileTotals, list[FileTotals]]:
    """Copy each block to the file of its part; return the totals of the input and of each file.

    `is_prefix` says that all training rows come first: the hash of training is then the input's hash at the cut.
    """
    whole, totals = FileTotals(), [FileTotals() for _ in files]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(atomic_writer(file, is_durable=False)) for file in files]
        background = stack.enter_context(BackgroundWriter())
        for block, num_lines, part in parts:
            if is_prefix and part and not totals[0].size:
                background.wait()
                totals[0] = whole.copy()
            counted = [whole] if is_prefix and not part else [whole, totals[part]]
            background.hash_and_write(block, counted, writers[part])
            for content in counted:
                content.count(block, num_lines)
        background.wait()
        manifest_file.unlink(missing_ok=True)  # until the new manifest is written, the splits do not count as complete
    return whole, totals


class BackgroundWriter:
    """One thread that hashes blocks and one that writes them, while the caller counts their rows."""

    def __init__(self) -> None:
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[Future[Any]] = deque()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._writer.shutdown()

    def hash_and_write(self, block: Lines, contents: Sequence[FileTotals], rows: BinaryIO) -> None:
        """Queue one block, and wait until at most `MAX_BLOCKS` blocks are queued."""
        self._pending.append(self._hasher.submit(self._hash, block, contents))
        self._pending.append(self._writer.submit(rows.write, block))
        self.wait(2 * MAX_BLOCKS)

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` jobs are unfinished; raises what a job raised."""
        while len(self._pending) > left:
            self._pending.popleft().result()

    @staticmethod
    def _hash(block: Lines, contents: Sequence[FileTotals]) -> None:
        for content in contents:
            content.sha256.update(block)


def _by_agent(path: Path, held_out: Sequence[int]) -> Iterator[tuple[Lines, int, int]]:
    """Yield (block, number of lines, part); the last part gets the last rows of each agent, the one before the next."""
    rows: dict[str, list[int]] = defaultdict(list)
    for number, line in read_lines(path):
        rows[_agent_of(path, number, line)].append(number)
    part_of: dict[int, int] = {}
    for part in range(len(held_out), 0, -1):
        quotas = share_out(held_out[part - 1], {agent: len(numbers) for agent, numbers in rows.items()})
        for agent, numbers in rows.items():
            kept = len(numbers) - quotas[agent]
            part_of |= dict.fromkeys(numbers[kept:], part)
            del numbers[kept:]
    for part, lines in itertools.groupby(read_lines(path), key=lambda line: part_of.get(line[0], 0)):
        block: list[bytes] = []
        for _, line in lines:
            block.append(line)
            if len(block) >= LINES_AT_ONCE:
                yield b"".join(block), len(block), part
                block = []
        if block:
            yield b"".join(block), len(block), part


def _agent_of(path: Path, number: int, line: bytes) -> str:
    try:
        return str(orjson.loads(line)["agent_ref"]["name"])
    except (ValueError, TypeError, KeyError) as error:
        wrong = f"the row has no readable agent_ref.name ({type(error).__name__}: {error})"
        raise DataError(Problem(where=f"{path}:{number}", wrong=wrong, fix="correct or remove the row")) from error


def share_out(total: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many of `total` rows each agent gives, in proportion to its rows, by the largest remainder.

    Each agent keeps at least one row for training, as long as other agents can give the rows instead.
    """
    rows = sum(counts.values())
    quotas = {agent: total * count // rows for agent, count in counts.items()}
    order = sorted(counts, key=lambda agent: (-(total * counts[agent] % rows), agent))
    for kept in (1, 0):
        while missing := total - sum(quotas.values()):
            able = [agent for agent in order if quotas[agent] + kept < counts[agent]][:missing]
            if not able:
                break
            for agent in able:
                quotas[agent] += 1
    return quotas


def compare(train: Mapping[str, int], validation: Mapping[str, int]) -> str:
    """Return a table of the agents' shares of training and validation, and how they differ."""
    totals = (max(1, sum(train.values())), max(1, sum(validation.values())))
    lines = [f"  {'agent':<44} {'train':>8} {'':>6} {'val':>6} {'':>6}  val - train"]
    for agent in sorted({*train, *validation}):
        counts = Counter(train)[agent], Counter(validation)[agent]
        shares = [100 * count / whole for count, whole in zip(counts, totals, strict=True)]
        note = "  not in validation" if not counts[1] else "  not in training" if not counts[0] else ""
        lines.append(
            f"  {agent:<44} {counts[0]:>8} {shares[0]:>5.1f}% {counts[1]:>6} {shares[1]:>5.1f}%"
            f"  {shares[1] - shares[0]:+.1f}{note}"
        )
    return "\n".join(lines)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.split", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in", dest="rows", type=Path, required=True, help="JSONL file without placeholders")
    parser.add_argument("--out-dir", type=Path, required=True, help="directory of the two splits")
    parser.add_argument(
        "--val-rows", type=positive, default=DEFAULT_VAL_ROWS, help="number of the last rows to hold out"
    )
    parser.add_argument("--test-rows", type=positive, default=0, help="rows before those to hold out as well")
    parser.add_argument("--stratify", choices=["agent"], help="hold out the last rows of each agent, in proportion")
    options = parser.parse_args(arguments)
    split(
        options.rows,
        options.out_dir,
        val_rows=options.val_rows,
        test_rows=options.test_rows,
        stratify=options.stratify is not None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
