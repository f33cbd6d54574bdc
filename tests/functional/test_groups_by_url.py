"""Groups that are compared elsewhere: a server of ours with its judge, one of NeMo Gym's form, and broken ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from speed import patiently

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item, response_object
from recipes.environments.environments import Environments
from recipes.environments.instances import GROUP_VERIFIERS, servers_of
from recipes.environments.scoring.clients import GroupClient, HttpGroupClient
from recipes.types import RolloutStatus
from tests.quiet_server import QuietHandler, QuietServer
from tools.tiny.rule_judge import RuleServer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Name Rome and Oslo."}]}}
ANSWERS = [response_object([message_item(text)]) for text in ("Rome", "Rome and Oslo", "I do not know any", "")]
HTTP = JsonClient()


@pytest.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    yield
    await HTTP.close()


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    rules = RuleServer(0)
    with rules.serving():
        yield f"http://127.0.0.1:{rules.port}/v1"


@pytest.fixture(scope="module")
def url(judge_url: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tools.environments.serve_env", "--name", "genrm_compare", "--port", "0"]
    command += [
        "--judge-texts",
        "own",
        "--judge-url",
        judge_url,
        "--judge-model",
        "rules",
        "--set",
        "group_style_penalty_coeff=0.1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server did not start"
        yield found.group()
        process.terminate()
        process.wait(timeout=patiently(20))


def client(url: str) -> HttpGroupClient:
    return HttpGroupClient(name="compared", url=url, timeout_seconds=patiently(20), http=HTTP)


async def test_verdicts_by_url_are_those_of_this_process(url: str, judge_url: str) -> None:
    instances: dict[str, Any] = {
        "judge": {"responses_api_models": {"vllm_model": {"base_url": judge_url, "model": "rules"}}},
        "here": {
            "resources_servers": {
                "genrm_compare": {"genrm_model_server": {"name": "judge"}, "group_style_penalty_coeff": 0.1}
            }
        },
    }
    server = servers_of(instances)["here"]
    assert server.judge is not None
    here = GroupClient(
        name="here",
        verifier=GROUP_VERIFIERS["genrm_compare"],
        settings=server.settings,
        judge=server.judge.client(HTTP),
        timeout_seconds=patiently(20),
    )
    expected, got = await here.score(ROW, ANSWERS), await client(url).score(ROW, ANSWERS)
    rewards = [verdict.reward for verdict in expected if isinstance(verdict, Verdict)]
    assert len(rewards) == 4 and len(set(rewards)) > 2
    assert [verdict.reward for verdict in got if isinstance(verdict, Verdict)] == rewards
    assert [verdict.reason for verdict in got] == [verdict.reason for verdict in expected]


async def test_one_answer_is_not_asked_about(url: str) -> None:
    [alone] = await client(url).score(ROW, ANSWERS[:1])
    assert isinstance(alone, NoVerdict) and alone.status is RolloutStatus.ABORTED


BAD_BODIES = [
    {},
    {"conversation_history": "u", "response_objs": []},
    {"conversation_history": [], "response_objs": {}},
    {"conversation_history": [], "response_objs": [1]},
    {"conversation_history": [], "response_objs": [], "principle": 5},
]


@pytest.mark.parametrize("body", BAD_BODIES)
async def test_a_request_that_cannot_be_read_is_refused(url: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        reply = await http.post(f"{url}/compare", json=body)
    assert reply.status_code == 422 and reply.json()["detail"]


@pytest.fixture
def broken() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that answers what a test sets; yields its address and the answer, which has the last request, too."""
    answer: dict[str, Any] = {"status": 200, "body": b"{}"}

    class Handler(QuietHandler):
        def do_POST(self) -> None:  # noqa: N802 (http.server gives the name)
            answer["asked"] = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer["path"] = self.path
            self.send_response(answer["status"])
            self.send_header("content-length", str(len(answer["body"])))
            self.end_headers()
            self.wfile.write(answer["body"])

    server = QuietServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answer
    server.shutdown()
    server.server_close()


async def test_a_server_of_nemo_gyms_form_is_asked_and_read(broken: tuple[str, dict[str, Any]]) -> None:
    url, answer = broken
    answer["body"] = b'{"rewards": [3.5, 1, 0.25, 2], "comparison_results": [], "metrics": {"tie_rate": 0}}'
    row = {**ROW, "principle": "be kind"}
    verdicts = await client(url).score(row, ANSWERS)
    assert [verdict.reward for verdict in verdicts if isinstance(verdict, Verdict)] == [3.5, 1.0, 0.25, 2.0]
    history = ROW["responses_create_params"]["input"]
    assert answer["path"] == "/compare"
    assert answer["asked"] == {"conversation_history": history, "response_objs": ANSWERS, "principle": "be kind"}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"{}", "expected a list of 4"),
        (200, b'{"rewards": [1, 2, 3]}', "expected a list of 4"),
        (200, b'{"rewards": 1}', "expected a list of 4"),
        (200, b'{"rewards": ["1", true, [], 1e300]}', "expected a number or null"),
        (200, b'{"rewards": [null, null, null, null], "reasons": ["a", "a", "a", "a"]}', "compared: a"),
        (200, b"nothing", "answered no JSON"),
        (422, b'{"detail": "no"}', "answered 422"),
        (501, b"{}", "answered 501"),
    ],
)
async def test_no_failure_is_a_reward(
    broken: tuple[str, dict[str, Any]], status: int, body: bytes, reason: str
) -> None:
    url, answer = broken
    answer.update(status=status, body=body)
    verdicts = await client(url).score(ROW, ANSWERS)
    assert len(verdicts) == 4
    assert all(isinstance(verdict, NoVerdict) and reason in verdict.reason for verdict in verdicts), verdicts


def test_a_configured_url_is_asked_for_whole_groups() -> None:
    made = Environments(
        None,  # type: ignore[arg-type]
        servers=servers_of({"genrm_compare": {"resources_servers": {"genrm_compare": {"url": "http://127.0.0.1:9"}}}}),
        agents={},
        patterns=None,  # type: ignore[arg-type]
    )
    row: dict[str, Any] = {**ROW, "agent_ref": {"name": "genrm_simple_agent"}}
    assert made.compares(row) and made.check_row(row) == []
    made.close()
