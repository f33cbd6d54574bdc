"""Sessions of the sandbox, and programs in its jail, without an image around them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_root import require
from speed import patiently

ROOT = Path(__file__).resolve().parents[2]
FIRST_FREE = 1100  # beyond what select() can wait for

pytestmark = pytest.mark.functional


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    require("bwrap", "prlimit", "setpriv")
    monkeypatch.syspath_prepend(str(ROOT / "containers/sandbox"))
    for name in ("jail", "sessions"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Take the low numbers, as five hundred sessions do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * FIRST_FREE), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(FIRST_FREE)]
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_session_beside_five_hundred_others_answers(many_descriptors):
    from jail import Limits
    from sessions import Session

    session = Session(Limits())
    try:
        assert session.run("print(6 * 7)", 20).stdout == "42\n"
    finally:
        session.close()


def test_a_closed_session_has_ended():
    from jail import Limits
    from sessions import Session

    session = Session(Limits())
    session.close()
    assert session.run("1", 20).reason == "end"


def test_a_program_gets_no_namespaces_of_its_own():
    from jail import Limits, run

    outcome = run(["bash", "/main"], "unshare --user --map-root-user --mount true && echo made", "", 20, Limits())
    assert (outcome.status, outcome.stdout) == (1, "")
    assert "unshare failed" in outcome.stderr


def test_an_unused_session_ends_by_itself():
    from jail import Limits
    from sessions import Sessions

    sessions = Sessions(Limits(), most=4, idle_seconds=2)
    for name in ("a", "b"):
        sessions.run(name, "import os, time\nif os.fork() == 0:\n    time.sleep(1000)", 20)
    assert len(sessions) == 2
    end = time.monotonic() + patiently(30)
    while len(sessions):
        assert time.monotonic() < end
        time.sleep(0.1)
    sessions.close()


def test_a_cell_that_nobody_reads_ends_at_its_time():
    """An earlier cell answered in the worker's place and goes on: the next one does not fit into the pipe."""
    from jail import Limits
    from sessions import Session

    session = Session(Limits())
    forged = """
import json, os, time
for descriptor in range(3, 64):
    try:
        os.write(descriptor, json.dumps({"status": "completed", "stdout": "", "stderr": ""}).encode() + b"\\n")
    except OSError:
        pass
os.write(1, json.dumps({"status": "completed", "stdout": "", "stderr": ""}).encode() + b"\\n")
time.sleep(1000)
"""
    try:
        session.run(forged, 20)
        began = time.monotonic()
        outcome = session.run("#" * 1_000_000, 3)
        assert outcome.status is None
        assert time.monotonic() - began < patiently(30)
    finally:
        session.close()


def test_a_session_that_gets_no_processor_at_its_interrupt_stays():
    from jail import Limits
    from sessions import Session

    session = Session(Limits())
    try:
        session.run("kept = 7", 20)
        worker = psutil.Process(session.process.pid).children(recursive=True)[-1]
        threading.Timer(0.5, worker.suspend).start()
        threading.Timer(1.9, worker.resume).start()  # past the interrupt by more than half a second
        assert session.run("while True: pass", 1).timed_out
        assert session.run("print(kept)", 20).stdout == "7\n"
    finally:
        session.close()


def test_a_session_in_use_is_not_ended_for_another():
    from jail import Limits
    from sessions import NoRoomError, Sessions

    sessions = Sessions(Limits(), most=2, idle_seconds=1000, kept_seconds=1000)
    try:
        for name in ("a", "b"):
            sessions.run(name, "kept = 7", 20)
        with pytest.raises(NoRoomError, match="2 sessions are open, and at most 2 may be"):
            sessions.run("c", "1", 20)
        outcome, is_new = sessions.run("a", "print(kept)", 20)
        assert (outcome.stdout, is_new) == ("7\n", False)
        sessions.kept_seconds = 0.0
        assert sessions.run("c", "1", 20)[1]
        assert len(sessions) == 2
    finally:
        sessions.close()


FORKING = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so nobody is told what its children used
while True:
    try:
        if os.fork() == 0:
            sum(range(10**6))
            os._exit(0)
    except BlockingIOError:
        time.sleep(0.01)
"""
ENDLESS = {
    "it runs": "while True: pass",
    "it sleeps": "import time\ntime.sleep(1000)",
    "its children's time is lost": f"{FORKING}    time.sleep(0.02)\n",
    "so many of them that they wait for each other": FORKING,
}


# What a program gets of a processor that it wants to itself for two seconds, in this very moment.
SPINNING = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time() / 2)"


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_program_is_told_from_a_busy_machine(name):
    from jail import Limits, run

    deadline, share, usual = time.monotonic() + patiently(60), 0.0, 1.0
    while share < 0.7 * usual and time.monotonic() < deadline:  # again where others came or went
        beside = subprocess.Popen([sys.executable, "-I", "-c", SPINNING], stdout=subprocess.PIPE, text=True)
        outcome = run(["python3", "-I", "/main"], ENDLESS[name], "", 2.0, Limits())
        usual = min(float(beside.communicate(timeout=patiently(20))[0]), 1.0)
        assert outcome.timed_out
        share = outcome.used_seconds / 2.0
    assert share >= 0.7 * usual
