"""Verifiers over HTTP: the same verdicts as in process, and a reason instead of a number for every failure."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from speed import patiently

from recipes.config.load import load_config, require_valid
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item, reasoning_item, response_object
from recipes.environments.environments import Environments
from recipes.environments.instances import ALL_VERIFIERS, VERIFIERS, servers_of
from recipes.environments.scoring.clients import HttpVerifier, InProcessVerifier
from recipes.environments.scoring.pool import ScoringPool
from recipes.types import Completion, RolloutStatus, VersionSpan

pytestmark = pytest.mark.functional

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
REQUEST = {"responses_create_params": {"input": "q"}, "agent_ref": {"name": "a"}}
ROWS: dict[str, dict[str, Any]] = {
    "math_with_judge": {**REQUEST, "question": "q", "expected_answer": "1/2"},
    "mcqa": {**REQUEST, "options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B", "uuid": "u"},
    "reasoning_gym": {**REQUEST, "question": "q", "answer": "12", "metadata": {"source_dataset": "chain_sum"}},
    "structured_outputs": {
        **REQUEST,
        "schema_str": '{"properties": {"a": {"type": "integer"}}}',
        "schema_type": "yaml",
    },
}
ANSWERS = ["\\boxed{0.5}", "\\boxed{B}", "<answer>12 or so</answer>", "a: 1", "", "\\boxed{", "caf\u00e9 \u2713"]


@contextmanager
def served(name: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a verifier in a process of its own; yields (url, process)."""
    command = [sys.executable, "-m", "tools.environments.serve_env", "--name", name, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, f"{name} did not start"
            yield found.group(), process
        finally:
            process.terminate()
            process.wait(timeout=patiently(20))


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    made = ScoringPool(num_workers=1)
    yield made
    made.close()


HTTP = JsonClient()


@pytest.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    yield
    await HTTP.close()


def client(url: str, seconds: float = 30.0) -> HttpVerifier:
    return HttpVerifier(name="mcqa", url=url, timeout_seconds=seconds, http=HTTP)


@pytest.mark.parametrize("name", ROWS)
async def test_same_verdicts_as_in_process(name: str, pool: ScoringPool) -> None:
    local = InProcessVerifier(
        name=name, verifier=VERIFIERS[name], settings=VERIFIERS[name].settings(), pool=pool, timeout_seconds=60
    )
    responses = [response_object([message_item(text)]) for text in ANSWERS]
    responses.append(response_object([reasoning_item(["\\boxed{B}"])], incomplete_reason="max_output_tokens"))
    with served(name) as (url, _):
        remote = HttpVerifier(name=name, url=url, timeout_seconds=60)
        here = [await local.verify(ROWS[name], response) for response in responses]
        there = await asyncio.gather(*(remote.verify(ROWS[name], response) for response in responses))
    assert there == here
    assert {verdict.reward for verdict in here if isinstance(verdict, Verdict)} > {0.0}, "no answer was right"


def test_protocol_with_session_cookie() -> None:
    body = {**ROWS["mcqa"], "response": response_object([message_item("\\boxed{B}")])}
    with served("mcqa", "--instance", "my_mcqa") as (url, _), httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/").json() == {"status": "ok"}
        seeded = http.post("/seed_session", json=ROWS["mcqa"])
        assert seeded.json() == {}
        assert list(seeded.cookies) == ["MCQAResourcesServer___my_mcqa"]
        reply = http.post("/verify", json=body).json()
        assert reply == {
            **body,
            "reward": 1.0,
            "reason": "answered B, expected B",
            "extracted_answer": "B",
            "no_answer": 0.0,
        }
        averaged = http.post("/aggregate_metrics", json={"verify_responses": [reply, {**reply, "reward": 0.0}]}).json()
        assert averaged["key_metrics"] == {"mean/reward": 0.5}
        assert http.get("/reverify_mode").json() == "stateless"
        below = http.post("/ng-rollout/0-1-a2/verify", json=body)
        assert (below.status_code, below.json()["reward"]) == (200, 1.0)
        assert http.post("/ng-rollout/verify", json=body).status_code == 404
        for path in ("seed_session", "verify", "aggregate_metrics"):
            for content in (b"", b"{", b"[" * 100_000, b"\xff", b"NaN", b'"text"', b"[1]"):
                assert http.post(f"/{path}", content=content).status_code == 422, (path, content[:9])
        refused = http.post("/verify", json={**body, "options": None})
        assert refused.status_code == 422
        assert refused.json()["detail"].startswith("field 'options': got nothing")
        assert http.post("/verify", content=b"{").status_code == 422
        assert http.post("/verify", json=ROWS["mcqa"]).status_code == 422


async def test_settings_of_the_server_apply() -> None:
    response = response_object([message_item("**Answer:** B")])
    with served("mcqa", "--set", "grading_mode=lenient_answer_colon_md") as (url, _):
        verdict = await client(url).verify(ROWS["mcqa"], response)
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 1.0


@pytest.mark.promise
async def test_killed_server_is_no_verdict_within_the_deadline() -> None:
    response = response_object([message_item("\\boxed{B}")])
    with served("mcqa") as (url, process):
        remote = client(url, seconds=patiently(5.0))
        assert isinstance(await remote.verify(ROWS["mcqa"], response), Verdict)
        process.kill()
        process.wait(timeout=patiently(20))
        start = time.monotonic()
        verdict = await remote.verify(ROWS["mcqa"], response)
    assert time.monotonic() - start < patiently(10.0)
    assert isinstance(verdict, NoVerdict)
    assert verdict.status is RolloutStatus.ENV_FAILED
    assert url in verdict.reason
    assert "attempts: 3" in verdict.reason


class Answers:
    """A policy that always boxes the right letter."""

    def __init__(self, codec: ChatCodec) -> None:
        self._ids = codec.encode({"input": "x</think>\\boxed{B}"})

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        span = VersionSpan(version=0, start=0, end=len(self._ids))
        logprobs = (-1.0,) * len(self._ids)
        return Completion(token_ids=self._ids, logprobs=logprobs, versions=(span,), finish_reason="stop")


async def test_a_url_in_the_configuration_is_all_it_takes(tmp_path: Path) -> None:
    from tools.tiny.model import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    codec = ChatCodec(tmp_path)
    row = {**ROWS["mcqa"], "agent_ref": {"name": "mcqa_simple_agent"}}
    with served("mcqa") as (url, process):
        key = "env.nemo_gym.mcqa.resources_servers.mcqa"
        loaded = load_config(
            CONFIGS / "tiny" / "stage1_rlvr.yaml", [f"{key}.url={url}", f"{key}.timeout_seconds={patiently(3)}"]
        )
        environments = Environments.from_config(require_valid(loaded).env, codec)
        good = await environments.run(row, Answers(codec), max_tokens=9)
        process.kill()
        process.wait(timeout=patiently(20))
        lost = await environments.run(row, Answers(codec), max_tokens=9)
        session = environments._http._session()
        environments.close()
        await asyncio.sleep(0)
        assert session.closed
    assert (good.reward, good.reason) == (1.0, "answered B, expected B")
    assert (lost.status, lost.reward) == (RolloutStatus.ENV_FAILED, None)
    assert url in lost.reason


def test_the_shipped_instances_are_readable() -> None:
    loaded = load_config(
        CONFIGS / "tiny" / "stage1_rlvr.yaml", ["env.nemo_gym.config_paths=[environments/served.yaml]"]
    )
    servers = servers_of(require_valid(loaded).env.nemo_gym.instances)
    served = [server for server in servers.values() if server.url]
    assert {server.verifier for server in served} == {"math_with_judge", "mcqa", "reasoning_gym", "structured_outputs"}
    assert {server.verifier for server in servers.values()} == ALL_VERIFIERS.keys()
    assert len({server.url for server in served}) == len(served)


class Misbehaving(BaseHTTPRequestHandler):
    """Answers /seed_session well and /verify as its server's `reply` says: (status, body, seconds)."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        status, body, seconds = (200, b"{}", 0.0) if self.path == "/seed_session" else self.server.reply  # type: ignore[attr-defined]
        time.sleep(seconds)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def misbehaving(status: int, body: bytes, seconds: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving)
    server.reply, server.paths = (status, body, seconds), []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.paths  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


JUDGE_FAILED = {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "judge is down"}


@pytest.mark.parametrize(
    ("status", "body", "verify_calls", "reason"),
    [
        (500, b"boom", 3, "/verify answered 500: boom (attempts: 3)"),
        (404, b"not here", 1, "/verify answered 404: not here"),
        (200, b"<html>", 1, "/verify answered no JSON: '<html>'"),
        (200, b"[1]", 1, "/verify answered '[1]', expected an object"),
        (200, b"{}", 1, "/verify answered reward nothing, expected a number"),
        (200, b'{"reward": "1"}', 1, "/verify answered reward string '1', expected a number"),
        (200, b'{"reward": true}', 1, "/verify answered reward boolean True, expected a number"),
        (200, b'{"reward": NaN}', 1, "/verify answered no JSON"),
        (200, json.dumps(JUDGE_FAILED).encode(), 1, "judge_failed: judge is down"),
        (200, b'{"reward": 0.0, "_ng_failure_class": "sandbox"}', 1, "sandbox: no reason given"),
        (200, b'{"reward": 1.0, "mask_sample": true, "failure_kind": "oom"}', 1, "is no measurement: oom"),
    ],
)
async def test_bad_answers_are_never_a_number(status: int, body: bytes, verify_calls: int, reason: str) -> None:
    with misbehaving(status, body) as (url, paths):
        verdict = await client(url).verify(ROWS["mcqa"], response_object([message_item("x")]))
    assert isinstance(verdict, NoVerdict)
    assert reason in verdict.reason
    assert paths.count("/verify") == verify_calls
    expected = RolloutStatus.JUDGE_FAILED if b"judge_failed" in body else RolloutStatus.ENV_FAILED
    assert verdict.status is expected


async def test_slow_server_is_no_verdict_at_the_deadline() -> None:
    with misbehaving(200, b'{"reward": 1.0}', seconds=6.0) as (url, _):
        start = time.monotonic()
        verdict = await client(url, seconds=0.5).verify(ROWS["mcqa"], response_object([message_item("x")]))
        waited = time.monotonic() - start
    assert 0.4 < waited < 5.0
    assert isinstance(verdict, NoVerdict)
    assert f"{url}: no reply within 0.5 s" in verdict.reason


async def test_a_foreign_servers_reward_and_numbers_are_taken() -> None:
    with misbehaving(200, b'{"reward": 0.25, "score": 3, "note": "fine", "expected_answer": "B"}') as (url, _):
        verdict = await client(url).verify(ROWS["mcqa"], response_object([message_item("x")]))
    assert verdict == Verdict(
        reward=0.25, reason=f"rewarded 0.25 by {url}", metrics={"score": 3.0}, details={"note": "fine"}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "mcq", "--port", "0"], "--name: there is no verifier 'mcq'; did you mean 'mcqa'?"),
        (["--name", "mcqa", "--port", "0", "--set", "x=1"], "mcqa.x: no code reads this setting"),
        (["--name", "genrm_compare", "--port", "0"], "it asks a judge"),
        (["--name", "workplace_assistant", "--port", "0", "--set", "tables=/none"], "/none/processed/emails.csv: the"),
        (["--name", "math_with_judge", "--port", "0", "--set", "should_use_judge=true"], "it asks a judge"),
        (["--name", "multichallenge", "--port", "0"], "it asks a judge"),
    ],
)
def test_serving_refuses_wrong_arguments(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "tools.environments.serve_env", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patiently(60), check=False)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
