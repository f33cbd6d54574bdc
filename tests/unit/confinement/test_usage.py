"""What a program has of the time that passes: the sandbox's and that of runs in images."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from recipes.confinement import usage


def turns(ran: float, waited: float | None, is_runnable: bool = True) -> usage.ThreadTurns:
    return usage.ThreadTurns(ran, waited, is_runnable)


def stalled() -> usage.ThreadTurns:
    return usage.ThreadTurns(5.0, 3.0, is_runnable=False, is_stalled=True)


MANY = {number: turns(0.0, 0.2) for number in range(usage.MOST_WANTING + 1)}
SHARES = [
    ("it sleeps", {1: turns(5.0, 3.0, is_runnable=False)}, {}, 1.0),
    ("it has ended", {}, {}, 1.0),
    ("it waits for a disk", {1: stalled()}, {1: stalled()}, 0.0),
    ("one waits for a disk, and one for that one", {1: stalled(), 2: turns(5.0, 3.0, is_runnable=False)}, {}, 0.0),
    ("one waits for a disk, one runs", {1: stalled(), 2: turns(5.25, 3.0)}, {2: turns(5.0, 3.0)}, 1.0),
    ("it runs alone", {1: turns(5.25, 3.0)}, {1: turns(5.0, 3.0)}, 1.0),
    ("it gets a third", {1: turns(5.1, 3.2)}, {1: turns(5.0, 3.0)}, 1 / 3),
    ("it gets nothing", {1: turns(5.0, 8.0)}, {1: turns(5.0, 3.0)}, 0.01 / 5.01),
    ("a third for each of three", {n: turns(0.1, 0.2) for n in range(3)}, {}, 1.0),
    ("a child that has just begun", {1: turns(0.0, 0.0001)}, {}, 0.99),
    ("a child that waits to begin", {1: turns(0.0, 0.19)}, {}, 0.05),
    ("more than the machine has, which wait for each other", MANY, {}, 1.0),
    ("a kernel that does not tell", {1: turns(0.0, None)}, {1: turns(0.0, None)}, 0.0),
]


@pytest.mark.parametrize(
    ("threads", "before", "share"), [case[1:] for case in SHARES], ids=[case[0] for case in SHARES]
)
def test_the_share_of_a_processor(
    threads: dict[int, usage.ThreadTurns], before: dict[int, usage.ThreadTurns], share: float
) -> None:
    assert usage.share_of(threads, before) == pytest.approx(share, abs=0.002)


def test_the_longer_of_both_measures_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 1.0, 1.5, 9.0])
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(clock))
    own, counted = usage.OwnTime(), []
    for cpu, threads in (
        (0.4, {1: turns(0.4, 5.0)}),  # what has ended meanwhile ran
        (0.4, {1: turns(0.4, 5.0, is_runnable=False)}),  # it waits by itself
        (0.5, {1: turns(0.5, 5.4)}),  # a busy machine
        (9.5, {1: turns(9.5, 5.4)}),  # a look that came late counts for one second
    ):
        own.add(usage.JailUsage(cpu_seconds=cpu, threads=threads))
        counted.append(own.seconds)
    assert counted == pytest.approx([0.4, 0.9, 1.0, 2.0])


VFORKS = "import ctypes, time\nif not ctypes.CDLL(None).vfork():\n    time.sleep(60)"


def test_a_program_that_waits_for_its_own_child_is_not_held_up() -> None:
    """The kernel shows the parent of a `vfork` like one that waits for a disk."""
    with subprocess.Popen([sys.executable, "-c", VFORKS]) as program:
        try:
            until = time.monotonic() + 10
            while len(threads := usage.usage_of(program.pid).threads) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            assert len(threads) == 2
            assert not any(turns.is_stalled for turns in threads.values())
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(program.pid)], check=False)
            program.kill()
