"""Downloading a blend from a hub on loopback that misbehaves in every way a hub can."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_hub import Handler, Hub, environment, running_hub, status, truncated
from speed import patiently

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
DATASET, ALIAS = "org/blends", "org/3-blends"
COMMIT, OTHER_COMMIT = "0123456789abcdef0123456789abcdef01234567", "f" * 40
ROWS = b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 1000) for n in range(3000))


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"rlvr1.jsonl": ROWS, "notes.txt": b"small\n", "unrelated.bin": b"never asked for"}
    with running_hub(Hub(DATASET, COMMIT, files, small={"notes.txt"})) as hub:
        yield hub


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_blends(tmp_path)
    return tmp_path


def write_blends(place: Path, *, revision: str | None = COMMIT, rows: int = 3000) -> None:
    files = {"rlvr1.jsonl": {"rows": rows}, "notes.txt": {}}
    entry = {"also_called": [ALIAS], "revision": revision, "blends": {"rlvr1": {"files": files}}}
    (place / "blends.yaml").write_text(yaml.safe_dump({"datasets": {DATASET: entry}}), encoding="utf-8")


def command(place: Path, *arguments: str) -> list[str]:
    fixed = ["--blend", "rlvr1", "--out", str(place / "raw"), "--blends", str(place / "blends.yaml")]
    return [sys.executable, "-m", "tools.data.download", *fixed, "--back-off", "0.01", *arguments]


def download(place: Path, hub: Hub, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(place, *arguments),
        cwd=ROOT,
        env=environment(place, hub, **more),
        capture_output=True,
        text=True,
        timeout=patiently(120),
        check=False,
    )


def require_complete(place: Path) -> dict[str, Any]:
    """Check both files, that nothing else lies beside them, and return the manifest of the blend."""
    names = sorted(path.name for path in (place / "raw").iterdir())
    assert names == ["notes.txt", "notes.txt.manifest.json", "rlvr1.jsonl", "rlvr1.jsonl.manifest.json"]
    assert (place / "raw/rlvr1.jsonl").read_bytes() == ROWS
    assert (place / "raw/notes.txt").read_bytes() == b"small\n"
    return json.loads((place / "raw/rlvr1.jsonl.manifest.json").read_text(encoding="utf-8"))


def test_named_files_are_brought_and_a_rerun_asks_nothing(place: Path, hub: Hub) -> None:
    result = download(place, hub)
    assert (result.returncode, result.stderr.count("100 %")) == (0, 2), result
    digest = sha256(ROWS).hexdigest()
    assert require_complete(place) == {
        "tool": "download",
        "tool_version": "1",
        "parameters": {"dataset": DATASET, "revision": COMMIT, "file": "rlvr1.jsonl"},
        "hub_hash": digest,
        "outputs": [{"file": "rlvr1.jsonl", "sha256": digest, "bytes": len(ROWS), "rows": 3000}],
    }
    assert hub.requests == ["list", "get", "get"]
    rerun = download(place, hub, "--dataset", ALIAS)
    assert f"{ALIAS} is what some of NVIDIA's documents call {DATASET}" in rerun.stdout
    assert rerun.stdout.count("is up to date") == 2
    assert len(hub.requests) == 3
    (place / "raw/rlvr1.jsonl").write_bytes(ROWS[:-1])
    assert "rlvr1.jsonl was edited" in download(place, hub).stdout
    require_complete(place)


def test_every_passing_fault_is_survived(place: Path, hub: Hub) -> None:
    hub.faults["list"] = [status(503), status(429, Retry_After="0"), status(500)]
    hub.faults["get"] = [
        lambda _: False,  # notes.txt comes first
        status(429, Retry_After="1"),
        status(502),
        truncated(ROWS, 1_000_000),
        truncated(ROWS, 700_000, reset=True),
        truncated(ROWS, 0, reset=True),
        status(504),
    ]
    start = time.monotonic()
    result = download(place, hub)
    assert result.returncode == 0, result
    assert time.monotonic() - start > 1.0  # as Retry-After asks
    require_complete(place)
    assert "HTTP 429; trying again in 1.0 s" in result.stdout
    ranges = [int(request[4:-1]) for request in hub.requests if request.startswith("get ")]
    assert ranges, hub.requests
    assert ranges == sorted(ranges)  # what had come was never asked for again
    assert ranges[0] <= 1_000_000


def test_content_that_differs_from_its_hash_is_refused_and_removed(place: Path, hub: Hub) -> None:
    wrong = ROWS[:-5] + b"?????"
    hub.faults["get"] = [lambda _: False, lambda handler: handler.answer(200, wrong)]
    result = download(place, hub)
    assert result.returncode == 2
    assert f"rlvr1.jsonl: got {len(ROWS)} bytes with hash {sha256(wrong).hexdigest()[:16]}" in result.stderr
    assert not list((place / "raw").glob("*rlvr1*"))


def test_a_damaged_or_stale_partial_file_is_not_trusted(place: Path, hub: Hub) -> None:
    raw = place / "raw"
    raw.mkdir()
    damaged, stale = raw / f".rlvr1.jsonl.{sha256(ROWS).hexdigest()[:16]}.partial", raw / ".rlvr1.jsonl.00ff.partial"
    damaged.write_bytes(b"?" * 1000)
    stale.write_bytes(b"of another commit")
    result = download(place, hub)
    assert result.returncode == 0, result
    assert "removing .rlvr1.jsonl.00ff.partial" in result.stdout
    assert "starting over" in result.stdout
    assert hub.requests == ["list", "get", "get 1000-", "get"]
    require_complete(place)


def test_a_partial_file_that_is_too_long_starts_over(place: Path, hub: Hub) -> None:
    (place / "raw").mkdir()
    (place / f"raw/.rlvr1.jsonl.{sha256(ROWS).hexdigest()[:16]}.partial").write_bytes(ROWS + b"more")
    assert download(place, hub).returncode == 0
    require_complete(place)


def test_a_hub_that_ignores_ranges_sends_the_whole_file(place: Path, hub: Hub) -> None:
    hub.faults["get"] = [
        lambda _: False,
        truncated(ROWS, 500_000),
        lambda handler: handler.answer(200, ROWS),
    ]
    assert download(place, hub).returncode == 0
    require_complete(place)


def test_ten_kills_leave_no_trace_in_the_result(place: Path, hub: Hub) -> None:
    def slow(handler: Handler) -> bool:
        time.sleep(0.02)
        return truncated(ROWS, 200_000)(handler)

    rng = random.Random(7)
    reference = place / "reference"
    reference.mkdir()
    write_blends(reference)
    assert download(reference, hub).returncode == 0
    for _ in range(10):
        hub.faults["get"] = [slow] * 100
        asked = len(hub.requests)
        with subprocess.Popen(
            command(place), cwd=ROOT, env=environment(place, hub), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            deadline = time.monotonic() + patiently(60)
            while len(hub.requests) == asked and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.3))
            process.kill()
    hub.faults["get"] = []
    assert download(place, hub).returncode == 0
    require_complete(place)
    for path in (reference / "raw").iterdir():
        assert (place / "raw" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (status(401), ["HTTP 401", "set HF_TOKEN"]),
        (status(403, X_Error_Code="GatedRepo"), ["gated", f"https://huggingface.co/datasets/{DATASET}", "HF_TOKEN"]),
        (status(403), ["HTTP 403", "accept the terms"]),
        (status(404, X_Error_Code="RevisionNotFound"), ["no such commit", "correct the revision"]),
        (status(404, X_Error_Code="RepoNotFound"), ["no such data set", "HTTP 404", "HF_ENDPOINT"]),
        (status(429, Retry_After="86400"), ["HTTP 429", "wait 86400 s", "HF_TOKEN"]),
        (lambda handler: handler.answer(200, b"<html>"), ["other than JSON", "HF_ENDPOINT"]),
    ],
)
def test_a_refusal_is_named_with_what_to_do(place: Path, hub: Hub, fault: Any, messages: list[str]) -> None:
    hub.faults["list"] = [fault]
    result = download(place, hub)
    assert result.returncode == 2, result
    assert result.stderr.startswith(f"{DATASET}@{COMMIT[:12]}: ")
    for message in messages:
        assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert hub.requests == ["list"]


def test_the_token_is_sent_and_a_wrong_one_named(place: Path, hub: Hub) -> None:
    hub.token = "right"
    assert "the token is not valid" in download(place, hub, HF_TOKEN="wrong").stderr
    assert download(place, hub, HF_TOKEN="right").returncode == 0
    require_complete(place)


def test_it_gives_up_after_the_retries(place: Path, hub: Hub) -> None:
    hub.faults["list"] = [status(503)] * 9
    result = download(place, hub, "--retries", "2")
    assert result.returncode == 2
    assert "HTTP 503, 3 times in a row" in result.stderr
    assert hub.requests == ["list"] * 3


def test_a_hub_that_changes_under_the_pinned_commit_is_refused(place: Path, hub: Hub) -> None:
    hub.faults["list"] = [lambda _: False]

    def changed(handler: Handler) -> bool:
        return handler.answer(200, b"small\n", X_Repo_Commit=OTHER_COMMIT)

    hub.faults["get"] = [changed]
    result = download(place, hub)
    assert result.returncode == 2
    assert f"got commit {OTHER_COMMIT}, expected commit {COMMIT}" in result.stderr


@pytest.mark.parametrize(
    ("revision", "arguments", "message"),
    [
        ("main", [], "got 'main', expected a commit (40 hex digits)"),
        (None, [], "no commit is given"),
        (COMMIT, ["--revision", "main"], "--revision: got 'main'"),
        (OTHER_COMMIT, [], "no such commit"),
        (COMMIT, ["--dataset", "org/else"], f"got org/else, expected {DATASET} or {ALIAS}"),
        (COMMIT, ["--blend", "rlvr9"], "got rlvr9, expected one of rlvr1"),
    ],
)
def test_only_a_known_blend_at_a_commit(
    place: Path, hub: Hub, revision: str | None, arguments: list[str], message: str
) -> None:
    write_blends(place, revision=revision)
    result = download(place, hub, *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_another_number_of_rows_than_published_is_an_error(place: Path, hub: Hub) -> None:
    write_blends(place, rows=2999)
    result = download(place, hub)
    assert result.returncode == 2
    assert "rlvr1.jsonl: got 3000 rows, expected 2999, as published" in result.stderr
