"""The supervisor of a one-node cluster with a real Ray: status, signals, and nothing left behind, whoever is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from listening import beyond_loopback
from speed import patiently

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]

# Joins the cluster and leaves behind what a run can leave: an actor whose child left the session, and files in
# shared memory. Then it waits for a signal or ends with the status it was given.
DRIVER = """
import os, signal, subprocess, sys, time
from multiprocessing import shared_memory
import ray
from recipes.cluster.connect import connect
signal.signal(signal.SIGTERM, lambda *_: (print("got TERM", flush=True), os._exit(75)))  # before Ray sets its own
connect()

@ray.remote(num_cpus=0, resources={"worker_units": 1})
class Engine:
    def start(self):
        self.memory = shared_memory.SharedMemory(create=True, size=64)
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return os.getpid(), self.child.pid, self.memory.name

engine = Engine.remote()
print("ready", *ray.get(engine.start.remote()), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


class Launch:
    """One supervisor and what it started, found by a mark in the environment."""

    def __init__(self, run_dir: Path, *, seconds: float, status: int) -> None:
        self.run_dir = run_dir
        self.mark = uuid.uuid4().hex
        driver = run_dir.with_name("driver.py")
        driver.write_text(DRIVER, encoding="utf-8")
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tools.job.local", f"--run-dir={run_dir}", "--num-units=2"),
                *("--", sys.executable, str(driver), str(seconds), str(status)),
            ],
            env=env | {"LAUNCH_MARK": self.mark, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def find(self, *words: bytes) -> list[int]:
        """List the processes that carry the mark and have these words among the first of their command."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4] for pid in self.alive()}
        return [pid for pid, command in commands.items() if set(words) <= set(command)]

    def wait_until_ready(self) -> list[str]:
        """Return the words that the driver printed: actor pid, pid of its child, shared-memory name."""
        log = self.run_dir / "logs" / "latest" / "driver.log"
        end = time.monotonic() + patiently(90)
        while time.monotonic() < end and self.process.poll() is None:
            words = log.read_text(encoding="utf-8").split() if log.exists() else []
            if "ready" in words and len(words) >= 4:
                return words[1:4]
            time.sleep(0.1)
        raise AssertionError(self.process.communicate()[0])

    def alive(self) -> list[int]:
        """List the processes that carry the mark, zombies excepted: those have no environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def driver_pid(self) -> int:
        command = f"{self.run_dir.with_name('driver.py')}"
        (pid,) = [
            pid
            for pid in self.alive()
            if pid != self.process.pid
            and command in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
        ]
        return pid


@pytest.fixture
def launched() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    yield launches
    for launch in launches:
        if launch.process.poll() is None:  # it ends Ray's agents too, which carry no mark once they have their titles
            launch.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                launch.process.communicate(timeout=patiently(60))
        for pid in launch.alive():
            with suppress(ProcessLookupError):  # it ended with another
                os.kill(pid, signal.SIGKILL)
        launch.process.wait()
        for temp in temporary(launch.run_dir):
            shutil.rmtree(temp)


def temporary(run_dir: Path) -> list[Path]:
    """Return the directories below /tmp of a run that goes on or was killed."""
    notes = Path("/tmp").glob("rl-*/logs_go_to")
    return [note.parent for note in notes if note.read_text(encoding="utf-8").startswith(f"{run_dir}/")]


def assert_gone(launch: Launch, shared: str, *, within: float) -> None:
    end = time.monotonic() + within
    while launch.alive() and time.monotonic() < end:
        time.sleep(0.1)
    assert launch.alive() == []
    assert not Path("/dev/shm", shared).exists()


def test_nothing_listens_beyond_this_machine_and_rays_directory_is_private(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=600, status=0)
    launched.append(launch)
    launch.wait_until_ready()
    assert beyond_loopback(launch.alive()) == {}
    (temp,) = temporary(launch.run_dir)
    assert temp.stat().st_mode & 0o777 == 0o700
    assert list(temp.glob("ray/session_2*/sockets/raylet"))


def test_exit_status_is_the_drivers_and_nothing_is_left(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=0.5, status=7)
    launched.append(launch)
    _, _, shared = launch.wait_until_ready()
    output, _ = launch.process.communicate(timeout=patiently(60))
    assert launch.process.returncode == 7
    assert "ready" in output  # the driver's output is copied to the terminal
    assert_gone(launch, shared, within=0)
    logs = launch.run_dir / "logs"
    assert (logs / "latest").readlink() == Path("attempt_1")
    assert list((logs / "latest" / "ray").glob("worker-*.out"))  # Ray's logs are kept
    temp = output.split("tail -F ")[2].split("/ray/session_latest")[0]
    assert not Path(temp).exists()


def test_signal_reaches_the_driver_and_two_runs_live_side_by_side(launched, tmp_path):
    first = Launch(tmp_path / "first", seconds=600, status=0)
    launched.append(first)
    first.wait_until_ready()
    second = Launch(tmp_path / "second", seconds=0, status=0)
    launched.append(second)
    again = Launch(first.run_dir, seconds=0, status=0)
    launched.append(again)
    refusal, _ = again.process.communicate(timeout=patiently(30))
    assert again.process.returncode == 2
    assert f"started by pid {first.process.pid} on" in refusal
    second.process.communicate(timeout=patiently(120))
    assert second.process.returncode == 0
    assert first.process.poll() is None

    first.process.send_signal(signal.SIGTERM)
    output, _ = first.process.communicate(timeout=patiently(60))
    assert first.process.returncode == 75
    assert "got TERM" in output
    assert first.alive() == []


def test_a_signal_before_the_driver_is_started_means_start_it_again(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=600, status=0)
    launched.append(launch)
    end = time.monotonic() + patiently(60)
    while not temporary(launch.run_dir) and time.monotonic() < end:
        time.sleep(0.02)
    launch.process.send_signal(signal.SIGTERM)
    output, _ = launch.process.communicate(timeout=patiently(60))
    assert launch.process.returncode == 75, output
    assert "got SIGTERM before the driver was started" in output
    assert launch.alive() == []


def test_nothing_is_left_when_the_driver_is_killed(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=600, status=0)
    launched.append(launch)
    _, _, shared = launch.wait_until_ready()
    time.sleep(2)  # the supervisor notes once a second which files the run has in shared memory
    os.kill(launch.driver_pid(), signal.SIGKILL)
    launch.process.communicate(timeout=patiently(60))
    assert launch.process.returncode == 128 + signal.SIGKILL
    assert_gone(launch, shared, within=0)


def test_everything_ends_when_the_supervisor_is_killed(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=600, status=0)
    launched.append(launch)
    _, orphan, shared = launch.wait_until_ready()
    launch.process.kill()
    launch.process.wait()
    # What left the session on purpose and watches nobody is out of reach without a supervisor.
    end = time.monotonic() + patiently(45)
    while set(launch.alive()) - {int(orphan)} and time.monotonic() < end:
        time.sleep(0.1)
    Path("/dev/shm", shared).unlink(missing_ok=True)
    assert set(launch.alive()) <= {int(orphan)}


def test_a_head_that_twice_does_not_start_is_started_again(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=0, status=7)
    launched.append(launch)
    end = time.monotonic() + patiently(120)
    killed = set()
    while len(killed) < 2:
        for head in set(launch.find(b"start", b"--head")) - killed:
            os.kill(head, signal.SIGKILL)
            killed.add(head)
        assert time.monotonic() < end
        time.sleep(0.02)
    output, _ = launch.process.communicate(timeout=patiently(180))
    assert launch.process.returncode == 7, output
    assert output.count("the Ray head exited with status -9") == output.count("starting it again") == 2
    assert launch.alive() == []


def test_a_dead_head_ends_the_run_with_a_message(launched, tmp_path):
    launch = Launch(tmp_path / "run", seconds=600, status=0)
    launched.append(launch)
    launch.wait_until_ready()
    (gcs,) = [
        pid for pid in launch.alive() if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    ]
    os.kill(gcs, signal.SIGKILL)
    output, _ = launch.process.communicate(timeout=patiently(60))
    assert launch.process.returncode == 1
    assert "the Ray head exited" in output
    assert launch.alive() == []
