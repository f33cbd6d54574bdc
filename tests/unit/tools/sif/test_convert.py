"""What is written into an image: its environment for Apptainer, and nothing outside of it."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tools.sif.convert import Conversion, environment_script, write_environment
from tools.sif.history import reachable
from tools.sif.programs import run_program
from tools.sif.registry.client import ImageError


def test_variables_reach_a_shell_as_they_are(tmp_path):
    script = tmp_path / "env.sh"
    script.write_text(environment_script(["PATH=/opt/x:/bin", "A=it's $HOME `x`", "B=image", "bad-name=1", "C=", "D"]))
    ask = f'. {script}; printf \'%s|\' "$PATH" "$A" "$B" "${{C-unset}}"; env | grep -c bad-name'
    given = {"PATH": "/usr/bin", "B": "mine"}
    result = subprocess.run(["/bin/sh", "-c", ask], env=given, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("/opt/x:/bin|it's $HOME `x`|mine||"), result


def test_an_image_gets_what_apptainer_reads(tmp_path):
    write_environment(tmp_path, {"Env": ["A=1"], "Cmd": ["echo", "a b"], "Labels": {"x": "y"}})
    assert {"proc", "dev", "tmp"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / ".singularity.d/labels.json").read_text()) == {"x": "y"}
    said = subprocess.run([tmp_path / "singularity"], capture_output=True, text=True, check=True).stdout
    assert said == "a b\n"
    assert "export A" in (tmp_path / ".singularity.d/env/10-docker2singularity.sh").read_text()


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
    number = int(pid.read_text())
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False).stdout
    assert state.strip()[:1] in ("", "Z")
    assert os.getpid() != number


def test_objects_are_told_from_their_paths():
    assert reachable(["aa", "bb src/a b.py"]) == {"aa", "bb"}
