"""Fifty faults at random moments of runs, and after each of them a checkpoint whose ledger is exact.

A process is killed, the power is cut (every process ends at once, and of every file only what was synced is left), the
disk is full, or file handles are stale. After these the same `make stage1.1` starts the run again. As a start takes
long, most power cuts are of a copy: every process stands still while the directory is copied as a cut would leave it,
and what a resume would find there is checked. The moments come from a seed; what happens at them is the machine's.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
from killing import RunCase, exact_step, find, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(1800)]

RUNS, FAULTS_PER_RUN, NUM_STEPS = 2, 25, 400  # more steps than a run can train between its faults
DISK_BYTES = 1250 * 2**20  # a launch asks for 1 GiB; a run that keeps two checkpoints has about 60 MiB
EXIT_SECONDS, FAULT_SECONDS = 60.0, 1.5
VICTIMS = {"kill driver": "run_grpo.py", "kill engine": "ray::EngineActor", "kill policy": "ray::PolicyWorker"}
COPY, CUT, CUT_AT_START, FULL, STALE = "copy", "power cut", "power cut while it starts", "full disk", "stale handles"
DISK_FAULTS = (FULL, STALE)
PROGRAM = Path(__file__).with_name("faults")


@dataclass(frozen=True)
class Fault:
    """What happens, and when: so long after so many steps more."""

    kind: str
    steps: int
    seconds: float


def draw_faults(run: int) -> list[Fault]:
    """Return the faults of a run in order, other ones for each run; one of them hits it while it starts again."""
    rng, victims = Random(run), [*VICTIMS, *VICTIMS]
    kinds = [*victims[2 * run : 2 * run + 2], CUT, *DISK_FAULTS]
    kinds += [COPY] * (FAULTS_PER_RUN - len(kinds) - 1)
    rng.shuffle(kinds)
    faults = [Fault(kind, rng.randint(1, 3), rng.uniform(0.0, 1.0)) for kind in kinds]
    first_end = next(number for number, kind in enumerate(kinds) if kind != COPY)
    faults.insert(first_end + 1, Fault(CUT_AT_START, 0, rng.uniform(0.0, 20.0)))
    return faults


@pytest.fixture
def case(tmp_path: Path) -> Iterator[RunCase]:
    """Return a run that saves every step to a disk of its own, which can be full without harm to others."""
    overrides = {
        "grpo.async_grpo.num_rollout_workers": 1,
        "checkpointing.save_period": 1,
        "checkpointing.keep_top_k": 2,
        "policy.generation.max_new_tokens": 8,
    }
    case = make_case(tmp_path, NUM_STEPS, overrides)
    case.run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "run", str(case.run_dir)], check=True)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "run").write_text(str(case.run_dir), encoding="utf-8")
    variables = {**case.environment, "FAULTS_DIR": str(tmp_path / "faults"), "PYTHONPATH": str(PROGRAM)}
    yield RunCase(directory=tmp_path, num_steps=NUM_STEPS, environment=variables)
    subprocess.run(["umount", "--lazy", str(case.run_dir)], check=True)


@pytest.mark.parametrize("number", range(RUNS))
def test_faults_of_a_run_and_an_exact_ledger_after_each(number: int, case: RunCase) -> None:
    faults, saved = deque(draw_faults(number)), 0
    while faults:
        with case.started() as run:
            try:
                saved = endure(case, run, faults, saved)
            finally:
                kill_all(run)
    assert saved >= FAULTS_PER_RUN, "the run has hardly trained"


def endure(case: RunCase, run: subprocess.Popen[bytes], faults: deque[Fault], resumed_from: int) -> int:
    """Let one start suffer faults until it ends; return the step that is saved then."""
    saved = resumed_from
    while faults and run.poll() is None:
        start, fault, before = time.monotonic(), faults.popleft(), num_trained(case)
        case.wait_until(run, lambda n=before + fault.steps: num_trained(case) >= n, f"{fault.steps} steps")
        time.sleep(fault.seconds)
        trained = num_trained(case)
        found_in = strike(fault, case, run)
        assert not trained or not resumed_from or f"step {resumed_from}, " in case.text(), case.text()[-6000:]
        least = max(saved, resumed_from + trained - 2)  # the save of a step ends before that of the next one begins
        saved = exact_step(found_in)
        how = "went on" if run.poll() is None else f"ended with {run.poll()}"
        print(f"{fault}: {how}; step {resumed_from + trained}, {saved} saved; {time.monotonic() - start:.0f} s")
        assert saved >= least, f"{fault}: step {least} was saved, and now {saved} is the newest"
    return saved


def num_trained(case: RunCase) -> int:
    """Return how many steps this start has trained, as far as it has said so."""
    return case.text().count(" | reward")


def strike(fault: Fault, case: RunCase, run: subprocess.Popen[bytes]) -> Path:
    """Let the fault happen; return the directory to look at, once the run has ended or has got over it."""
    place = case.directory / "faults"
    if fault.kind == COPY:
        return copy_as_a_cut_would_leave_it(case, run, place / "synced")
    if fault.kind in (CUT, CUT_AT_START):
        kill_all(run)
        assert (place / "synced").exists() or not fault.steps, "the run has not told what it synced"
        lose_what_was_not_synced(case.run_dir, synced_sizes(place / "synced"))
        return case.run_dir
    if fault.kind in DISK_FAULTS:
        with full(case.run_dir) if fault.kind == FULL else stale(place / "fail"):
            wait_for_end(run, FAULT_SECONDS)
        if gets_over_it(case, run):
            return case.run_dir
    else:
        find(psutil.Process(run.pid), VICTIMS[fault.kind])[0].kill()
    assert run.wait(timeout=patiently(EXIT_SECONDS)) != 0, f"{fault}: it claims success:\n{case.text()[-6000:]}"
    return case.run_dir


def everything(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def standing_still(run: subprocess.Popen[bytes]) -> Iterator[list[psutil.Process]]:
    """Suspend all processes of the run, and wait until none moves: none may answer what happens to another."""
    end, processes = time.monotonic() + patiently(30), set[psutil.Process]()
    while (new := set(everything(run)) - processes) or not all(map(is_still, processes)):
        assert time.monotonic() < end, "a process does not stand still"
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        processes |= new
        time.sleep(0.01)
    yield list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def is_still(process: psutil.Process) -> bool:
    """Say whether every thread is stopped, or gone."""
    try:
        states = [stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] for stat in task_files(process)]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread ended just now
    return set(states) <= set("TtZX")


def task_files(process: psutil.Process) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/task").glob("*/stat"))


def kill_all(run: subprocess.Popen[bytes]) -> None:
    """Kill the launch and everything below it at once."""
    with standing_still(run) as processes:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([one for one in processes if one.pid != run.pid], timeout=patiently(10))
    run.wait(timeout=patiently(10))


def synced_sizes(log: Path) -> dict[int, int]:
    """Return inode -> bytes that were synced last."""
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return {int(inode): int(size) for inode, size in (line.split() for line in lines)}


def lose_what_was_not_synced(run_dir: Path, sizes: dict[int, int]) -> None:
    for path in run_dir.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found = path.stat()
            os.truncate(path, min(sizes.get(found.st_ino, 0), found.st_size))


def copy_as_a_cut_would_leave_it(case: RunCase, run: subprocess.Popen[bytes], log: Path) -> Path:
    """Return a copy of the run's directory with what is synced of each file."""
    copy = case.directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    with standing_still(run):
        copy_file = partial(copy_synced, synced_sizes(log))
        shutil.copytree(case.run_dir, copy, symlinks=True, copy_function=copy_file)
    return copy


def copy_synced(sizes: dict[int, int], source: str, target: str) -> None:
    path = Path(source)
    Path(target).write_bytes(path.read_bytes()[: sizes.get(path.stat().st_ino, 0)])


@contextmanager
def full(run_dir: Path) -> Iterator[None]:
    """Leave no byte of the disk free."""
    ballast = run_dir / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**20))
    yield
    ballast.unlink()


@contextmanager
def stale(told: Path) -> Iterator[None]:
    """Let calls that change the directory of the run fail now and then."""
    told.write_text(str(errno.ESTALE), encoding="utf-8")
    yield
    told.unlink()


def wait_for_end(run: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        run.wait(timeout=seconds)


def gets_over_it(case: RunCase, run: subprocess.Popen[bytes]) -> bool:
    """Say whether the run trains, and saves, three steps more."""
    before, end = num_trained(case), time.monotonic() + patiently(EXIT_SECONDS)
    while run.poll() is None and num_trained(case) < before + 3:
        assert time.monotonic() < end, f"it neither ends nor goes on:\n{case.text()[-6000:]}"
        time.sleep(0.05)
    return run.poll() is None
