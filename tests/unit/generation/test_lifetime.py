import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = (
    "from recipes.generation.core import die_with_parent; import time;"
    "die_with_parent(); print('up', flush=True); time.sleep(60)"
)
PARENT = (
    "import subprocess, sys, time;"
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdout=subprocess.PIPE, text=True);"
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_dies_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
