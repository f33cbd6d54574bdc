"""The data bench: its files are valid rows of the size asked for, its ratio is that of each round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes.errors import RunError
from tools.bench import data
from tools.bench.data import CAT, READ, SHA, SPLIT, Case, RowFile, costs, make_cases, make_checks
from tools.data.rows.validate import validate

FILE = RowFile(name="f", num_bytes=10_000_000, num_rows=1000)


def case(name: str, *seconds: float, peak: int = 0) -> Case:
    return Case(name=name, file=FILE, command="true", seconds=list(seconds), cpu_seconds=[1.5], peak_bytes=peak)


def test_every_ratio_is_the_median_of_the_rounds_own_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "num_cores", lambda: 4)
    cases = [
        case(CAT, 1.0, 1.0, 1.0),
        case(READ, 0.0, 1.0, 1.0),
        case(SHA, 1.0, 3.0, 2.0),
        case(SPLIT, 1.0, 2.0, 10.0),
        case("fill, 1 processes", 4.0, 5.0, 6.0),
        case("fill, 4 processes", 2.0, 4.0, 6.0, peak=400 << 20),
        case("fill of a part", 1.0, peak=300 << 20),
        case("validate, 1 processes", 9.0),
        case("validate, 4 processes", 3.0),
    ]
    split, fill, validate, memory = make_checks(cases)
    assert split.ratio == 2.0  # of 2.0, 2.0 and 0.3
    assert split.detail == "3.00 s -> 2.00 s; over a cat that writes nothing 1.00"
    assert (fill.ratio, fill.is_kept) == (1.25, True)  # of 2.0, 1.25 and 1.0
    assert (validate.ratio, validate.is_kept) == (3.0, True)
    assert (memory.ratio, memory.is_kept, memory.detail) == (0.75, False, "300 MiB -> 400 MiB")
    assert costs(cases).splitlines()[4].split()[1:6] == ["10", "MB", "2.00", "1.50", "5"]
    monkeypatch.setattr(data, "num_cores", lambda: 1)
    assert make_checks(cases) == [split]


def test_a_peak_is_the_sum_over_the_processes_of_a_command(tmp_path: Path) -> None:
    hold = f"{sys.executable} -c 'import time; held = b\"x\" * (100 << 20); time.sleep(1)'"
    held = Case(name="x", file=FILE, command=f"{hold} & {hold}; wait")
    held.run(tmp_path)
    assert 200 << 20 < held.peak_bytes < 280 << 20


def test_the_files_are_what_the_tools_read(tmp_path: Path) -> None:
    cases = make_cases(tmp_path, large_bytes=300_000, small_bytes=200_000)
    sizes = {case.file.name: case.file for case in cases}
    assert {name: (tmp_path / name).stat().st_size for name in sizes} == {n: f.num_bytes for n, f in sizes.items()}
    assert {name: (tmp_path / name).read_bytes().count(b"\n") for name in sizes} == {
        n: f.num_rows for n, f in sizes.items()
    }
    assert sizes["large.jsonl"].num_bytes >= 300_000
    assert validate(tmp_path / "rows.jsonl", tmp_path / "val.jsonl", None).findings == []


def test_a_command_that_fails_ends_the_bench(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("what went wrong", encoding="utf-8")
    with pytest.raises(RunError, match="ended with status 3: what went wrong"):
        Case(name="x", file=FILE, command="exit 3").run(tmp_path)
