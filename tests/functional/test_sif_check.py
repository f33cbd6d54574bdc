"""One image with a repository and pytest in it: made without its later history, run, checked, its tests run twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from loopback_registry import Pusher, login, start_proxy, start_registry
from small_root import require, write_root
from speed import patiently
from swe_project import CANARY, WRONG, Project, git, write_project

from recipes.confinement.jails import AS_NOBODY
from recipes.environments.swe.containers.places import MOUNT_IMAGE
from tools.task_images import run as sif_run
from tools.task_images.convert import MAX_PROCESSES, Repository, strip_history
from tools.task_images.registry.references import ImageError
from tools.task_images.run import ImageRunner, run_in

pytestmark = pytest.mark.functional

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


def row(instance: str, project: Project, **changed: str) -> dict[str, object]:
    facts = {
        "repo": "some/calc",
        "base_commit": project.base,
        "problem_statement": "calc adds wrongly",
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
    root = write_root(place / "root", programs=["bash", "comm", "find", "git", "patch"], python=True)
    (root / "bin/bash").unlink(missing_ok=True)
    (root / "bin/bash").symlink_to("/usr/bin/bash")
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
        (place / "one.jsonl").write_text(json.dumps(row("some__calc-1", project)) + "\n", encoding="utf-8")
        made = Made(project, place / "one.jsonl", host, login(place / "docker", host), place / "a.sif", place / "b.sif")
        make_image(made, place / "sif", "--converter", "umoci", "--strip-history").rename(made.stripped)
        make_image(made, place / "sif", "--converter", "umoci").rename(made.whole)
        yield made


def make_image(made: Made, directory: Path, *words: str) -> Path:
    """Make the one image and return it."""
    command = [sys.executable, "-m", "tools.task_images.build", "--sif-dir", directory, "--rows", made.rows]
    command += ["--mirror", made.host, "--compression", "lz4", *words]
    result = subprocess.run(
        command, env=made.environ, capture_output=True, text=True, timeout=patiently(200), check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return directory / "swebench_sweb.eval.x86_64.some_1776_calc-1.sif"


CONTAINER = ImageRunner(apptainer=False, size="256m", seconds=60)
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


def test_a_user_without_rights_runs_it_too(made):
    require("setpriv")
    with sif_run.work_directory() as place:
        image = place / "image.sif"
        shutil.copy(made.stripped, image)
        words = sif_run.words_of(CONTAINER, image, place / "user" / "work", place / "inputs")
        start = [shutil.copy(AS_NOBODY, place), *words[1:]]
        for script in (sif_run.RUN, MOUNT_IMAGE):
            start[start.index(str(script))] = shutil.copy(script, place / script.name)
        (place / "user").mkdir()
        (place / "user/work").mkdir()
        for directory in (place / "user", place / "user/work"):
            os.chown(directory, 65534, 65534)
        command = [*open_fuse(place), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *start, "sh", "-c"]
        command.append("touch /made && cat /testbed/calc.py")
        result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=patiently(60), check=False)
        assert (result.returncode, result.stdout) == (0, WRONG), result.stderr
        assert programs_with(f"squashfuse -f -o offset={sif_run.offset_of(image)} {place}") == []


def open_fuse(place: Path) -> list[str]:
    """Return the words of a command that may use FUSE as every user may where udev runs, on this machine, too."""
    script = 'mknod --mode=666 "$0/fuse" c 10 229; mount --bind "$0/fuse" /dev/fuse; exec "$@"'
    return ["unshare", "--mount", "--", "bash", "-euc", script, str(place)]


def programs_with(words: str) -> list[str]:
    """Return the pids of the processes whose command line begins with these words."""
    lines = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [str(pid) for pid, line in lines.items() if line.startswith(words)]


HOSTILE = r"""
exec 2>&1
echo "rights: $(grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status | tr -d '\n\t')"
echo "outside: $(tr -s ' ' </proc/self/uid_map)"
for file in /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /proc/sys/net/ipv4/ip_forward /proc/sysrq-trigger; do
  (echo 1 >"$file") 2>/dev/null && echo "written: $file"
done
mkdir -p /tmp/m && mount -t tmpfs tmpfs /tmp/m 2>/dev/null && echo mounted
mknod /tmp/disk b 254 0 2>/dev/null && echo "made a device"
ls /proc | grep -c '^[0-9]' | sed 's/^/processes: /'
cat /proc/1/environ | tr '\0' '\n' | grep -i canary
cat /proc/net/dev | grep -c : | sed 's/^/interfaces: /'
(echo x >/inputs/x) 2>/dev/null && echo "wrote to inputs"
ls -d /home /work /opt /mnt /etc/shadow 2>/dev/null
ls /dev | tr '\n' ' '
sleep 61.803 &
"""


def test_a_hostile_image_has_no_rights_on_this_machine(made, tmp_path, monkeypatch):
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "canary")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for directory in (tmp_path.parent, tmp_path):
        directory.chmod(0o711)
    lines = run_in(CONTAINER, made.stripped, ["sh", "-c", HOSTILE], inputs=inputs).splitlines()
    assert lines[0] == "rights: CapEff:0000000000000000CapBnd:0000000000000000NoNewPrivs:1"
    assert lines[1].split()[1:] == ["0", "0", "1"]  # root inside is one user outside, in two steps
    assert int(lines[2].removeprefix("processes: ")) <= 6
    assert lines[3] == "interfaces: 1"
    assert set(lines[4].split()) <= {
        "console",
        "core",
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
    } | {"stdin", "stdout", "tty", "urandom", "zero"}, lines
    assert lines[5:] == []
    assert list(inputs.iterdir()) == []
    assert programs_with("sleep 61.803") == []  # it ended with the command


def test_a_root_in_an_image_is_nobody_outside(made):
    with sif_run.work_directory() as place:
        words = sif_run.words_of(CONTAINER, made.stripped, place / "work", place / "inputs")
        process = subprocess.Popen([*words, "sh", "-c", "id -u; exec sleep 62.831"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        end = time.monotonic() + patiently(20)
        while not (found := programs_with("sleep 62.831")):
            assert time.monotonic() < end
            time.sleep(0.05)
        try:
            for pid in (*found, *programs_with("squashfuse -f")):
                status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                assert re.search(r"^Uid:\s+65534\s+65534\s+65534\s+65534$", status, re.MULTILINE), status
        finally:
            process.kill()
            process.wait()


def test_a_directory_that_is_made_again_is_empty(made):
    script = "rm -r /testbed && mkdir /testbed && ls -A /testbed && echo end"
    assert run_in(CONTAINER, made.stripped, ["sh", "-c", script]) == "end\n"


HOSTILE_SETTINGS = {
    "core.hooksPath": "/repository/hooks",
    "core.fsmonitor": "touch /repository/ran",
    "core.sshCommand": "touch /repository/ran",
    "core.alternateRefsCommand": "touch /repository/ran",
    "core.repositoryFormatVersion": "1",
    "extensions.partialClone": "origin",
    "protocol.ext.allow": "always",
    "remote.origin.promisor": "true",
    "remote.origin.url": "ext::touch /repository/ran",
    "alias.rev-list": "!touch /repository/ran",
    "include.path": "/etc/passwd",
}
ATTACK = """!exec 2>&1; id -u; grep CapEff /proc/self/status; ls / | tr '\\n' ' '; echo; grep -c : /proc/net/dev;
(echo 1 >/proc/sys/vm/drop_caches) 2>/dev/null && echo written; (echo x >/usr/x) 2>/dev/null && echo written; true"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes nobody")
def test_what_nobody_runs_elsewhere_does_not_count_against_git(tmp_path):
    require("bwrap", "git", "unshare", "setpriv")
    write_project(tmp_path / "testbed")
    many = f"for i in $(seq {MAX_PROCESSES}); do sleep 600 & done; echo started; wait"
    command = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", many]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as sandbox:
        try:
            assert sandbox.stdout.readline() == b"started\n"
            repository = Repository(tmp_path, 60)
            with repository.writable():
                assert len(repository.lines("rev-parse", "HEAD")) == 1
        finally:
            os.killpg(sandbox.pid, signal.SIGKILL)


def test_a_hostile_configuration_of_git_gets_no_rights(tmp_path):
    require("bwrap", "git", "unshare", "setpriv")
    project = write_project(tmp_path / "testbed")
    for hook in ("reference-transaction", "post-rewrite", "pre-auto-gc"):
        (tmp_path / "testbed/.git/hooks" / hook).write_text("#!/bin/sh\ntouch /repository/ran\n", encoding="utf-8")
        (tmp_path / "testbed/.git/hooks" / hook).chmod(0o755)
    for name, value in HOSTILE_SETTINGS.items():
        git(tmp_path / "testbed", "config", name, value)
    for link in ("FETCH_HEAD", "escape"):
        (tmp_path / "testbed/.git" / link).symlink_to("/etc/passwd")
    owner = Path("/etc/passwd").stat().st_uid
    strip_history(tmp_path, {"base_commit": project.base}, seconds=60)
    repository = Repository(tmp_path, 60)
    with repository.writable():
        with pytest.raises(ImageError):
            repository.git("cat-file", "-p", "1" * 40)  # it would be fetched from the hostile remote
        assert not (tmp_path / "testbed/.git/ran").exists()
        # As if one of them had run after all:
        user, rights, places, *others = repository.git("-c", f"alias.attack={ATTACK}", "attack").splitlines()
    assert (user, rights.split()) == ("65534", ["CapEff:", "0000000000000000"])
    assert set(places.split()) <= {"bin", "dev", "lib", "lib32", "lib64", "proc", "repository", "sbin", "tmp", "usr"}
    assert others == ["1"]  # one network interface, and nothing written
    assert Path("/etc/passwd").stat().st_uid == owner
    assert (tmp_path / "testbed/.git/HEAD").stat().st_uid == os.getuid()


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
        "some__calc-5": ("golden", {"patch": "no patch at all\n"}),
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
    rows.write_text(plain + "".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "tools.task_images.check", "--sif-dir", directory, "--rows", rows, "--golden"]
    command += ["--runner", runner, "--timeout", "60", "--out", tmp_path / "good"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patiently(200), check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    found = [json.loads(line) for line in (directory / "checked.jsonl").open(encoding="utf-8")]
    causes = {entry["instance"]: entry["cause"] for entry in found}
    assert causes == {name: cause for name, (cause, _) in cases.items()}, found
    assert (directory / "good_instances.txt").read_text(encoding="utf-8") == "some__calc-1\n"
    assert (tmp_path / "good" / "train-split.jsonl").read_text(encoding="utf-8") == plain + lines[0]
    manifest = json.loads((tmp_path / "good" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"] == {"train-split.jsonl": {"rows": 2, "left_out": len(cases) - 1}}
    rows.write_text(lines[0], encoding="utf-8")
    result = subprocess.run(command, capture_output=True, text=True, timeout=patiently(100), check=False)
    assert result.returncode == 0 and "1 were found good before, 0 to check" in result.stdout, result.stdout
    assert len((directory / "checked.jsonl").read_text(encoding="utf-8").splitlines()) == len(
        cases
    )  # what is known of others stays
    rows.write_text(lines[2] + json.dumps(row("some__calc-1", project, patch=no_fix)) + "\n", encoding="utf-8")
    command.remove("--golden")  # what failed with its tests does not become good without, and another row is another
    result = subprocess.run(command, capture_output=True, text=True, timeout=patiently(100), check=False)
    assert result.returncode == 1 and "0 were found good before, 2 to check" in result.stdout, result.stdout
    assert "0 of 2 images are good (others: 2 golden)" in result.stdout, result.stdout


@pytest.mark.skipif(WITHOUT, reason=NO_APPTAINER)
def test_apptainer_runs_what_was_made_without_it(made):
    container = ImageRunner(apptainer=True, seconds=60)
    said = run_in(container, made.stripped, ["sh", "-c", "touch /made && cat /testbed/calc.py && echo $A $PWD"])
    assert said == f"{WRONG}b c /\n"


@pytest.mark.skipif(WITHOUT, reason=NO_APPTAINER)
def test_what_apptainer_made_runs_with_and_without_it(made, tmp_path):
    make_image(made, tmp_path / "sif", "--converter", "apptainer")
    (image,) = (tmp_path / "sif").glob("*.sif")
    assert json.loads((tmp_path / "sif" / "inventory.jsonl").read_text(encoding="utf-8"))["tool"] == "apptainer"
    for container in (CONTAINER, ImageRunner(apptainer=True, seconds=60)):
        said = run_in(container, image, ["sh", "-c", "touch /made && cat /testbed/calc.py && echo $A $PWD"])
        assert said == f"{WRONG}b c /\n"
