"""Tools over HTTP: the same rollouts as in process on all real rows, one state per session, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from test_environments_http import served

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.types import Completion, Rollout, RolloutStatus
from tests.configuration import environments as env_block
from tests.office import real_office, small_office
from tests.recorded import recorded
from tests.scripted import Scripted, written_call
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

AGENT = "workplace_assistant_simple_agent"
DONE = "done</think>All done.<|im_end|>"
SEND = {"recipient": "ana.silva@atlas.com", "subject": "Hi", "body": "there"}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return ChatCodec(directory)


def called(name: str, arguments: str) -> str:
    return f"so</think>{written_call(name, json.loads(arguments))}<|im_end|>"


@asynccontextmanager
async def environments(codec: ChatCodec, **settings: Any) -> AsyncIterator[Environments]:
    server = {"workplace_assistant": {"resources_servers": {"workplace_assistant": settings}}}
    patterns: dict[str, Any] = {"invalid_tool_call_patterns": (), "thinking_tags": ()}
    config = env_block(instances=server, **patterns)
    made = Environments.from_config(config, codec)
    yield made
    made.close()


def compared(rollout: Rollout) -> tuple[Any, ...]:
    """Return all of a rollout but its times."""
    return rollout.turns, rollout.status, rollout.reason, rollout.reward, rollout.output_text, dict(rollout.metrics)


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    with served("workplace_assistant", "--set", f"tables={real_office()}") as (url, _):
        yield url


async def test_all_real_rows_give_the_same_rollouts_in_process_and_over_http(codec: ChatCodec, real_url: str) -> None:
    path = recorded("GYM_EXAMPLES_DIR", "gym_examples") / "workplace_assistant.jsonl"
    rows = [
        {**json.loads(line), "agent_ref": {"name": AGENT}} for line in path.read_text(encoding="utf-8").splitlines()
    ]
    reads = [
        called("email_search_emails", '{"query": "task update", "page_size": 3}'),
        called("customer_relationship_manager_search_customers", '{"status": "Lost"}'),
        called("analytics_get_average_session_duration", '{"time_min": "2023-11-20"}'),
        called("email_send_email", '{"recipient": 5, "subject": null, "body": ["x"]}'),
    ]
    rewards = []
    async with (
        environments(codec, tables=real_office()) as here,
        environments(codec, url=real_url) as there,
    ):
        for row in rows:
            right = [called(call["name"], call["arguments"]) for call in row["ground_truth"]]
            for says in ([*right[:5], DONE], [*reads, DONE], [DONE], [*right[:4], reads[0], DONE]):
                local = await here.run(row, Scripted(codec, says), max_tokens=64)
                remote = await there.run(row, Scripted(codec, says), max_tokens=64)
                assert compared(local) == compared(remote)
                assert local.status is RolloutStatus.COMPLETED
                rewards.append(local.reward)
    assert rewards == [1.0, 0.0, 0.0, 1.0] * 4 + [1.0, 0.0, 0.0, 0.0]  # the last row needs five calls


async def test_many_sessions_at_once_do_not_see_each_other(codec: ChatCodec) -> None:
    row = {
        "responses_create_params": {
            "input": "Write.",
            "tools": [{"type": "function", "name": name} for name in ("email_send_email", "email_search_emails")],
        },
        "agent_ref": {"name": AGENT},
    }

    async def one(number: int, environments: Environments) -> Rollout:
        letter = {**SEND, "subject": f"letter {number}"}
        truth = [{"name": "email_send_email", "arguments": json.dumps(letter)}]
        says = [
            called("email_send_email", json.dumps(letter)),
            called("email_search_emails", '{"query": "letter"}'),
            DONE,
        ]
        return await environments.run({**row, "ground_truth": truth}, Scripted(codec, says), max_tokens=64)

    with served("workplace_assistant", "--set", f"tables={small_office()}") as (url, _):
        async with environments(codec, url=url) as there:
            rollouts = await asyncio.gather(*(one(number, there) for number in range(64)))
    assert {rollout.reward for rollout in rollouts} == {1.0}
    for number, rollout in enumerate(rollouts):
        shown = codec.text(rollout.turns[2].prompt_token_ids)
        assert f'"subject":"letter {number}"' in shown
        assert '"total_emails":1,' in shown


def test_protocol_of_tools(real_url: str) -> None:
    with httpx.Client(base_url=real_url, trust_env=False) as http:
        early = http.post("/email_send_email", json=SEND)
        assert (early.status_code, early.json()["detail"]) == (400, "the session is not open; call seed_session first")
        assert http.post("/seed_session", json={"any": "row"}).json() == {}
        assert http.post("/email_send_email", json=SEND).text == '{"output":"Email sent successfully."}'
        nulls = http.post("/email_delete_email", json={"email_id": "500", "reason": None}).text
        assert nulls == '{"output":"Email deleted successfully."}'
        assert http.post("/no_such_tool", json={}).json()["output"].endswith("there is no such tool")
        for content in (b"{", b"[]", b"[" * 100_000, b"\xff"):
            assert http.post("/email_send_email", content=content).status_code == 422
        assert http.post("/a/b", json={}).status_code == 404
        body = {"ground_truth": [], "response": {"output": []}}
        assert http.post("/verify", json=body).json()["reward"] == 1.0
        assert http.post("/email_send_email", json=SEND).status_code == 400  # the verdict has ended the session
        assert http.post("/seed_session", json={}).status_code == 200
        assert http.post("/email_delete_email", json={"email_id": "500"}).text == '{"output":"Email not found."}'


async def test_a_server_that_dies_is_no_reward(codec: ChatCodec) -> None:
    row = {
        "responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "email_send_email"}]},
        "agent_ref": {"name": AGENT},
        "ground_truth": [],
    }
    with served("workplace_assistant", "--set", f"tables={small_office()}") as (url, process):

        class Killing(Scripted):
            async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
                process.kill()
                process.wait()
                return await super().generate(prompt_token_ids, max_tokens=max_tokens)

        async with environments(codec, url=url, timeout_seconds=10) as there:
            for says in ([called("email_send_email", json.dumps(SEND))], [DONE]):
                rollout = await there.run(row, Killing(codec, says), max_tokens=64)
                assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
                assert url in rollout.reason
