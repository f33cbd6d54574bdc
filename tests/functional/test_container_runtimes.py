"""A step of a job inside its container: pyxis by a shim that enters the root with bubblewrap, podman for real.

Apptainer is no package of Debian stable: where a machine has it, it is real, elsewhere a shim reads its words, and
the test says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_tools import Engine, start_engine
from small_root import require, write_root
from speed import patiently

pytestmark = pytest.mark.functional
LAUNCH = Path(__file__).resolve().parents[2] / "tools" / "job"
SHIM = Path(__file__).with_name("pyxis_shim.py")
STEP = """set -euo pipefail; shopt -s inherit_errexit
source "$1/container.sh"; runtime=$2 image=$3 mounts=$4 role=$5 workdir=$6; shift 6
srun_options=() prefix=()
container_words "${runtime}" "${image}" "${mounts}" "${role}" "${workdir}"
exec srun --nodes=1 "${srun_options[@]}" "${prefix[@]}" "$@"
"""
REMOVE = """set -euo pipefail; source "$1/container.sh"; removal=(); container_remove "$2" "$3"; exec "${removal[@]}"
"""
APPTAINER = """#!/usr/bin/env bash
# Reads the words that apptainer 1.1 and later know, and enters a directory with bubblewrap.
set -euo pipefail
[[ $1 == exec ]] || exit 64
shift
words=(--proc /proc --dev-bind /dev /dev --tmpfs /tmp) chdir=/
while [[ $1 == -* ]]; do
  case "$1" in
    --no-home | --no-mount=tmp,cwd | --writable-tmpfs | --nv) ;;
    --pwd=*) chdir=${1#*=} ;;
    --bind=*)
      IFS=: read -r source target flags <<<"${1#*=}"
      [[ ${flags} == ro ]] && words+=(--ro-bind "${source}" "${target}") || words+=(--bind "${source}" "${target}")
      ;;
    *) exit 64 ;;
  esac
  shift
done
root="$(mktemp -d)"
cp -a "$1/." "${root}"
exec bwrap --bind "${root}" / "${words[@]}" --chdir "${chdir}" -- "${@:2}"
"""


@dataclass
class Node:
    """A node of a job: its programs, its images, its shared directory."""

    directory: Path
    image: Path
    engine: Engine

    def env(self, **variables: str) -> dict[str, str]:
        job = {
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.directory / "home"),
            "PYXIS_STATE": str(self.directory / "state"),
            "SLURM_JOB_ID": uuid.uuid4().hex[:8],
            "PYTHONPATH": "/job",
            "RAY_AUTH_TOKEN": "canary",
            "NEMO_SKILLS_SANDBOX_PORT": "6000",
            "APPTAINER_NO_PRIVS": "1",  # a root that lacks some of root's rights cannot hand all of them on
        }
        return {**job, **self.engine.env, **variables}

    def step(self, runtime: str, command: str, *, role: str = "ray-head", image: str = "", **variables: str) -> str:
        """Run a shell command in a step and return what it wrote."""
        mounts = f"{self.directory}/shared:/shared,{self.directory}/input:/input:ro" if role != "sandbox" else ""
        words = [runtime, image or self.images[runtime], mounts, role, "/shared" if mounts else ""]
        result = subprocess.run(
            ["bash", "-c", STEP, "step", str(LAUNCH), *words, "sh", "-c", command],
            env=self.env(**variables),
            capture_output=True,
            text=True,
            timeout=patiently(120),
        )
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    @property
    def images(self) -> dict[str, str]:
        return {"pyxis": str(self.image), "apptainer": str(self.image), "podman": self.engine.image}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    require("bwrap", "busybox", "podman", "buildah", "runc")
    directory = tmp_path_factory.mktemp("node")
    image = write_root(directory / "image")
    (image / "etc/image-environment").write_text("PATH=/bin\nPYTHONPATH=/image\nONLY_IN_IMAGE=1\n", encoding="utf-8")
    (image / "etc/version").write_text("first\n", encoding="utf-8")
    for name in ("shared", "input", "home", "state"):
        (directory / name).mkdir()
    (directory / "shared/rows").write_text("rows\n", encoding="utf-8")
    (directory / "input/weights").write_text("weights\n", encoding="utf-8")
    (directory / "home/secret").write_text("secret\n", encoding="utf-8")
    write_program(directory / "bin/srun", f'#!/bin/sh\nexec {sys.executable} {SHIM} "$@"\n')
    if shutil.which("apptainer") is None:
        warnings.warn("apptainer is not on this machine: its words were read by a shim", stacklevel=1)
        write_program(directory / "bin/apptainer", APPTAINER)
    with start_engine(directory / "engine") as engine:
        engine.image = engine.import_root(image, "localhost/training:1")
        yield Node(directory, image, engine)


RUNTIMES = ["pyxis", "apptainer", "podman"]


@pytest.mark.promise
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_step_sees_its_mounts_and_nothing_else_of_the_host(node, runtime):
    text = node.step(
        runtime,
        "pwd; cat rows /input/weights /etc/version; echo done >made; touch /input/x 2>&1 || echo read-only; "
        f"cat {node.directory}/home/secret 2>/dev/null || echo no home; echo y >/etc/version && cat /etc/version",
    )
    assert text.split("\n")[:4] == ["/shared", "rows", "weights", "first"]
    assert "read-only" in text
    assert "no home" in text
    assert (node.directory / "shared/made").read_text(encoding="utf-8") == "done\n"
    assert text.endswith("y\n")  # the root can be written,
    assert (node.image / "etc/version").read_text(encoding="utf-8") == "first\n"  # and the image is not


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_jobs_variables_win_over_the_images(node, runtime):
    seen = dict(line.split("=", 1) for line in node.step(runtime, "env").splitlines() if "=" in line)
    assert seen["PYTHONPATH"] == "/job"
    assert seen["RAY_AUTH_TOKEN"] == "canary"
    assert seen["SLURM_JOB_ID"]
    if runtime == "pyxis":
        assert seen["PATH"] == "/bin"
        assert seen["ONLY_IN_IMAGE"] == "1"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_sandbox_gets_neither_tokens_nor_mounts(node, runtime):
    text = node.step(runtime, "env; ls /shared /input 2>&1 || true", role="sandbox")
    assert "NEMO_SKILLS_SANDBOX_PORT=6000" in text
    assert "canary" not in text
    assert "rows" not in text
    assert "weights" not in text


def test_a_pyxis_container_goes_with_its_step(node, tmp_path):
    newer = write_root(tmp_path / "newer")
    (newer / "etc/version").write_text("second\n", encoding="utf-8")
    assert node.step("pyxis", "cat /etc/version") == "first\n"
    assert node.step("pyxis", "cat /etc/version", image=str(newer)) == "second\n"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + patiently(60)
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within 60 s"
        time.sleep(0.05)


def wait_for_start(node: Node, mark: Path) -> None:
    wait_until(mark.exists, "the start of the program")
    wait_until(lambda: node.engine.podman("ps", "--quiet") != "", "the start of the container")
    time.sleep(1)  # podman 4.3 ends with status 0 on a signal that comes while it still notes the start


def test_podman_forwards_status_and_signals_and_leaves_nothing(node):
    env, shared = node.env(), node.directory / "shared"
    words = ["podman", node.engine.image, f"{shared}:/shared", "driver", "/shared", "sh", "-c"]
    trap = "trap 'echo caught >/shared/caught; exit 75' TERM; echo up >/shared/up; while true; do sleep 0.1; done"
    start = ["bash", "-c", STEP, "step", str(LAUNCH), *words, trap]

    process = subprocess.Popen(start, env=env)
    wait_for_start(node, shared / "up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patiently(60)) == 75
    assert (shared / "caught").exists()
    wait_until(lambda: node.engine.podman("ps", "--all", "--quiet") == "", "the end of the container")

    # A killed client leaves its container; the job's last step removes it.
    (shared / "up").unlink()
    process = subprocess.Popen(start, env=env)
    wait_for_start(node, shared / "up")
    process.kill()
    process.wait(timeout=patiently(60))
    assert node.engine.podman("ps", "--quiet") != ""
    subprocess.run(
        ["bash", "-c", REMOVE, "remove", str(LAUNCH), "podman", "driver"], env=env, check=True, timeout=patiently(60)
    )
    assert node.engine.podman("ps", "--all", "--quiet") == ""
