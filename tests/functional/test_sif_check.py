"""One image with a repository and pytest in it: made without its later history, run, checked, its tests run twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest
from loopback_registry import Pusher, login, start_proxy, start_registry
from small_root import require, write_root

from tools.sif import run as sif_run
from tools.sif.run import Container, run_in

pytestmark = pytest.mark.functional

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
CANARY = "only-the-fix-says-this"
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", f"def add(a, b):\n    return a + b  # {CANARY}\n"
OLD_TEST = "from calc import add\n\n\ndef test_zero():\n    assert add(2, 0) == 2\n"
NEW_TEST = OLD_TEST + "\n\ndef test_sum():\n    assert add(2, 3) == 5\n"
ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass(frozen=True)
class Project:
    """A repository as images of SWE instances have it."""

    base: str
    fix: str  # the later commit
    blob: str  # of the fixed file
    patch: str
    test_patch: str


def git(repository: Path, *words: str) -> str:
    env = {**os.environ, **ENVIRONMENT}
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30).stdout


def write_project(repository: Path) -> Project:
    """Write a history: base commit, the fix after it under every kind of name, and the image's own commit on top."""
    repository.mkdir()
    git(repository, "init", "--quiet", "--initial-branch", "main")
    (repository / "calc.py").write_text(WRONG)
    (repository / "test_calc.py").write_text(OLD_TEST)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Base")
    git(repository, "tag", "-a", "-m", "old", "v1")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text(RIGHT)
    git(repository, "commit", "--quiet", "-a", "-m", f"Fix: {CANARY}")
    fix = git(repository, "rev-parse", "HEAD").strip()
    blob = git(repository, "rev-parse", "HEAD:calc.py").strip()
    patch = git(repository, "diff", base, fix)
    git(repository, "tag", "-a", "-m", "new", "v2")
    git(repository, "branch", "future")
    git(repository, "update-ref", "refs/remotes/origin/main", fix)
    git(repository, "remote", "add", "origin", "https://example.com/project.git")
    git(repository, "gc", "--quiet")  # what is packed must go too
    (repository / "stashed.py").write_text(f"# {CANARY}\n")
    git(repository, "stash", "--include-untracked", "--quiet")
    git(repository, "reset", "--quiet", "--hard", base)
    (repository / "setup.cfg").write_text("[tool:pytest]\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "SWE-bench")
    (repository / "test_calc.py").write_text(NEW_TEST)
    test_patch = git(repository, "diff")
    git(repository, "checkout", "--quiet", "--", ".")
    return Project(base, fix, blob, patch, test_patch)


def row(instance: str, project: Project, **changed: str) -> dict[str, object]:
    facts = {
        "repo": "some/calc",
        "base_commit": project.base,
        "patch": project.patch,
        "test_patch": project.test_patch,
        "FAIL_TO_PASS": json.dumps(["test_calc.py::test_sum"]),
        "PASS_TO_PASS": json.dumps(["test_calc.py::test_zero"]),
        **changed,
    }
    metadata = {"instance_id": instance, "dataset_name": "SWE-bench_Verified", "instance_dict": json.dumps(facts)}
    return {"responses_create_params": {"input": [], "metadata": metadata}}


@dataclass
class Made:
    project: Project
    rows: Path
    host: str
    environ: dict[str, str]
    stripped: Path  # the file with its history taken out
    whole: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    require("docker-registry", "skopeo", "umoci", "mksquashfs", "siftool", "bwrap", "git", "unshare")
    place = tmp_path_factory.mktemp("check")
    root = write_root(place / "root", programs=["git"], python=True)
    library, ignored = Path(pytest.__file__).parents[1], shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        for source in [library / package, *library.glob(f"{package}-*.dist-info")]:
            shutil.copytree(source, root / "usr/lib/python3.11" / source.name, ignore=ignored)
    shutil.copy(library / "py.py", root / "usr/lib/python3.11")
    (root / "usr/bin/python").symlink_to("python3")
    project = write_project(root / "testbed")
    plain = BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        archive.add(root, arcname=".")
    with start_registry(place / "registry") as url, start_proxy(url) as (host, _):
        layers = [(plain.getvalue(), plain.getvalue())]  # not compressed: that is allowed, and quicker
        name, env = "swebench/sweb.eval.x86_64.some_1776_calc-1", ["PATH=/usr/bin:/bin", "A=b c"]
        Pusher(url).push(name, "latest", layers, env)
        (place / "one.jsonl").write_text(json.dumps(row("some__calc-1", project)) + "\n")
        made = Made(project, place / "one.jsonl", host, login(place / "docker", host), place / "a.sif", place / "b.sif")
        make_image(made, place / "sif", "--converter", "umoci", "--strip-history").rename(made.stripped)
        make_image(made, place / "sif", "--converter", "umoci").rename(made.whole)
        yield made


def make_image(made: Made, directory: Path, *words: str) -> Path:
    """Make the one image and return it."""
    command = [sys.executable, "-m", "tools.sif.build", "--sif-dir", directory, "--rows", made.rows]
    command += ["--mirror", made.host, "--compression", "lz4", *words]
    result = subprocess.run(command, env=made.environ, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return directory / "swebench_sweb.eval.x86_64.some_1776_calc-1.sif"


CONTAINER = Container(apptainer=False, size="256m", seconds=60)
LIST_ALL = "cd /testbed && git cat-file --batch-all-objects --batch | tr -d '\\000'"


def test_the_fix_can_be_read_from_an_image_as_it_comes(made):
    assert CANARY in run_in(CONTAINER, made.whole, ["sh", "-c", LIST_ALL])
    assert CANARY in run_in(CONTAINER, made.whole, ["sh", "-c", "cd /testbed && git log --all -p"])


def test_no_fix_is_left_in_a_stripped_image(made):
    assert CANARY not in run_in(CONTAINER, made.stripped, ["sh", "-c", LIST_ALL])
    said = run_in(
        CONTAINER, made.stripped, ["sh", "-c", "cd /testbed && git log --all --format=%s && git tag && git status -s"]
    )
    assert said.split() == ["SWE-bench", "Base", "v1"]  # the old tag stays: versions are computed from it
    for name in (made.project.fix, made.project.blob):
        ask = f"cd /testbed && git cat-file -e {name} && echo there || echo gone"
        assert run_in(CONTAINER, made.stripped, ["sh", "-c", ask]).split()[-1] == "gone"
    assert run_in(CONTAINER, made.stripped, ["sh", "-c", f"grep -r {CANARY} /testbed || echo none"]).strip() == "none"


def test_a_command_writes_in_its_own_layer_only(made):
    before = hashlib.sha256(made.stripped.read_bytes()).hexdigest()
    script = "echo new > /testbed/calc.py && rm /testbed/test_calc.py && touch /made && ls / && cat /testbed/calc.py"
    said = run_in(CONTAINER, made.stripped, ["sh", "-c", f"{script}; echo $A $PWD"]).split("\n")
    assert "made" in said and said[-3:] == ["new", "b c /", ""]
    assert "made" not in run_in(CONTAINER, made.stripped, ["ls", "/"])
    assert hashlib.sha256(made.stripped.read_bytes()).hexdigest() == before
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=False).stdout
    assert str(made.stripped) not in loops  # no mount outlives its command


def test_a_user_without_rights_runs_it_too(made, monkeypatch):
    require("squashfuse", "setpriv")
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        place = Path(name)
        place.chmod(0o755)
        for directory in ("work", "inputs"):
            (place / directory).mkdir(mode=0o777)
            (place / directory).chmod(0o777)
        shutil.copy(made.stripped, place / "image.sif")
        script = shutil.copy(sif_run.SCRIPT, place / "run.sh")
        monkeypatch.setattr(sif_run, "SCRIPT", script)
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        words = sif_run.words_of(CONTAINER, place / "image.sif", place / "work", place / "inputs")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words, "sh", "-c"]
        command.append("touch /made && cat /testbed/calc.py")
        result = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, result.stdout) == (0, WRONG), result.stderr
        served = subprocess.run(["pgrep", "-f", f"squashfuse .*{place}"], capture_output=True, text=True, check=False)
        assert served.stdout == ""


NO_APPTAINER = "NOT CHECKED WITH REAL APPTAINER: it is not installed on this machine"
WITHOUT = shutil.which("apptainer") is None


@pytest.mark.parametrize(
    "runner", ["bwrap", pytest.param("apptainer", marks=pytest.mark.skipif(WITHOUT, reason=NO_APPTAINER))]
)
def test_the_good_instances_are_those_whose_tests_tell_patches_apart(made, tmp_path, runner):
    project = made.project
    no_fix = re.sub(r"a \+ b", "a * b", project.patch)
    cases = {
        "some__calc-1": ("", {}),
        "some__calc-2": ("commit", {"base_commit": project.fix}),
        "some__calc-3": ("golden", {"patch": no_fix}),
        "some__calc-4": ("empty", {"FAIL_TO_PASS": "[]"}),
        "some__calc-5": ("run", {"patch": "no patch at all\n"}),
        "some__calc-6": ("framework", {"repo": "django/django"}),
        "some__calc-7": ("row", {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}),
        "some__calc-8": ("cut", {}),
        "some__calc-9": ("missing", {}),
    }
    directory = tmp_path / "sif"
    directory.mkdir()
    for number in range(1, 9):
        (directory / f"swebench_sweb.eval.x86_64.some_1776_calc-{number}.sif").hardlink_to(made.stripped)
    cut = directory / "swebench_sweb.eval.x86_64.some_1776_calc-8.sif"
    cut.unlink()
    cut.write_bytes(made.stripped.read_bytes()[:-5000])
    rows = tmp_path / "train-split.jsonl"
    plain = json.dumps({"responses_create_params": {"input": "x"}}) + "\n"
    lines = [json.dumps(row(name, project, **changed)) + "\n" for name, (_, changed) in cases.items()]
    rows.write_text(plain + "".join(lines))
    command = [sys.executable, "-m", "tools.sif.check", "--sif-dir", directory, "--rows", rows, "--golden"]
    command += ["--runner", runner, "--timeout", "60", "--out", tmp_path / "good"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    found = [json.loads(line) for line in (directory / "checked.jsonl").open()]
    causes = {entry["instance"]: entry["cause"] for entry in found}
    assert causes == {name: cause for name, (cause, _) in cases.items()}, found
    assert (directory / "good_instances.txt").read_text() == "some__calc-1\n"
    assert (tmp_path / "good" / "train-split.jsonl").read_text() == plain + lines[0]
    manifest = json.loads((tmp_path / "good" / "manifest.json").read_text())
    assert manifest["counts"] == {"train-split.jsonl": {"rows": 2, "left_out": len(cases) - 1}}
    rows.write_text(lines[0])
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0 and "1 were found good before, 0 to check" in result.stdout, result.stdout
    assert len((directory / "checked.jsonl").read_text().splitlines()) == len(cases)  # what is known of others stays
    rows.write_text(lines[2] + json.dumps(row("some__calc-1", project, patch=no_fix)) + "\n")
    command.remove("--golden")  # what failed with its tests does not become good without, and another row is another
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 1 and "0 were found good before, 2 to check" in result.stdout, result.stdout
    assert "0 of 2 images are good (others: 2 golden)" in result.stdout, result.stdout


@pytest.mark.skipif(WITHOUT, reason=NO_APPTAINER)
def test_apptainer_runs_what_was_made_without_it(made):
    container = Container(apptainer=True, seconds=60)
    said = run_in(container, made.stripped, ["sh", "-c", "touch /made && cat /testbed/calc.py && echo $A $PWD"])
    assert said == f"{WRONG}b c /\n"


@pytest.mark.skipif(WITHOUT, reason=NO_APPTAINER)
def test_what_apptainer_made_runs_with_and_without_it(made, tmp_path):
    make_image(made, tmp_path / "sif", "--converter", "apptainer")
    (image,) = (tmp_path / "sif").glob("*.sif")
    assert json.loads((tmp_path / "sif" / "inventory.jsonl").read_text())["tool"] == "apptainer"
    for container in (CONTAINER, Container(apptainer=True, seconds=60)):
        said = run_in(container, image, ["sh", "-c", "touch /made && cat /testbed/calc.py && echo $A $PWD"])
        assert said == f"{WRONG}b c /\n"
