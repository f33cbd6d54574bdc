"""The Dockerfiles under stock podman and buildah.

Debian's base is real, made by debootstrap, and so is all of the sandbox: its packages come by apt through a proxy, as
behind a company's gate. NVIDIA's bases are stood in for by a small root of the same name, in which what would fetch
something (apt-get, curl, uv) is a program that notes its words; builder, Dockerfiles and our scripts are real.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_tools import Engine, start_engine, start_proxy
from sandbox_client import TOKEN, Client
from small_root import require, write_debian, write_root
from speed import patiently

from recipes.environments.swe.containers.check import NEEDED_MIB
from recipes.errors import RunError
from tools.images.build import build_of, make
from tools.images.lock import LOCK, launch_digest, read_lock

pytestmark = pytest.mark.functional
ROOT = Path(__file__).resolve().parents[2]
PORT = "6931"  # of the table's sandbox workers
NOTE = '#!/bin/sh\necho "${0##*/} $*" >>/calls\n'
UV = f"""{NOTE}
[ "$1" != venv ] || mkdir -p /opt/venv/bin
[ -z "$UV_OVERRIDE" ] || cat "$UV_OVERRIDE" >>/calls
for word in "$@"; do last=$word; done
[ "$1" != pip ] || cat "$last" >>/calls
env | grep -E '_FORCE_BUILD|^CPLUS_INCLUDE_PATH' >>/calls || true
"""
CURL = f"""{NOTE}
for word in "$@"; do
  [ "$previous" != --output ] || echo package >"$word"
  previous=$word
done
"""
ENROOT = """#!/usr/bin/env bash
# Stands in for enroot, which is no Debian package: writes an image of podman's store as a squashfs file.
set -euo pipefail
[[ $1 == import && $2 == --output && $4 == podman://* ]] || exit 64
root="$(podman image mount "${4#podman://}")"
mksquashfs "${root}" "$3" -quiet -no-progress -comp zstd -Xcompression-level 1
podman image unmount "${4#podman://}"
[[ -z ${ENROOT_FAILS:-} ]]
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    require("podman", "buildah", "runc", "mksquashfs")
    home = tmp_path_factory.mktemp("engine")
    small = write_root(home / "small", programs=["bash"])
    (small / "bin/bash").symlink_to("/usr/bin/bash")
    add_notes(small, "apt-get", "add-apt-repository")
    for name, text in {"uv": UV, "curl": CURL}.items():
        write_program(small / "usr/bin" / name, text)
    (small / "opt/nemo-rl").mkdir(parents=True)
    (small / "opt/nemo-rl/pyproject.toml").write_text('[[tool.uv.index]]\nname = "pytorch-cu129"\n', encoding="utf-8")
    (small / "etc/apptainer").mkdir(parents=True)
    (small / "etc/apptainer/apptainer.conf").write_text("sessiondir max size = 64\n", encoding="utf-8")
    for name in ("bin", "uv"):
        (home / name).mkdir()
    write_program(home / "bin/enroot", ENROOT)
    shutil.copy(small / "usr/bin/uv", home / "uv/uv")
    with start_engine(home / "store") as engine:
        engine.import_root(write_debian(home / "debian"), "docker.io/library/debian:bookworm-slim")
        engine.import_root(home / "uv", "ghcr.io/astral-sh/uv:0.9.7")
        for name in ("nvcr.io/nvidia/nemo-rl:v0.7.0", "nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04"):
            engine.import_root(small, name)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in engine.env.items():
                patch.setenv(name, value)
            patch.setenv("PATH", str(home / "bin"), prepend=os.pathsep)
            yield engine


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def add_notes(root: Path, *programs: str) -> None:
    for program in programs:
        write_program(root / "usr/bin" / program, NOTE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfiles need of this repository, so that the lock of the checkout stays as it is."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "containers", copy / "containers", ignore=shutil.ignore_patterns("__pycache__", "*.lock"))
    shutil.copytree(ROOT / "recipes/confinement", copy / "recipes/confinement")
    for name in (".dockerignore", "recipes/__init__.py", "containers/requirements-gpu.lock"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(engine: Engine, checkout: Path, name: str, **variables: str) -> str:
    """Build an image through the tool, with a check that the stand-ins can pass, and return its name."""
    work = build_of(name, variables, "buildah")
    engine.buildah("build", *work.commands[0][2:-1], str(checkout), cwd=checkout)
    return work.tag


def calls(engine: Engine, tag: str) -> str:
    return engine.podman("run", "--rm", "--network=host", tag, "cat", "/calls")


def test_the_image_of_nemo_rl_has_its_environments_built_in(engine, checkout):
    tag = build(engine, checkout, "nemo_rl", CUDA="cu129", VLLM_VERSION="0.18.1", WHEEL_ARCH="aarch64")
    noted = calls(engine, tag)
    assert "uv run python examples/nemo_gym/prefetch_venvs.py examples/nemo_gym/prefetch_super_all_envs.yaml" in noted
    wheel = "download/v0.18.1/vllm-0.18.1+cu129-cp38-abi3-manylinux_2_35_aarch64.whl"
    assert f"vllm @ https://github.com/vllm-project/vllm/releases/{wheel}" in noted
    files = ("examples/configs/super/stage2_swe1.yaml", "examples/configs/super/stage2_swe2.yaml")
    noted = calls(engine, build(engine, checkout, "nemo_rl", VLLM_VERSION="lock", PREFETCH=" ".join(files)))
    assert f"uv run python examples/nemo_gym/prefetch_venvs.py {files[0]} {files[1]}" in noted
    assert "vllm @" not in noted


def test_the_native_image_installs_the_lock_and_compiles_last(engine, checkout):
    noted = calls(engine, build(engine, checkout, "native"))
    assert noted.index("setuptools==") < noted.index("torch==") < noted.index("mamba-ssm==")
    assert noted.count("mamba-ssm==") == 1
    installs = [line for line in noted.splitlines() if line.startswith("uv pip install")]
    assert len(installs) == 3 and all("--require-hashes" in line and "index" not in line for line in installs)
    pins = [
        line
        for line in (ROOT / "containers/requirements-gpu.lock").read_text(encoding="utf-8").splitlines()
        if "==" in line
    ]
    wanted = [pin for pin in pins if not pin.startswith("#")]
    assert all("--hash=sha256:" in pin for pin in wanted)
    assert len(wanted) > 200
    assert not [pin for pin in wanted if f"\n{pin}\n" not in noted]
    for name in ("CAUSAL_CONV1D", "MAMBA", "NVTE_PYTORCH"):  # else they would look for wheels on GitHub
        assert f"\n{name}_FORCE_BUILD=TRUE\n" in noted
    headers = "CPLUS_INCLUDE_PATH=/opt/venv/lib/python3.11/site-packages/nvidia/cudnn/include"
    assert noted.index("\ntransformer-engine-torch==") < noted.index(headers)


def test_the_swe_image_adds_apptainer_to_a_training_image(engine, checkout):
    base, digest = "nvcr.io/nvidia/nemo-rl:v0.7.0", hashlib.sha256(b"package\n").hexdigest()
    tag = build(engine, checkout, "swe", BASE=base, APPTAINER_VERSION="1.4.2", APPTAINER_SHA256=digest)
    noted = calls(engine, tag)
    assert "/releases/download/v1.4.2/apptainer_1.4.2_amd64.deb" in noted
    assert "install -qq --no-install-recommends /tmp/apptainer.deb" in noted
    settings = engine.podman("run", "--rm", "--network=host", tag, "cat", "/etc/apptainer/apptainer.conf")
    assert settings.split("\n")[0] == f"sessiondir max size = {NEEDED_MIB}"
    with pytest.raises(AssertionError, match=r"apptainer\.deb: FAILED"):
        build(engine, checkout, "swe", BASE=base, APPTAINER_SHA256="0" * 64)


@pytest.fixture(scope="module")
def variables(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The sandbox without what its programs may import, built behind a proxy that only a file of the site names."""
    site = tmp_path_factory.mktemp("site") / "apt.conf"
    with start_proxy() as (url, seen):
        site.write_text(f'Acquire::http::Proxy "{url}";\n', encoding="utf-8")
        flags = f"--layers --network=host --volume={site}:/etc/apt/apt.conf.d/99site:ro"
        yield {"TAG": "test", "PACKAGES": "python3", "BUILD_FLAGS": flags}
    assert [path for path in seen if "/bubblewrap_" in path]


@pytest.fixture(scope="module")
def sandbox_file(
    engine: Engine, checkout: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The sandbox image, made by the tool with its own check and lock, and imported to a directory that it makes."""
    file = tmp_path_factory.mktemp("images") / "new/sandbox.sqsh"
    entry = make(build_of("sandbox", {**variables, "SQSH": str(file)}, "podman"), checkout)
    assert read_lock(checkout / LOCK) == {"sandbox": entry}
    base = "docker.io/library/debian:bookworm-slim"
    assert entry.bases == {base: engine.podman("image", "inspect", "--format={{.Digest}}", base).strip()}
    assert engine.podman("image", "inspect", "--format={{.Digest}}", entry.tag).strip() == entry.digest
    assert launch_digest(str(file)) == entry.digest
    return file


@pytest.fixture(scope="module")
def sandbox_tag(sandbox_file: Path) -> str:
    return str(json.loads(sandbox_file.with_name("sandbox.sqsh.json").read_text(encoding="utf-8"))["tag"])


def test_an_import_that_fails_leaves_the_file_as_it_was(sandbox_file, checkout, variables, monkeypatch):
    before = sandbox_file.read_bytes()
    assert before.startswith(b"hsqs")
    monkeypatch.setenv("ENROOT_FAILS", "1")
    with pytest.raises(RunError, match="status 1 of: enroot import"):
        make(build_of("sandbox", {**variables, "SQSH": str(sandbox_file)}, "podman"), checkout)
    assert sandbox_file.read_bytes() == before
    assert sorted(path.name for path in sandbox_file.parent.iterdir()) == ["sandbox.sqsh", "sandbox.sqsh.json"]


def test_an_image_that_cannot_import_its_packages_is_not_recorded(engine, checkout, variables, tmp_path):
    work = build_of("sandbox", {**variables, "TAG": "broken"}, "buildah")
    copy = shutil.copytree(checkout, tmp_path / "copy")
    (copy / "containers/sandbox/jail.py").write_text("import no_such_module\n", encoding="utf-8")
    (copy / LOCK).unlink(missing_ok=True)
    for _ in range(2):  # the container of a check that failed is not in the way
        with pytest.raises(RunError, match="buildah run check-"):
            make(work, copy)
    assert read_lock(copy / LOCK) == {}


@pytest.fixture(scope="module")
def sandbox(engine: Engine, sandbox_tag: str) -> Iterator[Client]:
    """A running sandbox, started as the job file starts it."""
    script = (
        f"source {ROOT}/tools/job/container.sh; srun_options=() prefix=(); "
        f"container_words podman {sandbox_tag} '' sandbox ''; exec \"${{prefix[@]}}\" /start-with-nginx.sh"
    )
    limits = {"SANDBOX_MEMORY_MIB": "256", "SANDBOX_PROCESSES": "32", "SANDBOX_DISK_MIB": "16", "SANDBOX_SESSIONS": "3"}
    limits["SANDBOX_KEPT_SECONDS"] = "0"
    env = {**os.environ, **limits, "SLURM_JOB_ID": "77", "NGINX_PORT": PORT, "HF_TOKEN": "canary-token"}
    env["SANDBOX_TOKEN"] = TOKEN
    process = subprocess.Popen(["bash", "-euc", script], env=env)
    client = Client(PORT)
    client.wait_until_healthy(process)
    yield client
    process.terminate()
    assert process.wait(timeout=patiently(30)) == 0


def test_programs_run_with_their_input(sandbox):
    answer = sandbox.python("print(input() * 2); import sys; print('e', file=sys.stderr)", std_input="ab")
    assert answer == {"process_status": "completed", "stdout": "abab\n", "stderr": "e\n"}
    assert sandbox.python("1/0")["process_status"] == "error"
    assert "ZeroDivisionError" in sandbox.python("1/0")["stderr"]
    assert sandbox.python("echo $((6 * 7)); exit 3", language="shell") == {
        "process_status": "error",
        "stdout": "42\n",
        "stderr": "",
    }
    assert sandbox.python("print('x' * 50)", max_output_characters=10)["stdout"] == "x" * 10 + "<output cut>"


def test_sessions_keep_their_variables_apart(sandbox):
    first = sandbox.cell("x = 20", "a")
    assert first == {"process_status": "completed", "stdout": "", "stderr": "", "new_session_created": True}
    assert sandbox.cell("x * 2 + 2", "a")["stdout"] == "42\n"
    assert sandbox.cell("x", "a")["new_session_created"] is False
    assert "NameError" in sandbox.cell("x", "b")["stderr"]
    assert sandbox.send("/sessions") == (200, {"num_sessions": 2})  # their names stay secret
    assert sandbox.send("/sessions/a", method="DELETE")[0] == 200
    assert sandbox.send("/sessions/a", method="DELETE")[0] == 404
    assert sandbox.cell("1", "a")["new_session_created"] is True


def test_the_oldest_session_makes_room(sandbox):
    for name in ("one", "two", "three", "four"):
        sandbox.cell("1", name)
    assert sandbox.send("/sessions") == (200, {"num_sessions": 3})
    assert sandbox.cell("1", "two")["new_session_created"] is False
    assert sandbox.cell("1", "one")["new_session_created"] is True


def test_a_cell_that_takes_too_long_is_interrupted_and_the_session_stays(sandbox):
    sandbox.cell("y = 1", "slow")
    answer = sandbox.cell("while True: pass", "slow", timeout=1)
    assert answer["process_status"] == "timeout"
    assert answer["stderr"] == "Execution timed out after 1 seconds\n"
    assert sandbox.cell("y", "slow")["stdout"] == "1\n"
    stubborn = "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass"
    assert sandbox.cell(stubborn, "slow", timeout=1)["process_status"] == "timeout"
    assert sandbox.cell("y", "slow")["new_session_created"] is True


def test_a_program_that_takes_too_long_is_killed_with_what_it_started(sandbox):
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\nwhile True: pass"
    started = time.monotonic()
    answer = sandbox.python(daemon, timeout=1)
    assert answer["process_status"] == "timeout"
    assert time.monotonic() - started < patiently(20)
    assert sandbox.python("import os, time\nif os.fork() == 0:\n  time.sleep(60)", timeout=1)["process_status"] in (
        "completed",
        "timeout",
    )


FORK_BOMB = """
import os
children = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            import time; time.sleep(30); os._exit(0)
        children += 1
except OSError:
    pass
print(children, flush=True)
os._exit(0)
"""
FILL = """
import os
def fill(place):
    written = 0
    try:
        for number in range(50):
            with open(f"{place}/fill{number}", "wb") as file:
                for _ in range(4):
                    file.write(bytes(2**20)); written += 1
    except OSError:
        pass
    return written
print(*[fill(place) for place in ("/tmp", "/dev/shm", "/dev", "", "/var/tmp", "/usr")])
"""


def test_a_fork_bomb_meets_the_limit_of_processes(sandbox):
    answer = sandbox.python(FORK_BOMB)
    assert answer["process_status"] == "completed", answer
    assert 5 < int(answer["stdout"]) < 32
    assert sandbox.python("print(1)")["stdout"] == "1\n"  # and no other program notices


def test_memory_is_limited_for_one_process_and_for_all(sandbox):
    answer = sandbox.python("x = bytearray(600 * 2**20)")
    assert answer["process_status"] == "error"
    assert "MemoryError" in answer["stderr"]
    many = "import os, time\nfor _ in range(4):\n  if os.fork() == 0: break\nx = bytearray(120 * 2**20)\ntime.sleep(8)"
    answer = sandbox.python(many)
    assert answer["process_status"] == "error"
    assert "more than 256 MiB of memory" in answer["stderr"]
    assert "MemoryError" in sandbox.cell("x = bytearray(600 * 2**20)", "memory")["stderr"]


def test_disk_is_limited_wherever_it_can_be_written(sandbox):
    tmp, shared, *others = map(int, sandbox.python(FILL)["stdout"].split())
    assert 0 < tmp <= 16
    assert 0 < shared <= 16
    assert others == [0, 0, 0, 0]


def test_endless_output_ends(sandbox):
    answer = sandbox.python("while True: print('y' * 65536)", timeout=8)
    assert answer["process_status"] in ("error", "timeout")
    assert len(answer["stdout"]) == 1000 + len("<output cut>")


PROBE = f"""
import os, socket
try:
    socket.create_connection(("127.0.0.1", {PORT}), 1)
    print("connected")
except OSError:
    print("no network")
print(open("/proc/1/environ").read())
print(os.getuid(), len([name for name in os.listdir("/proc") if name.isdigit()]))
print(os.path.exists("/sandbox"), os.path.exists("/etc/passwd"), os.listdir("/tmp"))
"""


def test_nothing_of_the_host_is_reached(sandbox):
    lines = sandbox.python(PROBE)["stdout"].splitlines()
    assert lines[0] == "no network"
    assert "canary" not in lines[1]
    assert "NGINX_PORT" not in lines[1]
    assert lines[2] == "65534 2"
    assert lines[3] == "False False []"


def test_wrong_requests_are_refused(sandbox):
    assert sandbox.send("/execute", {"generated_code": "1"})[0] == 400  # ipython without a session
    assert sandbox.send("/execute", {"code": "1"}, session="a")[0] == 400
    status, answer = sandbox.send("/execute", {"generated_code": "1", "language": "lean4"})
    assert status == 400
    assert "installed: ipython, python, python3, shell" in answer["error"]
    assert sandbox.send("/nowhere")[0] == 404
