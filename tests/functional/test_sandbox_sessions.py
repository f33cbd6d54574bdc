"""Sessions of the sandbox, and programs in its jail, without an image around them."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_root import require

ROOT = Path(__file__).resolve().parents[2]
FIRST_FREE = 1100  # beyond what select() can wait for

pytestmark = pytest.mark.functional


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    require("bwrap", "prlimit", "setpriv")
    monkeypatch.syspath_prepend(str(ROOT / "containers/sandbox"))
    for name in ("jail", "seccomp", "sessions", "usage"):
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
    end = time.monotonic() + 30
    while len(sessions):
        assert time.monotonic() < end
        time.sleep(0.1)
    sessions.close()
