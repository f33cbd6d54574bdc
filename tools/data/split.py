"""Split a blend into training and validation: the last rows are for validation, and the order is kept.

    python -m tools.data.split --in filled.jsonl --out-dir data/rlvr1 [--val-rows 100] [--stratify agent]

Writes train-split.jsonl, val-split.jsonl and manifest.json; the splits are those of `head -n -100` and `tail -n 100`.
Blends are sorted by difficulty, so their last rows are no fair sample: the printed table shows how the agents' shares
differ. With `--stratify agent` each agent gives its own last rows, in proportion. The file is read once, while it is
copied, hashed and checked: an empty line, a NUL byte or invalid UTF-8 is refused with its line.
"""

from __future__ import annotations

import argparse
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
from tools.files.locks import only_one
from tools.files.manifest import (
    TOOL_VERSION,
    changes,
    describe,
    differences,
    lineage_of,
    manifest_of,
    read_manifest,
    write_manifest,
)
from tools.files.row_blocks import FileTotals, Lines, changed, read_blocks, require_objects, start_of_last_lines
from tools.files.row_files import read_lines, require_file

TRAIN, VALIDATION = "train-split.jsonl", "val-split.jsonl"
DEFAULT_VAL_ROWS = 100
MAX_BLOCKS = 3  # blocks that wait to be hashed or written
LINES_AT_ONCE = 256  # lines per block of a stratified split


def split(
    rows_file: Path, out_dir: Path, *, val_rows: int = DEFAULT_VAL_ROWS, stratify: bool = False
) -> dict[str, Any]:
    """Write both splits and the manifest unless they are up to date; return the manifest."""
    require_file(rows_file, fix="give --in the filled blend")
    require_objects(rows_file)
    manifest_file = out_dir / "manifest.json"
    origin = lineage_of(manifest_of(rows_file))
    facts = {"made_by": origin} if origin else {}
    rule = "last rows of each agent" if stratify else "last rows"
    known = {
        "tool": "split",
        "tool_version": TOOL_VERSION,
        "parameters": {"val_rows": val_rows, "validation": rule},
    }
    reasons = _reasons(manifest_file, known, rows_file, facts)
    if not reasons:
        print(f"split: {out_dir} is up to date")
        return read_manifest(manifest_file) or known
    parts = _parts(rows_file, val_rows, stratify=stratify)
    with only_one(out_dir / ".split.lock"):
        whole, train, validation = _write(parts, out_dir, manifest_file, is_prefix=not stratify)
        if whole.size != rows_file.stat().st_size:
            raise changed(rows_file)
        source = {key: value for key, value in whole.as_output(rows_file).items() if key != "rows"} | facts
        outputs = [train.as_output(out_dir / TRAIN), validation.as_output(out_dir / VALIDATION)]
        agents = {"train": train.rows_by_agent(), "validation": validation.rows_by_agent()}
        manifest = {**known, "inputs": [source], "outputs": outputs, "agents": agents}
        write_manifest(manifest_file, manifest)
    print(f"split: {out_dir} ({', '.join(reasons)}): {train.rows} rows to train on, {validation.rows} to validate")
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


def _parts(rows_file: Path, val_rows: int, *, stratify: bool) -> Iterator[tuple[Lines, int, bool]]:
    """Return (block, number of lines, whether it is for training) in file order.

    Raises `DataError` when no row would be left to train on.
    """
    cut = start_of_last_lines(rows_file, val_rows)
    if cut is None:
        total = sum(1 for _ in read_lines(rows_file))
        got, expected = f"{total} rows", f"more than the {val_rows} rows for validation"
        raise DataError(Problem(where=str(rows_file), got=got, expected=expected, fix="lower --val-rows"))
    if stratify:
        return _by_agent(rows_file, val_rows)
    return read_blocks(rows_file, end_of_first=cut, num_buffers=MAX_BLOCKS + 1)


def _write(
    parts: Iterator[tuple[Lines, int, bool]], out_dir: Path, manifest_file: Path, *, is_prefix: bool
) -> tuple[FileTotals, FileTotals, FileTotals]:
    """Copy each block to its split; return the totals of the input, of training and of validation.

    `is_prefix` says that all training rows come first: the hash of training is then the input's hash at the cut.
    """
    whole, train, validation = FileTotals(), FileTotals(), FileTotals()
    files = [atomic_writer(out_dir / name, is_durable=False) for name in (TRAIN, VALIDATION)]
    with files[0] as train_rows, files[1] as validation_rows, BackgroundWriter() as background:
        for block, num_lines, is_training in parts:
            if is_prefix and not is_training and not validation.size:
                background.wait()
                train = whole.copy()
            part, rows = (train, train_rows) if is_training else (validation, validation_rows)
            counted = [whole] if is_prefix and is_training else [whole, part]
            background.hash_and_write(block, counted, rows)
            for content in counted:
                content.count(block, num_lines)
        background.wait()
        manifest_file.unlink(missing_ok=True)  # until the new manifest is written, the splits do not count as complete
    return whole, train, validation


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


def _by_agent(path: Path, val_rows: int) -> Iterator[tuple[Lines, int, bool]]:
    """Yield (block, number of lines, whether it is for training); validation gets the last rows of each agent."""
    rows: dict[str, list[int]] = defaultdict(list)
    for number, line in read_lines(path):
        rows[_agent_of(path, number, line)].append(number)
    quotas = share_out(val_rows, {agent: len(numbers) for agent, numbers in rows.items()})
    held_out = {number for agent, numbers in rows.items() for number in numbers[len(numbers) - quotas[agent] :]}
    for is_training, lines in itertools.groupby(read_lines(path), key=lambda line: line[0] not in held_out):
        block: list[bytes] = []
        for _, line in lines:
            block.append(line)
            if len(block) >= LINES_AT_ONCE:
                yield b"".join(block), len(block), is_training
                block = []
        if block:
            yield b"".join(block), len(block), is_training


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
    parser.add_argument("--stratify", choices=["agent"], help="hold out the last rows of each agent, in proportion")
    options = parser.parse_args(arguments)
    split(options.rows, options.out_dir, val_rows=options.val_rows, stratify=options.stratify is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
