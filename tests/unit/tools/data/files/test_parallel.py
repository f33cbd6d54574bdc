"""Blocks of whole lines cover a file once, and results come in order from this process or from workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from recipes.errors import InputError, RunError
from tools.data.files.parallel import Workers, blocks_of, map_in_order


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"\n\n", b"ab\ncdefghijk\n\nl\nm", b"x" * 40 + b"\ny\n"])
def test_blocks_are_whole_lines_in_order(tmp_path: Path, content: bytes, size: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    parts = [block.read(path) for block in blocks_of(path, size)]
    assert b"".join(parts) == content
    assert all(part.endswith(b"\n") for part in parts[:-1])
    assert all(len(part) <= size + 40 for part in parts)
    assert (content == b"") == (parts == [])


def process_and_square(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(number)
    return os.getpid(), number * number


@pytest.mark.parametrize("workers", ["1", "2"])
def test_results_come_in_order(monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    monkeypatch.setenv("DATA_WORKERS", workers)
    results = list(map_in_order(range(30), process_and_square))
    assert [square for _, square in results] == [number * number for number in range(30)]
    assert (os.getpid() in {process for process, _ in results}) == (workers == "1")
    with pytest.raises(ValueError, match="-1"):
        list(map_in_order([1, -1, 2, 3], process_and_square))


def process_and_sum(work: int, job: int) -> tuple[int, int]:
    if job < 0:
        os._exit(1)
    return os.getpid(), work + job


def test_the_same_workers_serve_several_passes() -> None:
    with Workers(100, 2) as workers:
        passes = [list(workers.map(process_and_sum, range(first, first + 40))) for first in (0, 1000)]
        assert [[result for _, result in results] for results in passes] == [[*range(100, 140)], [*range(1100, 1140)]]
        assert len({process for results in passes for process, _ in results}) <= 2
        with pytest.raises(RunError, match="a worker process died"):
            list(workers.map(process_and_sum, [1, -1, 2]))


def blocks_interrupts(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_is_for_the_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_WORKERS", "2")
    assert list(map_in_order(range(4), blocks_interrupts)) == [True] * 4
    assert not blocks_interrupts(0)


@pytest.mark.parametrize("value", ["0", "-2", "all", "1.5"])
def test_an_impossible_number_of_workers_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DATA_WORKERS", value)
    with pytest.raises(InputError, match=f"DATA_WORKERS: got '{value}', expected a whole number, 1 or more"):
        list(map_in_order([1, 2], process_and_square))
