"""What comes beside a blend, question sources from the hub and side files from GitHub, from hosts that misbehave."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from loopback_hub import Handler, Hub, broken_off, environment, running_hub, status
from pyarrow import parquet
from speed import patiently

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
DATASET, COMMIT = "org/math", "0123456789abcdef0123456789abcdef01234567"
TABLES = {"a.csv": b"id,name\n" * 40_000, "more/b.csv": b"id,mail\n" * 100}
TOKEN = "for-the-hub-alone"
NOWHERE = Hub(DATASET, COMMIT, url="http://127.0.0.1:1")

Run = Callable[..., subprocess.CompletedProcess[str]]


def parquet_of(num_rows: int) -> bytes:
    records = [{"prompt": [{"content": f"q{n}"}], "reward_model": {"ground_truth": str(n)}} for n in range(num_rows)]
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), content)
    return content.getvalue()


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"data/math-00000-of-00001.parquet": parquet_of(20_000), "README.md": b"x"}
    raw = {f"org/gym/{COMMIT}/tables/{name}": content for name, content in TABLES.items()}
    with running_hub(Hub(DATASET, COMMIT, files, small={"README.md"}, raw=raw)) as hub:
        yield hub


@pytest.fixture
def place(tmp_path: Path) -> Path:
    files = {name: {"bytes": len(text), "sha256": sha256(text).hexdigest()} for name, text in TABLES.items()}
    side = {"blends": ["rlvr1"], "repository": "org/gym", "revision": COMMIT, "path": "tables", "files": files}
    (tmp_path / "side.yaml").write_text(yaml.safe_dump({"side_files": {"office": side}}), encoding="utf-8")
    reference = {"row": 2, "question_template": "Solve: {question}"}
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"dataset": "m", "_hf_placeholder": reference}) + "\n", encoding="utf-8"
    )
    write_sources(tmp_path, COMMIT)
    return tmp_path


def write_sources(place: Path, revision: str) -> None:
    source = {"dataset": DATASET, "split": "math", "style": "skywork", "revision": revision}
    source |= {"question": ["prompt", 0, "content"], "answer": ["reward_model", "ground_truth"]}
    (place / "s.yaml").write_text(yaml.safe_dump({"sources": {"m": source}}), encoding="utf-8")


def side_files(place: Path, out: Path) -> list[str]:
    """Return the command that brings the side files to `out`."""
    options = ["--out", str(out), "--table", str(place / "side.yaml"), "--back-off", "0.01"]
    return [sys.executable, "-m", "tools.data.side_files", *options]


def fill(place: Path, out: Path) -> list[str]:
    """Return the command that brings a source to `out` and fills one row from it."""
    files = ["--in", str(place / "b.jsonl"), "--out", str(out / "f.jsonl"), "--sources", str(place / "s.yaml")]
    return [sys.executable, "-m", "tools.data.fill", *files]


COMMANDS = pytest.mark.parametrize(("command", "kind"), [(side_files, "raw"), (fill, "get")])


def run(command: list[str], place: Path, hub: Hub, **more: str) -> subprocess.CompletedProcess[str]:
    environ = environment(place, hub, **{"HF_TOKEN": TOKEN, **more})
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patiently(120), check=False
    )


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def faults() -> list[Any]:
    return [
        status(429, Retry_After="1"),
        broken_off(0.3),
        broken_off(0.5, reset=True),
        broken_off(0.0, reset=True),
        status(500),
    ]


@COMMANDS
def test_every_passing_fault_is_survived(command: Any, kind: str, place: Path, hub: Hub) -> None:
    hub.faults["info"], hub.faults[kind] = [status(503)], faults()
    start = time.monotonic()
    result = run(command(place, place / "out"), place, hub)
    assert result.returncode == 0, result
    assert time.monotonic() - start > 1.0  # as Retry-After asks
    assert "HTTP 429; trying again in 1.0 s" in result.stdout
    assert not hub.faults[kind]
    ranges = [int(request.split()[1][:-1]) for request in hub.requests if request.startswith(f"{kind} ")]
    assert ranges, hub.requests
    assert ranges == sorted(ranges)  # what had come was never asked for again
    assert "raw" not in hub.with_token
    before = len(hub.requests)
    assert "up to date" in run(command(place, place / "out"), place, hub).stdout
    assert len(hub.requests) == before


@COMMANDS
def test_kills_leave_no_trace(command: Any, kind: str, place: Path, hub: Hub) -> None:
    def slow(handler: Handler) -> bool:
        time.sleep(0.05)
        return broken_off(0.1)(handler)

    assert run(command(place, place / "reference"), place, hub).returncode == 0
    rng = random.Random(5)
    for _ in range(3):
        asked, hub.faults[kind] = len(hub.requests), [slow] * 100
        with subprocess.Popen(
            command(place, place / "out"),
            cwd=ROOT,
            env=environment(place, hub),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            deadline = time.monotonic() + patiently(60)
            while not has_parts(hub.requests[asked:], kind) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.1))
            assert process.poll() is None
            process.kill()
    assert [path for path in files_in(place / "out") if path.endswith(".partial")]
    asked, hub.faults[kind] = len(hub.requests), []
    assert run(command(place, place / "out"), place, hub).returncode == 0
    assert has_parts(hub.requests[asked:], kind)  # it went on where the last one was killed
    assert files_in(place / "out") == files_in(place / "reference")


def has_parts(requests: list[str], kind: str) -> bool:
    return any(request.startswith(f"{kind} ") for request in requests)


@pytest.mark.parametrize("change", [lambda text: text[:-5] + b"?????", lambda text: text[:-9], lambda text: text * 2])
@COMMANDS
def test_another_content_under_the_pinned_commit_is_refused_at_once(
    command: Any, kind: str, place: Path, hub: Hub, change: Callable[[bytes], bytes]
) -> None:
    hub.faults[kind] = [lambda handler: handler.answer(200, change(handler.content))]
    result = run(command(place, place / "out"), place, hub)
    assert result.returncode == 2, result
    host, variable = ("GitHub", "GITHUB_RAW_ENDPOINT") if kind == "raw" else ("the hub", "HF_ENDPOINT")
    assert f"{host} or a mirror changed under the pinned commit; check {variable}" in result.stderr
    assert hub.requests.count(kind) == len([request for request in hub.requests if request.startswith(kind)]) == 1
    assert not [path for path in files_in(place / "out") if not path.endswith(".partial")]


def refused(command: Any, kind: str, fault: Any, place: Path, hub: Hub) -> str:
    """Run a command whose first request has a fault; return its one line of error. Nothing is asked twice."""
    hub.faults[kind] = [fault]
    result = run(command(place, place / "out"), place, hub)
    assert result.returncode == 2, result
    assert hub.requests == [kind]
    (line,) = result.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (status(401), ["HTTP 401", "this address gets no token", "GITHUB_RAW_ENDPOINT"]),
        (status(403), ["HTTP 403", "this address gets no token"]),
        (status(404), ["HTTP 404", "correct repository, revision, path or name"]),
        (status(429, Retry_After="86400"), ["HTTP 429", "wait 86400 s", "name a mirror in GITHUB_RAW_ENDPOINT"]),
    ],
)
def test_a_refusal_of_side_files_is_named(place: Path, hub: Hub, fault: Any, messages: list[str]) -> None:
    line = refused(side_files, "raw", fault, place, hub)
    assert line.startswith(f"org/gym@{COMMIT[:12]}: a.csv: ")
    assert all(message in line for message in messages), line
    assert "HF_" not in line


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (status(401), ["HTTP 401", "the token is not valid"]),
        (status(403, X_Error_Code="GatedRepo"), ["gated", f"https://huggingface.co/datasets/{DATASET}"]),
        (status(404, X_Error_Code="RepoNotFound"), ["no such data set", "HTTP 404"]),
        (status(404, X_Error_Code="RevisionNotFound"), ["no such commit"]),
        (lambda handler: handler.answer(200, b"<html>"), ["other than JSON", "HF_ENDPOINT"]),
    ],
)
def test_a_refusal_of_a_source_is_named(place: Path, hub: Hub, fault: Any, messages: list[str]) -> None:
    line = refused(fill, "info", fault, place, hub)
    assert line.startswith(f"{DATASET}@{COMMIT[:12]}: ")
    assert all(message in line for message in messages), line


def test_no_other_host_sees_the_token(place: Path, hub: Hub) -> None:
    with running_hub(Hub(DATASET, COMMIT, hub.files, raw=hub.raw)) as other:
        hub.token, hub.store = TOKEN, other.url
        assert run(fill(place, place / "out"), place, hub).returncode == 0
        assert run(side_files(place, place / "out"), place, hub, GITHUB_RAW_ENDPOINT=other.url).returncode == 0
    assert hub.with_token == {"info"}
    assert (other.requests, other.with_token) == (["get", "raw", "raw"], set())


@COMMANDS
def test_a_network_that_is_not_there_is_one_error_and_a_copy_needs_none(
    command: Any, kind: str, place: Path, hub: Hub
) -> None:
    start = time.monotonic()
    result = run(command(place, place / "out"), place, NOWHERE)
    assert result.returncode == 2, result
    assert time.monotonic() - start < patiently(60)
    (line,) = result.stderr.splitlines()[-1:]
    assert ": no connection to 127.0.0.1 ([Errno 111] Connection refused), 4 times in a row" in line
    assert "proxy" in line
    assert ("GITHUB_RAW_ENDPOINT" if kind == "raw" else "HF_ENDPOINT") in line
    assert files_in(place / "out") == {}

    assert run(command(place, place / "there"), place, hub).returncode == 0
    shutil.copytree(place / "there", place / "here")
    copied = run(command(place, place / "here"), place, NOWHERE)
    assert copied.returncode == 0, copied
    assert "up to date" in copied.stdout


@COMMANDS
def test_a_wrong_address_is_named(command: Any, kind: str, place: Path, hub: Hub) -> None:
    variable = "GITHUB_RAW_ENDPOINT" if kind == "raw" else "HF_ENDPOINT"
    result = run(command(place, place / "out"), place, hub, **{variable: "mirror.example/hub"})
    assert result.returncode == 2, result
    message = f"{variable}: got 'mirror.example/hub', expected an address: https://HOST; correct it, or unset it"
    assert result.stderr.splitlines() == [message]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HF_TOKEN", "\u201chf_x\u201d", "HF_TOKEN: got '\u201c' in it, expected letters and digits"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:1", "HTTPS_PROXY, HTTP_PROXY or ALL_PROXY: got Using SOCKS proxy"),
    ],
)
def test_a_wrong_variable_is_named(place: Path, hub: Hub, variable: str, value: str, message: str) -> None:
    result = run(fill(place, place / "out"), place, hub, **{variable: value})
    assert result.returncode == 2, result
    (line,) = result.stderr.splitlines()
    assert line.startswith(message)
    assert hub.requests == []


def test_a_branch_of_a_source_is_followed_only_on_request(place: Path, hub: Hub) -> None:
    write_sources(place, "main")
    refused = run(fill(place, place), place, hub)
    assert refused.returncode == 2
    assert "sources.m.revision: got 'main', expected a commit" in refused.stderr
    assert hub.requests == []

    moving = run([*fill(place, place), "--allow-moving-revision"], place, hub)
    assert moving.returncode == 0, moving
    assert json.loads((place / "f.jsonl").read_text(encoding="utf-8"))["question"] == "q2"
    recorded = json.loads((place / "f.jsonl.manifest.json").read_text(encoding="utf-8"))["parameters"]["sources"]["m"]
    assert (recorded["revision"], recorded["moving_revision"]) == (COMMIT, "main")

    write_sources(place, COMMIT)
    asked = len(hub.requests)
    pinned = run(fill(place, place), place, hub)
    assert "parameters changed" in pinned.stdout
    assert len(hub.requests) == asked  # the file was there already
    assert "up to date" in run(fill(place, place), place, hub).stdout
