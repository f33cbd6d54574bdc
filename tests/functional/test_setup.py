"""What setup.sh says when the machine cannot build the environment: one line, status 2, nothing half-done."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.server
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest
import setuptools

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "tools" / "dev" / "setup.sh"
# Nothing listens on the discard port: the index cannot be reached.
NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}


@pytest.fixture
def setup(tmp_path: Path):
    (tmp_path / "lock").write_text(f"surely-not-a-package==1.0 --hash=sha256:{'0' * 64}\n", encoding="utf-8")

    def run(*args: str, expect: int, **variables: str) -> str:
        result = subprocess.run(
            [str(SETUP), *args],
            env=environment(tmp_path) | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == expect, result.stdout + result.stderr
        return result.stderr + result.stdout

    return run


def environment(tmp_path: Path) -> dict[str, str]:
    home = str(tmp_path)
    return {"PATH": os.environ["PATH"], "HOME": home, "VENV": f"{home}/venv", "LOCK": f"{home}/lock"}


@pytest.fixture
def empty_environment(tmp_path: Path) -> None:
    """Give setup.sh an environment that has pip and nothing else; making one with ensurepip takes seconds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=60)
    (packages,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)


def fake_python(tmp_path: Path, version: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_wrong_python(setup, tmp_path):
    text = setup(expect=2, PYTHON=fake_python(tmp_path, "3.9"))
    assert text.count("\n") == 1
    assert "got Python 3.9, expected 3.11; install python3.11 or set PYTHON" in text


def test_no_python(setup, tmp_path):
    assert "got Python none, expected 3.11" in setup(expect=2, PYTHON="/no/python3.11")
    assert not (tmp_path / "venv").exists()


def test_no_headers(setup, tmp_path):
    text = setup(expect=2, PYTHON=fake_python(tmp_path, "3.11"))
    assert "3.11/Python.h is missing; install python3.11-dev" in text
    assert not (tmp_path / "venv").exists()


def test_no_compiler(setup, tmp_path):
    (tmp_path / "bin").mkdir()
    for program in ("bash", "dirname", "env", "sha256sum", "awk", "grep", "tr"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program) or "")
    text = setup(expect=2, PATH=f"{tmp_path}/bin", PYTHON=sys.executable)
    assert text == "setup: gcc: not on PATH, but a few packages are compiled; install gcc\n"


@pytest.mark.usefixtures("empty_environment")
def test_a_source_is_checked_by_its_hash_and_a_failed_build_is_said_in_the_compilers_words(setup, tmp_path):
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: surely-not-a-package\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": "import subprocess\ndef build_wheel(*_):\n    subprocess.run(['gcc', '-c', 'x.c'], check=True)\n",
        "x.c": "#include <no_such_header.h>\n",
    }
    with tarfile.open(tmp_path / "surely-not-a-package-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"surely-not-a-package-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    pin = "surely-not-a-package==1.0"
    (tmp_path / "lock").write_text(f"{pin} --hash=sha256:{'0' * 64}  # source\n", encoding="utf-8")
    assert "another hash than the lock" in setup(expect=2, **offline)
    digest = hashlib.sha256((tmp_path / "surely-not-a-package-1.0.tar.gz").read_bytes()).hexdigest()
    (tmp_path / "lock").write_text(f"{pin} --hash=sha256:{digest}  # source\n", encoding="utf-8")
    text = setup(expect=2, **offline)
    assert "fatal error: no_such_header.h: No such file or directory (log: " in text


def test_full_disk(setup, tmp_path):
    text = setup(expect=2, MIN_FREE_GB="1000000")
    assert text.count("\n") == 1
    assert "GB free, expected 1000000; free some disk" in text
    assert not (tmp_path / "venv").exists()


def test_cuda_lock_is_refused(setup, tmp_path):
    (tmp_path / "lock").write_text("six==1.17.0\nnvidia-cublas==13.1\ntriton==3.7.1\n", encoding="utf-8")
    text = setup(expect=2)
    assert "has CUDA packages (2:nvidia-cublas==13.1 3:triton==3.7.1); delete those lines" in text


@pytest.mark.usefixtures("empty_environment")
def test_no_network(setup):
    text = setup(expect=2, **NO_INDEX)
    assert "no network: the package index could not be reached" in text


def wheel(name: str) -> tuple[str, bytes]:
    """Return file name and content of a wheel that holds one empty module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return f"{name}-1.0-py3-none-any.whl", content.getvalue()


@contextlib.contextmanager
def index(*wheels: tuple[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve packages on loopback; yields the address of the index and the paths that were asked for."""
    asked: list[str] = []
    pages = {f"/{name}": content for name, content in wheels}
    pages |= {f"/{name.split('-')[0]}/": f'<a href="/{name}">{name}</a>'.encode() for name, _ in wheels}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
            self.send_header("Content-Length", str(len(page or b"")))
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def put_this_package(venv: Path, packages: Path) -> None:
    """Put this package itself and its command into an environment: the set-up would build them."""
    (packages / "this.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    (venv / "bin" / "nemotron").touch(mode=0o755)


@pytest.mark.usefixtures("empty_environment")
def test_each_package_comes_from_one_index(setup, tmp_path):
    """The index of torch also has a package of another index's name, with other content: nothing asks it for that."""
    torch, small = wheel("torch"), wheel("small")
    pins = {"torch": torch, "small": small}
    lines = [f"{name}==1.0 --hash=sha256:{hashlib.sha256(file[1]).hexdigest()}\n" for name, file in pins.items()]
    (tmp_path / "lock").write_text("".join(lines), encoding="utf-8")
    (packages,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    put_this_package(tmp_path / "venv", packages)
    with index(small) as (common, common_asked), index(torch, (small[0], b"other")) as (second, second_asked):
        text = setup(expect=2, PIP_INDEX_URL=common, TORCH_INDEX=second, PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="0")
    assert "the environment is wrong" in text  # all packages are there, and these are not what they say
    assert f"the configured index has no torch==1.0; trying {second}" in text
    assert {path for path in second_asked if "small" in path} == set()
    assert [path for path in second_asked if path.endswith(".whl")] == [f"/{torch[0]}"]
    assert [path for path in common_asked if path.endswith(".whl")] == [f"/{small[0]}"]


UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or ""


def lock_of(tmp_path: Path, content: bytes) -> None:
    """Write a lock of one small package, whose file has this content."""
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "lock").write_text(f"small==1.0 --hash=sha256:{digest}\n", encoding="utf-8")
    (packages,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    put_this_package(tmp_path / "venv", packages)


@pytest.mark.usefixtures("empty_environment")
def test_uv_installs_from_the_index_of_pip_and_checks_hashes(setup, tmp_path):
    (tmp_path / "venv" / "bin" / "uv").symlink_to(UV)
    small = wheel("small")
    lock_of(tmp_path, small[1])
    with index(small) as (address, asked):
        offline = {"PIP_INDEX_URL": address, "PIP_CONFIG_FILE": os.devnull, "UV_CACHE_DIR": str(tmp_path / "cache")}
        text = setup(expect=2, **offline)  # all packages are there, and these are not what a lock has
        assert "installing 1 packages with uv" in text
        assert "setup: installing 1 packages\n" not in text, "pip had to"
        assert f"/{small[0]}" in asked
    assert list((tmp_path / "venv" / "lib").glob("python3.*/site-packages/small-1.0.dist-info/INSTALLER"))
    lock_of(tmp_path, b"other")
    shutil.rmtree(next((tmp_path / "venv" / "lib").glob("python3.*/site-packages/small-1.0.dist-info")))
    with index(small) as (address, _):
        text = setup(expect=2, PIP_INDEX_URL=address, PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="0")
    assert "another hash than the lock" in text, "pip says what uv refused"


@pytest.mark.usefixtures("empty_environment")
def test_where_uv_cannot_pip_does(setup, tmp_path):
    uv = tmp_path / "venv" / "bin" / "uv"
    uv.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    uv.chmod(0o755)
    small = wheel("small")
    lock_of(tmp_path, small[1])
    with index(small) as (address, _):
        text = setup(expect=2, PIP_INDEX_URL=address, PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="0")
    assert "setup: installing 1 packages\n" in text
    assert "the environment is wrong" in text  # the package is there, and it is not what a lock has


def test_a_second_set_up_waits_for_a_lock_that_only_its_owner_can_open(setup, tmp_path):
    python = tmp_path / "python"  # cannot make an environment: the set-up ends as soon as it has the lock
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] && exit 1\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    assert "could not create it" in setup(expect=2, PYTHON=str(python))
    path = tmp_path / "venv.lock"
    assert path.stat().st_mode & 0o777 == 0o600, "whoever may read a file may lock it"
    with path.open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        variables = environment(tmp_path) | {"PYTHON": str(python)}
        second = subprocess.Popen([SETUP], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        waits = re.compile(rf"-> FLOCK .*:{path.stat().st_ino} ")
        end = time.monotonic() + 60
        while not waits.search(Path("/proc/locks").read_text(encoding="utf-8")):
            assert second.poll() is None, second.stdout.read()
            assert time.monotonic() < end, "the second set-up does not ask for the lock"
            time.sleep(0.05)
    output, _ = second.communicate(timeout=120)
    assert "could not create it" in output


@pytest.mark.parametrize(("status", "says"), [(65, "has no locks; start no second set-up"), (1, "for 15 minutes")])
def test_a_file_system_without_locks_is_no_other_set_up(setup, tmp_path, status, says):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] && exit 1\nexec {sys.executable} "$@"\n', encoding="utf-8")
    flock = tmp_path / "bin" / "flock"
    flock.parent.mkdir()
    flock.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
    for program in (python, flock):
        program.chmod(0o755)
    said = setup(expect=2, PYTHON=str(python), PATH=f"{flock.parent}:{os.environ['PATH']}", MIN_FREE_GB="0")
    assert says in said
    assert ("could not create it" in said) == (status == 65)  # it went on


def finish(tmp_path: Path) -> None:
    digest = hashlib.sha256((tmp_path / "lock").read_bytes()).hexdigest()
    (tmp_path / "venv" / ".synced").write_text(digest, encoding="utf-8")


def test_finished_environment_is_left_alone(setup, tmp_path):
    command = tmp_path / "venv" / "bin" / "nemotron"
    command.parent.mkdir(parents=True)
    command.touch(0o755)
    finish(tmp_path)
    assert setup(expect=0, PYTHON="/no/python3.11") == ""


@pytest.mark.usefixtures("empty_environment")
def test_a_finished_environment_gets_the_commands_that_it_was_made_without(setup, tmp_path):
    (packages,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    ours = Path(setuptools.__file__).parents[1]
    for path in (ours / "setuptools", ours / "_distutils_hack", *ours.glob("setuptools-*.dist-info")):
        (packages / path.name).symlink_to(path)
    finish(tmp_path)
    assert "installing the commands" in setup(expect=0, PYTHON="/no/python3.11", PIP_NO_INDEX="1")
    command = tmp_path / "venv" / "bin" / "nemotron"
    assert "tools.launch.nemotron" in command.read_text(encoding="utf-8")
    assert setup(expect=0, PYTHON="/no/python3.11") == ""


def test_unknown_argument(setup):
    assert "unknown argument '--all'" in setup("--all", expect=2)
