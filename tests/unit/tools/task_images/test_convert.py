"""What is written into an image: its environment for Apptainer, and nothing outside of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tools.task_images.convert import Conversion, environment_script, reachable, write_environment
from tools.task_images.programs import run_program
from tools.task_images.registry.client import ImageError


def test_variables_reach_a_shell_as_they_are(tmp_path):
    script = tmp_path / "env.sh"
    script.write_text(
        environment_script(["PATH=/opt/x:/bin", "A=it's $HOME `x`", "B=image", "bad-name=1", "C=", "D"]),
        encoding="utf-8",
    )
    ask = f'. {script}; printf \'%s|\' "$PATH" "$A" "$B" "${{C-unset}}"; env | grep -c bad-name'
    given = {"PATH": "/usr/bin", "B": "mine"}
    result = subprocess.run(["/bin/sh", "-c", ask], env=given, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("/opt/x:/bin|it's $HOME `x`|mine||"), result


def test_an_image_gets_what_apptainer_reads(tmp_path):
    write_environment(tmp_path, {"Env": ["A=1"], "Cmd": ["echo", "a b"], "Labels": {"x": "y"}})
    assert {"proc", "dev", "tmp"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / ".singularity.d/labels.json").read_text(encoding="utf-8")) == {"x": "y"}
    said = subprocess.run([tmp_path / "singularity"], capture_output=True, text=True, check=True).stdout
    assert said == "a b\n"
    assert "export A" in (tmp_path / ".singularity.d/env/10-docker2singularity.sh").read_text(encoding="utf-8")


def test_links_of_an_image_are_not_followed(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    for name in (".singularity.d", "environment", "etc"):
        (root / name).symlink_to(outside)
    write_environment(root, {})
    assert list(outside.iterdir()) == []
    assert not (root / ".singularity.d").is_symlink()


def test_tools_follow_from_what_is_asked():
    assert Conversion(apptainer=True).name == "apptainer"
    assert Conversion(apptainer=True, strip_history=True).name == "umoci"  # only there are the files at hand


@pytest.mark.parametrize(
    ("command", "seconds", "cause"),
    [
        (["sh", "-c", "echo 'x: No space left on device' >&2; exit 1"], 5, "space"),
        (["sh", "-c", "echo other >&2; exit 3"], 5, "convert"),
        (["sleep", "30"], 0.1, "timeout"),
        (["no-such-program-here"], 5, "tool"),
    ],
)
def test_a_program_that_fails_says_why(command, seconds, cause):
    with pytest.raises(ImageError) as raised:
        run_program(command, seconds=seconds)
    assert raised.value.cause == cause


def test_nothing_that_a_program_started_outlives_it(tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(ImageError, match="did not end"):
        run_program(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], seconds=1.5)
    number = int(pid.read_text(encoding="utf-8"))
    assert os.getpid() != number
    deadline = time.monotonic() + 20.0  # its files are closed; a busy kernel takes a moment to the rest
    while is_running(number):
        assert time.monotonic() < deadline, "it outlived its program"
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def test_objects_are_told_from_their_paths():
    assert reachable(["aa", "bb src/a b.py"]) == {"aa", "bb"}
