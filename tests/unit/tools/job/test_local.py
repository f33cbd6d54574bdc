"""What happens around a local run: others that take ports, an output that cannot be written, an early signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from recipes.cluster.ports import ray_ports
from recipes.stop import EXIT_RESUME
from tools.job.local import Signals, run_environment, take_slot, watch

ROOT = Path(__file__).resolve().parents[4]


def test_a_slot_with_a_port_that_another_program_took_is_passed_over() -> None:
    ports, held = take_slot()
    held.close()
    with closing(socket.create_server(("127.0.0.1", ports.metrics))):
        others, held = take_slot()
    held.close()
    assert others.gcs != ports.gcs


def test_what_is_copied_to_a_full_disk_is_lost_and_the_copy_goes_on(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from tools.job.local import echo
out, full, log = os.dup(1), os.open("/dev/full", os.O_WRONLY), Path({str(tmp_path / "log")!r})
with echo(log):
    os.dup2(full, 1)
    log.write_text("first\\n")
    time.sleep(1)
    os.dup2(out, 1)
    with log.open("a") as file:
        file.write("second\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("second\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_start_weights_are_checked_means_start_it_again(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import os, time
from pathlib import Path
from tools.job import local
def check(*_):
    os.kill(os.getpid(), {int(number)})
    time.sleep(30)
local.with_start_weights = check
local.supervise(local.LocalRun(run_dir=Path({str(tmp_path)!r}), command=("true",), num_units=1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, preexec_fn=take_signals
    )
    assert done.returncode == EXIT_RESUME, done.stderr


def take_signals() -> None:
    """End at each signal: a shell has a program that runs in the background ignore some, and what that starts, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def sleeping() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two programs that handle no signal, as a driver and a head; they are ended after the test."""
    programs = [subprocess.Popen(["sleep", "60"], preexec_fn=take_signals) for _ in range(2)]
    yield programs
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_a_driver_that_still_loads_means_start_it_again(
    sleeping: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals.forward_to(driver)
    signals._handle(number, None)
    assert watch(driver, head, signals, set()) == EXIT_RESUME


def test_a_signal_that_comes_while_the_driver_is_started_reaches_it(
    sleeping: list[subprocess.Popen[bytes]],
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals._handle(signal.SIGTERM, None)
    signals.forward_to(driver)
    driver.wait(timeout=30)
    assert watch(driver, head, signals, set()) == EXIT_RESUME


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_another_program_ends_has_failed(
    sleeping: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals.forward_to(driver)
    driver.send_signal(number)
    assert watch(driver, head, signals, set()) == 128 + number


def test_another_checkout_in_pythonpath_is_not_run_in_place_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise SystemExit('the other checkout')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = run_environment(tmp_path, ray_ports(0))
    command = [sys.executable, str(ROOT / "recipes" / "run_grpo.py"), "--help"]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert env["PYTHONPATH"].endswith(str(tmp_path))
