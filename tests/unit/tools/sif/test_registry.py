"""How a registry is treated: its bucket of requests, who may ask, and what of its answers is believed."""

from __future__ import annotations

import base64
import json
import socket
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.errors import DataError, LaunchError
from tools.files.retry import RetryPolicy
from tools.sif.credentials import Credentials
from tools.sif.ledger import Failure, Ledger, Made, read_failures, write_failures
from tools.sif.manifests import Available, spread
from tools.sif.registry import PullError, RateLimit, Registry, TokenBucket
from tools.sif.wanted import Reference, task_of


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


def bucket(clock: Clock, per_second: float, burst: int) -> TokenBucket:
    return TokenBucket(per_second=per_second, burst=burst, clock=clock, sleep=clock.sleep)


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    clock = Clock()
    tokens = bucket(clock, 4.0, 3)
    for _ in range(3):
        tokens.take()
    assert clock.now == 0
    for _ in range(8):
        tokens.take()
    assert clock.now == pytest.approx(2.0)
    clock.now += 100  # what is not used is kept up to the burst
    for _ in range(4):
        tokens.take()
    assert clock.now == pytest.approx(102.25)


def test_a_closed_bucket_gives_nothing_until_its_time():
    clock = Clock()
    tokens = bucket(clock, 1.0, 5)
    tokens.close(30)
    tokens.close(10)  # an earlier end does not open it
    tokens.take()
    assert clock.now == pytest.approx(30)


def secret(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def test_passwords_come_from_docker_or_from_the_variables(tmp_path):
    auths = {"https://index.docker.io/v1/": {"auth": secret("u", "p")}, "registry.example:5000": {"auth": "eDp5"}}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    credentials = Credentials.read({"DOCKER_CONFIG": str(tmp_path)})
    assert credentials.basic("docker.io") == f"Basic {secret('u', 'p')}"
    assert credentials.basic("registry.example:5000") == "Basic eDp5"
    assert credentials.basic("elsewhere.example") is None
    variables = {"APPTAINER_DOCKER_USERNAME": "a", "APPTAINER_DOCKER_PASSWORD": "b"}
    assert Credentials.read(variables).basic("docker.io") == f"Basic {secret('a', 'b')}"


def test_a_program_may_keep_the_passwords(tmp_path, monkeypatch):
    program = tmp_path / "docker-credential-test"
    program.write_text('#!/bin/sh\nread key\necho "{\\"Username\\": \\"$key\\", \\"Secret\\": \\"s\\"}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {"r.example": "test", "q.example": "absent"}}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    credentials = Credentials.read({"DOCKER_CONFIG": str(tmp_path)})
    assert credentials.basic("r.example") == f"Basic {secret('r.example', 's')}"
    assert credentials.basic("q.example") is None


def test_a_broken_file_of_passwords_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LaunchError, match=r"config\.json"):
        Credentials.read({"DOCKER_CONFIG": str(tmp_path)})


def made(file: str, size: int) -> Made:
    return Made(file=file, instance="i", reference="r", digest="d", bytes=size, sha256="s", tool="umoci", stripped=True)


def test_a_line_that_was_cut_spoils_no_other(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(made("a.sif", 3))
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"file": "b.sif", "inst')  # the disk was full
    Ledger(tmp_path).add(made("c.sif", 4))
    assert sorted(Ledger(tmp_path).made) == ["a.sif", "c.sif"]


def test_a_file_counts_when_it_is_the_one_that_was_made(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(made("a.sif", 3))
    (tmp_path / "a.sif").write_bytes(b"abc")
    (tmp_path / "b.sif").write_bytes(b"abc")  # nobody knows it, and it is no SIF file
    assert [ledger.is_whole(tmp_path / name) for name in ("a.sif", "b.sif", "c.sif")] == [True, False, False]
    assert [ledger.is_stripped(tmp_path / name) for name in ("a.sif", "b.sif", "c.sif")] == [True, False, False]
    (tmp_path / "a.sif").write_bytes(b"ab")  # as before a run that was killed between its line and its file
    assert not ledger.is_whole(tmp_path / "a.sif") and not ledger.is_stripped(tmp_path / "a.sif")


def test_an_empty_list_of_failures_is_no_file(tmp_path):
    failure = Failure(instance="i", reference="r", cause="missing", detail="not there")
    assert write_failures(tmp_path, [failure]) == tmp_path / "images.failed"
    assert read_failures(tmp_path) == [failure]
    assert write_failures(tmp_path, []) is None
    assert read_failures(tmp_path) == []


def test_room_is_estimated_for_results_and_for_the_work():
    tasks = [task_of({"instance_id": f"a__b-{n}", "dataset_name": "SWE-bench"}) for n in range(10)]
    available = Available(tasks=tasks, failures=[], manifests={}, num_bytes=1000, largest=100)
    assert available.needed(4) == (1200, 4 * 600)
    assert available.needed(64) == (1200, 10 * 600)
    assert not available.is_exact
    assert [task.instance for task in spread(tasks, 3)] == ["a__b-0", "a__b-3", "a__b-6"]
    assert spread(tasks, 10) == tasks


@pytest.mark.parametrize("content", ["no list\n", "[]\n", '{"instance": "i"}\n', "\n"])
def test_a_list_of_failures_that_no_run_wrote_is_named(tmp_path, content):
    (tmp_path / "images.failed").write_text(content)
    with pytest.raises(DataError, match=r"images.failed: got \w+Error .* remove it"):
        read_failures(tmp_path)


def test_a_registry_that_never_answers_ends_the_run_soon():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        registry = Registry(Credentials({}, ()), RetryPolicy(first_seconds=0.001), RateLimit())
        for _ in range(3):  # images after the first are not tried at all
            with pytest.raises(LaunchError, match=rf"http://{host}: .* ConnectError .* 4 times in a row; .* MIRROR="):
                registry.digest(Reference.parse(f"{host}/a/b"))
        registry.close()
    assert sum(registry.waits.values()) == RetryPolicy().max_unreached_retries


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve GET with `answer` at the host that is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_blob_that_never_comes_further_is_given_up(tmp_path):
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Range"])
        if len(asked) > 20:
            request.send_error(404)
        elif request.headers["Range"]:
            request.send_error(416)
        else:
            request.send_response(200)
            request.send_header("Content-Length", "20")
            request.end_headers()
            request.wfile.write(b"only half ")

    with serving(answer) as host:
        registry = Registry(Credentials({}, ()), RetryPolicy(max_retries=4, first_seconds=0.001), RateLimit())
        with pytest.raises(PullError, match="network: "):
            registry.blob(Reference.parse(f"{host}/a/b"), f"sha256:{'0' * 64}", tmp_path / "blob", lambda _: None)
        registry.close()
    assert len(asked) == 5  # the first came further than nothing


def test_a_password_is_in_no_message():
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(401)
        request.send_header("WWW-Authenticate", "Basic")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with serving(answer) as host:
        files = ({"auths": {host: {"auth": "c2VjcmV0\n"}}},)
        registry = Registry(Credentials({}, files), RetryPolicy(max_retries=2, first_seconds=0.001), RateLimit())
        with pytest.raises(PullError, match=r"access: .* no header can hold") as raised:
            registry.manifest(Reference.parse(f"{host}/a/b"))
        registry.close()
    assert "c2VjcmV0" not in "".join(traceback.format_exception(raised.value))
