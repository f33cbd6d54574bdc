"""The supervisor finds what it started, and only that, also when it left the session and its parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.confinement.usage import usage_of
from recipes.heartbeat import process_start
from tools.processes import descendants, remove_shared_memory, shared_memory_inodes

ROOT = Path(__file__).resolve().parents[3]

# A process that calls itself something that is no text.
NAMELESS = "open('/proc/self/comm', 'wb').write(b'\\xff')\nprint()\nimport sys\nsys.stdin.read()"

# Starts a shell that starts a sleeper in a session of its own and ends; then ends everything below itself.
ORPHAN_MAKER = """
import os, subprocess, time
from tools.processes import adopt_orphans, descendants, kill_descendants
adopt_orphans()
shell = subprocess.run(["bash", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
orphan = int(shell.stdout)
time.sleep(0.2)
found = descendants(os.getpid())
left = kill_descendants(deadline_seconds=5)
print(orphan in found, left, os.path.exists(f"/proc/{orphan}"))
"""

# Adopts a process that ends at once, while its own child has ended, too, and is waited for later.
REAPER = """
import os, subprocess, time
from tools.processes import adopt_orphans, children, reap_orphans
adopt_orphans()
subprocess.run(["bash", "-c", "setsid true & setsid true &"])
own = subprocess.Popen(["bash", "-c", "read"], stdin=subprocess.PIPE)
end = time.monotonic() + 20
while children(os.getpid()) != [own.pid] and time.monotonic() < end:
    reap_orphans(besides={own.pid})
    time.sleep(0.02)
print(children(os.getpid()) == [own.pid])
own.communicate(b"go\\n")
print(own.returncode)
own = subprocess.Popen(["false"])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
reap_orphans(besides={own.pid})
print(own.wait())
reap_orphans(besides=())
"""

# As nohup starts a program, and as a shell does.
HANG_UPS = """
import signal
from tools.processes import caught
signal.signal(signal.SIGHUP, signal.SIG_DFL)
before = caught(signal.SIGTERM, signal.SIGHUP)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print([[number.name for number in numbers] for numbers in (before, caught(signal.SIGTERM, signal.SIGHUP))])
"""

# Ends before its child has arranged to die with it.
DEAD_PARENT = """
import os, signal, time
from tools.processes import dies_with_parent
parent, arrange = os.getpid(), dies_with_parent(signal.SIGKILL)
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
arrange()
print("outlived its parent")
"""


def test_child_of_a_dead_parent_ends_at_once():
    result = subprocess.run([sys.executable, "-c", DEAD_PARENT], capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("", "")


def test_orphans_that_left_the_session_are_found_and_ended():
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN_MAKER], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["True", "[]", "False"]


def test_adopted_processes_that_have_ended_are_reaped_and_own_ones_left_to_their_waiter():
    result = subprocess.run([sys.executable, "-c", REAPER], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["True", "0", "1"]


def test_descendants_are_a_processs_own(tmp_path):
    script = f"sleep 60 & echo $! >{tmp_path}/child; wait"
    mine = subprocess.Popen(["bash", "-c", script])
    other = subprocess.Popen(["sleep", "60"])
    try:
        end = time.monotonic() + 10
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text(encoding="utf-8"):
            assert time.monotonic() < end
            time.sleep(0.02)
        child = int((tmp_path / "child").read_text(encoding="utf-8"))
        assert descendants(mine.pid) == [child]
        assert {mine.pid, child, other.pid} <= set(descendants(os.getpid()))
    finally:
        os.kill(child, 9)
        for process in (mine, other):
            process.kill()
            process.wait()


def test_shared_memory_files_are_removed_once_nobody_uses_them():
    path, other = (Path("/dev/shm", f"launch-test-{os.getpid()}-{number}") for number in (1, 2))
    other.touch()
    try:
        with path.open("w") as file:
            inodes = shared_memory_inodes([os.getpid()])
            assert path.stat().st_ino in inodes
            remove_shared_memory(inodes)
            assert path.exists()  # still open
            assert file.writable()
        remove_shared_memory(inodes)
        assert not path.exists()
        assert other.exists()
    finally:
        path.unlink(missing_ok=True)
        other.unlink()


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    result = subprocess.run([sys.executable, "-c", HANG_UPS], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[['SIGTERM', 'SIGHUP'], ['SIGTERM']]\n"


def test_named_semaphores_are_found_though_they_are_mapped_under_another_name():
    lock = multiprocessing.get_context("spawn").Lock()  # a file /dev/shm/sem.mp-* until the lock is dropped
    name = Path("/dev/shm", f"sem.{lock._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    assert name.stat().st_ino in shared_memory_inodes([os.getpid()])


@pytest.mark.parametrize("soft", [64, 400])
def test_the_limit_on_open_files_is_raised_as_far_as_it_may_be(soft: int) -> None:
    program = "import resource as r; from tools import processes as p; p.allow_open_files(); "
    program += "print(r.getrlimit(r.RLIMIT_NOFILE))"
    command = ["prlimit", f"--nofile={soft}:400", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "(400, 400)\n"


def test_a_process_without_a_name_in_text_hides_nothing() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NAMELESS], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert process.pid in descendants(os.getpid())
            assert process_start(process.pid) > 0
            assert usage_of(process.pid).memory_bytes > 1 << 20
        finally:
            process.kill()
