"""Rollouts with Python in a real sandbox: all real rows, in process and over HTTP, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from small_root import require
from speed import patiently
from test_environments_http import served
from test_environments_tools import Scripted, called, compared

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.verifiers.ns_tools import LOST, TOOL
from recipes.types import Rollout, RolloutStatus
from tests.configuration import environments as env_block
from tests.recorded import recorded
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

AGENT = "ns_tools_simple_agent"


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    require("bwrap", "prlimit", "setpriv")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return ChatCodec(directory)


def make_environments(codec: ChatCodec, *, cell_seconds: float | None = None, **settings: Any) -> Environments:
    if cell_seconds is not None:
        settings["nemo_skills_tool_overrides"] = {"DirectPythonTool": {"exec_timeout_s": cell_seconds}}
    server = {"ns_tools": {"resources_servers": {"ns_tools": settings}}}
    patterns: dict[str, Any] = {"invalid_tool_call_patterns": (), "thinking_tags": ()}
    config = env_block(instances=server, **patterns)
    return Environments.from_config(config, codec)


@pytest.fixture(scope="module")
def here(codec: ChatCodec) -> Iterator[Environments]:
    made = make_environments(codec, cell_seconds=patiently(10))
    yield made
    made.close()


def rows() -> list[dict[str, Any]]:
    path = recorded("GYM_EXAMPLES_DIR", "gym_examples") / "ns_tools.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def python(code: str) -> str:
    return called(TOOL, json.dumps({"code": code}))


def answer(text: str) -> str:
    return f"so</think>\\boxed{{{text}}}<|im_end|>"


class Seen(Scripted):
    """A policy that says one text per call, and keeps the last prompt it was given."""

    prompt = ""

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Any:
        self.prompt = self.codec._tokenizer.decode(list(prompt_token_ids))
        return await super().generate(prompt_token_ids, max_tokens=max_tokens)


async def run(environments: Environments, codec: ChatCodec, says: Sequence[str]) -> tuple[Rollout, str]:
    policy = Seen(codec, says)
    rollout = await environments.run(rows()[0], policy, max_tokens=64)
    return rollout, policy.prompt


async def num_sessions(environments: Environments) -> int:
    """Return how many sessions the sandbox has."""
    client: Any = environments._clients["ns_tools"]
    address = await client.sandbox.server.address(client.sandbox.host_port)
    headers = {"authorization": f"Bearer {address.token}"}
    async with client.sandbox.http._session().get(f"{address.url}/sessions", headers=headers) as reply:
        return int((await reply.json())["num_sessions"])


async def test_all_real_rows_give_the_same_rollouts_in_process_and_over_http(
    codec: ChatCodec, here: Environments
) -> None:
    with served("ns_tools") as (url, _):
        there = make_environments(codec, url=url)
        for row in rows():
            right = [python(f"x = {row['expected_answer']!r}"), python("print(x)"), answer(row["expected_answer"])]
            for says, reward in ((right, 1.0), ([python("1/0"), answer("-77")], 0.0)):
                local = await here.run(row, Scripted(codec, says), max_tokens=64)
                remote = await there.run(row, Scripted(codec, says), max_tokens=64)
                assert compared(local) == compared(remote)
                assert (local.status, local.reward) == (RolloutStatus.COMPLETED, reward), local.reason
        there.close()


async def test_the_model_sees_what_its_cells_wrote(codec: ChatCodec, here: Environments) -> None:
    _, prompt = await run(here, codec, [python("x = 20"), python("print('p'); x * 2 + 2"), answer("70")])
    assert "tool\np\n42\n" in prompt
    _, prompt = await run(here, codec, [python("1/0"), answer("70")])
    assert "ZeroDivisionError" in prompt
    _, prompt = await run(here, codec, [python("print('z' * 5000)"), answer("70")])
    assert "z" * 1000 + "<output cut>" in prompt
    _, prompt = await run(here, codec, [python("x = 1"), python("import os; os._exit(1)"), python("x"), answer("70")])
    assert LOST.strip() in prompt
    assert "NameError" in prompt


async def test_the_model_sees_that_a_cell_took_too_long(codec: ChatCodec) -> None:
    short = make_environments(codec, cell_seconds=2)
    _, prompt = await run(short, codec, [python("while True: pass"), answer("70")])
    assert "timed out after 2 seconds" in prompt
    short.close()


async def test_rollouts_do_not_see_each_other_and_leave_no_session(codec: ChatCodec, here: Environments) -> None:
    says = [[python(f"x = {n}"), python("print(x + 1000)"), answer("70")] for n in range(8)]
    done = await asyncio.gather(*(run(here, codec, each) for each in says))
    for number, (rollout, prompt) in enumerate(done):
        assert rollout.reward == 1.0
        assert f"\n{1000 + number}\n" in prompt
    assert await num_sessions(here) == 0


async def test_a_sandbox_that_cannot_start_fails_the_rollout(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lacking = make_environments(codec)
    rollout, _ = await run(lacking, codec, [python("1"), answer("70")])
    lacking.close()
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
    assert "no sandbox could be started here" in rollout.reason


async def test_a_sandbox_that_dies_fails_the_rollouts_on_it_and_no_others(codec: ChatCodec) -> None:
    limit = {"nemo_skills_tool_overrides": {"DirectPythonTool": {"exec_timeout_s": 100}}}
    environments = make_environments(codec, **limit)

    async def kill_once_begun() -> None:
        async with asyncio.timeout(60):
            while not await num_sessions(environments):
                await asyncio.sleep(0.1)
        process = environments._sandbox._process
        assert process is not None
        process.kill()

    says = [python("import time\ntime.sleep(90)"), answer("70")]
    (rollout, _), _ = await asyncio.gather(run(environments, codec, says), kill_once_begun())
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None), rollout.reason
    after, _ = await run(environments, codec, [python("1"), answer("70")])
    environments.close()
    assert after.reward == 1.0
