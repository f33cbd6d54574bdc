"""A host that sends a byte now and then is given up, whether it goes on for ever or breaks off in between."""

from __future__ import annotations

import hashlib
import itertools
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.errors import DataError
from recipes.retry import RetryPolicy, TransientError
from tests.unit.tools.task_images.registry.loopback_server import serving
from tools.data.files import hosts
from tools.data.files.hosts import Tries, fast_enough
from tools.data.files.transfer import RemoteFile, download_file
from tools.task_images.registry.client import Credentials, Registry
from tools.task_images.registry.references import ImageError, Reference

SIZE = 40
POLICY = RetryPolicy(max_retries=2, first_seconds=0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in the only entry; a test sets it."""
    now = [0.0]
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge a transfer after a fifth of a second."""
    monkeypatch.setattr(hosts, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "SHORT_SECONDS", 0.1)


def drip(request: BaseHTTPRequestHandler) -> None:
    """Send a byte at a time, from where the last try ended."""
    start = int((request.headers["Range"] or "bytes=0-")[len("bytes=") : -1])
    request.send_response(206 if start else 200)
    request.send_header("Content-Length", str(SIZE - start))
    if start:
        request.send_header("Content-Range", f"bytes {start}-{SIZE - 1}/{SIZE}")
    request.end_headers()
    try:
        for _ in range(SIZE - start):
            request.wfile.write(b"x")
            time.sleep(0.06)
    except OSError:
        return


def test_a_registry_that_sends_a_byte_now_and_then_is_given_up(tmp_path: Path, short: None) -> None:
    with serving(drip) as host:
        registry = Registry(Credentials({}, ()), POLICY)
        with pytest.raises(ImageError, match=r"network: .*too slow \(\d+ bytes in \d+ s; 1000 bytes a second are"):
            registry.blob(Reference.parse(f"{host}/a/b"), f"sha256:{'0' * 64}", tmp_path / "blob", lambda _: None)
        registry.close()


def test_a_manifest_that_comes_a_byte_at_a_time_is_given_up(short: None) -> None:
    with serving(drip) as host:
        registry = Registry(Credentials({}, ()), POLICY)
        with pytest.raises(ImageError, match=r"network: .*too slow"):
            registry.manifest(Reference.parse(f"{host}/a/b"))
        registry.close()


def test_a_host_of_files_that_sends_a_byte_now_and_then_is_given_up(tmp_path: Path, short: None) -> None:
    with serving(drip) as host:
        file = RemoteFile(
            repository="a/b",
            revision="0" * 40,
            name="rows.jsonl",
            size=SIZE,
            sha256=hashlib.sha256(b"x" * SIZE).hexdigest(),
            git_blob="",
            url=f"http://{host}/rows.jsonl",
        )
        with pytest.raises(DataError, match=r"too slow \(\d+ bytes in .*3 times in a row; run the same command again"):
            download_file(file, tmp_path / "rows.jsonl", POLICY)


def test_a_pause_and_a_slow_end_are_allowed(clock: list[float]) -> None:
    received = 0
    for chunk in fast_enough(itertools.repeat(bytes(200_000), 3)):
        received += len(chunk)
        clock[0] += hosts.WINDOW_SECONDS + 30
    for chunk in fast_enough([b"the last byte is slow"]):
        clock[0] += 10 * hosts.WINDOW_SECONDS
        received += len(chunk)
    assert received == 600_021


def test_a_host_that_becomes_slow_is_noticed_after_a_window(clock: list[float]) -> None:
    with pytest.raises(TransientError, match=r"too slow \(2 bytes in 125 s"):
        for chunk in fast_enough(itertools.chain([bytes(10**6)] * 3, itertools.repeat(b"x", 9))):
            clock[0] += 60.0 if len(chunk) > 1 else 65.0
    assert clock[0] < 4 * hosts.WINDOW_SECONDS


def test_only_bytes_that_came_fast_enough_start_a_new_row_of_failures(clock: list[float]) -> None:
    tries = Tries(0)
    for gained, seconds, expected in ((1, 60, 1), (1, 60, 2), (10**6, 60, 1), (0, 1, 2), (1, 1, 1), (59_999, 60, 2)):
        list(tries.chunks([]))
        clock[0] += seconds
        assert tries.failed(tries.furthest + gained) == expected
