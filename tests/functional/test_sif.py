"""SIF files from a real registry on loopback, through a proxy that limits, cuts, corrupts and loses what it passes on.

Images are made by skopeo, umoci, mksquashfs and siftool; where Apptainer is there it makes and runs one too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback_hub import Hub, environment, running_hub
from loopback_registry import Faults, Pusher, busybox_root, layer, login, start_proxy, start_registry
from speed import patiently

pytestmark = pytest.mark.functional

NEEDED = ("docker-registry", "skopeo", "umoci", "mksquashfs", "siftool", "bwrap", "busybox", "unshare", "mount")
NUM_IMAGES = 30
MISSING, BROKEN, TOO_LARGE = {5, 14, 23}, {7}, {19}  # without an image, with a layer that never comes right, too large
BOMB_BYTES = 400 << 20  # unpacked: more than the disk of the test, whatever the registry says of the layer
DISK_BYTES = 160 << 20
DATASETS = ("princeton-nlp/SWE-bench_Verified", "SWE-Gym/SWE-Gym", "R2E-Gym/R2E-Gym-Subset")


@dataclass(frozen=True)
class Example:
    """One instance, its row, and what must come of it."""

    number: int

    @property
    def instance(self) -> str:
        return (
            f"some__Project-{self.number}",
            f"Project-MONAI__MONAI-{self.number}",
            f"aio-libs__Aiohttp-{self.commit}",
        )[self.number % 3]

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.number).encode()).hexdigest()

    @property
    def repository(self) -> str:
        return (
            f"swebench/sweb.eval.x86_64.some_1776_project-{self.number}",
            f"xingyaoww/sweb.eval.x86_64.project-monai_s_monai-{self.number}",
            "namanjain12/aiohttp_final",
        )[self.number % 3]

    @property
    def tag(self) -> str:
        return self.commit if self.number % 3 == 2 else "latest"

    @property
    def file(self) -> str:
        return (
            f"swebench_sweb.eval.x86_64.some_1776_Project-{self.number}.sif",
            f"swegym_sweb.eval.x86_64.Project-MONAI_s_MONAI-{self.number}.sif",
            f"r2egym_aiohttp_final_{self.commit}.sif",
        )[self.number % 3]

    @property
    def row(self) -> dict[str, object]:
        metadata = {
            "instance_id": self.instance,
            "dataset_name": DATASETS[self.number % 3],
            "base_commit": self.commit,
            "instance_dict": json.dumps({"repo": "some/project"}),
        }
        return {"responses_create_params": {"input": [], "metadata": metadata}}


EXAMPLES = [Example(number) for number in range(NUM_IMAGES)]
GOOD = [example for example in EXAMPLES if example.number not in MISSING | BROKEN | TOO_LARGE]


@dataclass
class Site:
    """A registry with its images, behind its proxy."""

    host: str
    faults: Faults
    environ: dict[str, str]
    rows: Path
    own_layers: dict[int, str]  # digest of the layer that only one image has

    def command(self, directory: Path, *words: str) -> list[str]:
        options = ["--sif-dir", str(directory), "--rows", str(self.rows), "--mirror", f"{self.host}/cache"]
        options += ["--converter", "umoci", "--per-second", "200", "--back-off", "0.1", "--workers", "3"]
        return [sys.executable, "-m", "tools.task_images.build", *options, *words]

    def make(self, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.command(directory, *words)
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=patiently(240), check=False
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    missing = [program for program in NEEDED if shutil.which(program) is None]
    assert not missing, f"these programs are missing, .ci/run installs them: {missing}"
    place = tmp_path_factory.mktemp("registry")
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(example.row) + "\n" for example in EXAMPLES), encoding="utf-8")
    with start_registry(place / "registry") as url, start_proxy(url) as (host, faults):
        pusher, base, own = Pusher(url), layer(busybox_root()), {}
        for example in EXAMPLES:
            if example.number in MISSING:
                continue
            files = {"testbed": None, "testbed/ID": f"{example.instance}\n".encode()}
            if example.number in TOO_LARGE:
                files["testbed/zeros"] = bytes(BOMB_BYTES)
            layers = [base, layer(files)]
            pusher.push(f"cache/{example.repository}", example.tag, layers, ["PATH=/bin", "MARK=it's set"])
            own[example.number] = hashlib.sha256(layers[1][1]).hexdigest()
        faults.broken = {own[number] for number in BROKEN}
        yield Site(host, faults, login(place / "docker", host), rows, own)


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", directory], check=True, timeout=patiently(10)
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True, timeout=patiently(30))


def sif_files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.sif"))}


def failed(directory: Path) -> dict[str, str]:
    path = directory / "images.failed"
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {entry["instance"]: entry["cause"] for entry in entries}


def plan_faults(site: Site) -> None:
    """Faults that pass: every kind, on several images, some more than once, and on the layer that all share."""
    site.faults.limited = {"monai-1/": 2, "project-0/": 1, "aiohttp_final": 3}
    site.faults.cut = {site.own_layers[number]: 1 + number % 3 for number in (0, 3, 4, 8, 11, 15)} | {"/blobs/": 4}
    site.faults.down = {"project-6/": 1, "monai-10/": 2}


@pytest.fixture(scope="module")
def killed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A directory on a small disk in which runs were killed and one ended, and what that one printed."""
    chance = random.Random(3)
    with small_disk(tmp_path_factory.mktemp("disk") / "sif") as directory:
        plan_faults(site)
        said = []
        for kill in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            before = len(list(directory.glob("*.sif")))
            process = subprocess.Popen(site.command(directory), env=site.environ, stdout=subprocess.DEVNULL)
            wait_for(lambda: len(list(directory.glob("*.sif"))) >= before + 3, process)  # noqa: B023
            time.sleep(chance.uniform(0, 0.3))
            process.send_signal(kill)
            process.wait(timeout=patiently(30))
            said.append(str(process.returncode))
            wait_for(lambda: not programs_at_work(directory), None)
            if kill == signal.SIGTERM:
                assert not list(directory.glob(".sif-work*")), "a polite end cleans up itself"
        result = site.make(directory)
        yield directory, [*said, str(result.returncode), result.stdout, result.stderr]


def wait_for(condition: object, process: subprocess.Popen[bytes] | None) -> None:
    end = time.monotonic() + patiently(60)
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.02)


def programs_at_work(directory: Path) -> list[str]:
    """Return the commands of all processes that name the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in command and int(entry.name) != os.getpid():
            found.append(command)
    return found


def test_ends_with_exactly_the_good_images(killed):
    directory, said = killed
    assert said[:4] == ["-9", "-9", "143", "1"], said
    assert set(sif_files(directory)) == {example.file for example in GOOD}, said[5]
    assert failed(directory) == {
        **{EXAMPLES[number].instance: "missing" for number in MISSING},
        **{EXAMPLES[number].instance: "digest" for number in BROKEN},
        **{EXAMPLES[number].instance: "space" for number in TOO_LARGE},
    }
    left = sorted(path.name for path in directory.iterdir() if path.suffix != ".sif")
    assert left == ["images.failed", "inventory.jsonl"]  # nothing of the work


def test_each_fault_happened(site, killed):
    seen = site.faults.seen
    assert seen["limited"] == 6 and seen["down"] == 3, seen
    assert seen["cut"] >= 10 and seen["login"] > 0 and seen["resumed"] > 0, seen
    assert site.faults.early <= 2 * seen["limited"]  # what the other two workers had on the way at each 429


def test_the_ledger_says_what_the_files_are(site, killed):
    directory, _ = killed
    files = sif_files(directory)
    entries = {
        json.loads(line)["file"]: json.loads(line) for line in (directory / "inventory.jsonl").open(encoding="utf-8")
    }
    assert {name: entry["sha256"] for name, entry in entries.items() if name in files} == files
    assert all(entry["digest"].startswith("sha256:") and not entry["stripped"] for entry in entries.values())


def test_nothing_is_pulled_twice(site, killed):
    directory, _ = killed
    before, times = site.faults.seen["blob"], {path: path.stat().st_mtime_ns for path in directory.glob("*.sif")}
    site.faults.broken = set()  # the registry has been repaired
    result = site.make(directory, "--retry-failed")
    assert result.returncode == 1
    assert "5 images needed, 0 there, 5 to build" in result.stdout
    assert failed(directory) == {EXAMPLES[n].instance: "missing" for n in MISSING} | {
        EXAMPLES[n].instance: "space" for n in TOO_LARGE
    }
    assert (directory / EXAMPLES[7].file).is_file()
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())
    assert site.faults.seen["blob"] - before < 12  # base, own layer and configuration of two images, one of them twice


def test_work_that_does_not_fit_can_be_done_on_another_disk(site, killed, tmp_path):
    directory, _ = killed
    result = site.make(directory, "--retry-failed", "--tmp", str(tmp_path / "work"))
    assert result.returncode == 1, result.stdout
    assert failed(directory) == {EXAMPLES[number].instance: "missing" for number in MISSING}
    assert (directory / EXAMPLES[19].file).is_file()
    assert list((tmp_path / "work").iterdir()) == []


def test_a_registry_that_wants_a_password_is_named(site, tmp_path):
    command = site.command(tmp_path / "sif", "--check-only")
    environ = {**site.environ, "DOCKER_CONFIG": str(tmp_path)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patiently(60), check=False)
    assert result.returncode == 1
    assert "the registry has 0 images" in result.stdout and "30 images cannot be pulled" in result.stdout
    assert f"{EXAMPLES[0].instance}: access: " in result.stdout and "`docker login`" in result.stdout


def list_all(place: Path, hub: Hub, revision: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Ask for the images of all instances of one data set, at a registry where nothing listens."""
    entry = {"revision": revision, "split": "train", "instances": 2}
    (place / "table.yaml").write_text(json.dumps({"datasets": {"R2E-Gym/R2E-Gym-Subset": entry}}), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "tools.task_images.build",
        "--sif-dir",
        str(place / "sif"),
        "--all",
        "--check-only",
    ]
    command += ["--datasets", str(place / "table.yaml"), "--mirror", "127.0.0.1:1", "--retries", "1", *words]
    environ = environment(place, hub)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patiently(60), check=False)


def test_all_instances_of_a_data_set_are_found(tmp_path):
    table = pa.table({"docker_image": ["namanjain12/numpy_final:0a", "namanjain12/pandas_final:1b"], "x": [1, 2]})
    pq.write_table(table, tmp_path / "table")
    files = {"data/train-00000-of-00001.parquet": (tmp_path / "table").read_bytes(), "README.md": b"x"}
    commit, nowhere = "d" * 40, Hub("", "", url="http://127.0.0.1:1")
    unreached = list_all(tmp_path, nowhere, commit)
    assert unreached.returncode == 2
    assert "no connection to 127.0.0.1" in unreached.stderr and "HF_ENDPOINT" in unreached.stderr
    with running_hub(Hub("R2E-Gym/R2E-Gym-Subset", commit, files)) as hub:
        refused = list_all(tmp_path, hub, "main")
        assert refused.returncode == 2 and hub.requests == []
        assert "datasets.R2E-Gym/R2E-Gym-Subset.revision: got 'main', expected a commit" in refused.stderr
        followed = list_all(tmp_path, hub, "main", "--allow-moving-revision")
    assert f"R2E-Gym/R2E-Gym-Subset main is now at commit {commit}" in followed.stdout
    pinned = list_all(tmp_path, nowhere, commit)  # the table is there
    for result in (followed, pinned):
        assert f"sif: R2E-Gym/R2E-Gym-Subset@{commit}: 2 instances so far" in result.stdout, result
        assert "sif: 2 images needed, 0 there, 2 to build" in result.stdout
        assert "http://127.0.0.1:1: the registry never answered" in result.stderr
