"""No secret of a run reaches a file of it or a command line, and a local run is closed to others.

One tiny run on this machine with planted keys. While it runs, every process of it is looked at, and another user tries
what can be got; afterwards every file is looked at.
"""

from __future__ import annotations

import json
import stat
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from listening import beyond_loopback
from speed import patiently
from tiny_run import TWO_STEPS, launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 1.0


def processes(mark: str) -> dict[int, dict[str, str]]:
    """Return process id -> environment of every process that carries the mark."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended, or is another user's
            continue
        environ = dict(word.split("=", 1) for word in words if "=" in word)
        if environ.get("LAUNCH_MARK") == mark:
            found[int(path.parent.name)] = environ
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def what_a_neighbour_gets(seen: Mapping[int, Mapping[str, str]], run_dir: Path) -> set[str]:
    """Let another user of this machine try what it can do to these processes and to the files of the run."""
    places = {str(run_dir), *(environ["TMPDIR"] for environ in seen.values() if "TMPDIR" in environ)}
    given = json.dumps({"pids": list(seen), "places": sorted(places)})
    program = Path(__file__).with_name("neighbour.py").read_text()
    nobody = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", "/usr/bin/python3", "-I", "-c", program]
    done = subprocess.run(
        nobody, cwd="/", input=given, capture_output=True, text=True, check=True, timeout=patiently(60)
    )
    return set(json.loads(done.stdout))


def test_no_secret_is_in_a_file_or_a_command_line_and_nothing_listens_beyond_this_machine(tmp_path: Path) -> None:
    planted = {"WANDB_API_KEY": uuid.uuid4().hex, "HF_TOKEN": f"hf_{uuid.uuid4().hex}"}
    mark = uuid.uuid4().hex
    env = launch_environment(tmp_path, num_rows=16, overrides=TWO_STEPS) | planted
    env |= {"MODEL_PATH": str(tmp_path / "model"), "EXP_NAME": "run", "LAUNCH_MARK": mark}
    tokens: set[str] = set()
    lines: set[str] = set()
    open_ports: dict[str, str] = {}
    got: set[str] = set()
    with (tmp_path / "make.log").open("wb") as log:
        process = subprocess.Popen(
            ["make", "stage1.1"], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            seen = processes(mark)
            tokens |= {environ["RAY_AUTH_TOKEN"] for environ in seen.values() if "RAY_AUTH_TOKEN" in environ}
            lines |= {command_line(pid) for pid in seen}
            open_ports |= beyond_loopback(seen)
            got |= what_a_neighbour_gets(seen, tmp_path / "run")
            time.sleep(LOOK_SECONDS)
    output = (tmp_path / "make.log").read_text(errors="replace")
    assert process.returncode == 0, output[-3000:]
    assert len(tokens) == 1, "the run has one token of Ray, and this test has seen it"
    secrets = {**planted, "RAY_AUTH_TOKEN": tokens.pop()}

    for name, secret in secrets.items():
        assert secret not in output, f"{name} is printed"
        assert not [line for line in lines if secret in line], f"{name} is on a command line"
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert len(files) > 20
        assert not [str(path) for path in files if secret.encode() in path.read_bytes()], f"{name} is in a file"
    writable = [path for path in (tmp_path / "run").rglob("*") if not path.is_symlink() and is_open(path)]
    assert not writable, "others could change the run"
    assert open_ports == {}
    assert got == set()


def is_open(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IWOTH)
