"""An agent program elsewhere, over real HTTP: from its calls to the rollout, OpenAI's client, and every failure."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_program import running_agent, work
from speed import patiently

from recipes.environments.agents.by_url.agent import UrlAgents
from recipes.environments.agents.by_url.session import RolloutSession, SessionLimits
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.environments import Environments
from recipes.errors import EngineError, RequestError
from recipes.types import Completion, Rollout, RolloutStatus, VersionSpan
from tests.configuration import block
from tests.scripted import written_call
from tools.environments import agent_check
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

END = "<|im_end|>"
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
CALL = f"hm</think>{written_call('look', {'place': 'here'})}{END}"


class Policy:
    """Says what it is told, and keeps what it was asked."""

    max_model_len = 4096

    def __init__(self, codec: ChatCodec, says: list[str | Exception]) -> None:
        self.codec, self.says, self.sampled = codec, says, []

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        text = self.says[min(len(self.sampled), len(self.says) - 1)]
        if isinstance(text, Exception):
            raise text
        ids = self.codec._tokenize(text)
        span = VersionSpan(version=1, start=0, end=len(ids))
        done = Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(span,), finish_reason="stop")
        self.sampled.append((tuple(prompt_token_ids), done))
        return done


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return ChatCodec(directory)


@pytest.fixture(scope="module")
def agent_url() -> Iterator[str]:
    with running_agent() as url:
        yield url


@contextmanager
def environments(codec: ChatCodec, url: str, **settings: Any) -> Iterator[Environments]:
    agent = {"external_agent": {"url": url, "resources_server": {"name": "mcqa"}, **settings}}
    patterns: dict[str, Any] = {"invalid_tool_call_patterns": ("<tool_call>",), "thinking_tags": ("<think>",)}
    gym = block("env.nemo_gym", instances={"mine": {"responses_api_agents": agent}}, **patterns)
    config = block("env", nemo_gym=gym)
    made = Environments.from_config(config, codec)
    yield made
    made.close()


def row(**fields: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Capital of England?"}]},
        "agent_ref": {"type": "responses_api_agents", "name": "mine"},
        "options": [{"A": "Paris"}, {"B": "London"}],
        "expected_answer": "B",
        "num_calls": 2,
        **fields,
    }


async def rollout(codec: ChatCodec, url: str, says: list[str | Exception], **fields: Any) -> tuple[Rollout, Policy]:
    policy, settings = Policy(codec, says), fields.pop("settings", {})
    with environments(codec, url, **settings) as made:
        assert made.check_row(row(**fields)) == []
        return await made.run(row(**fields), policy, max_tokens=64), policy


async def test_calls_of_an_agent_become_a_rollout_that_our_verifier_scores(codec: ChatCodec, agent_url: str) -> None:
    says = [f"a</think>Let me see.{END}", f"b</think>\\boxed{{B}}{END}"]
    done, policy = await rollout(codec, agent_url, says)
    assert (done.status, done.reward, done.reason) == (RolloutStatus.COMPLETED, 1.0, "answered B, expected B")
    assert [turn.token_ids for turn in done.turns] == [sampled.token_ids for _, sampled in policy.sampled]
    seen: tuple[int, ...] = ()
    for turn, (prompt_ids, sampled) in zip(done.turns, policy.sampled, strict=True):
        assert seen + turn.prompt_token_ids == prompt_ids
        seen = prompt_ids + sampled.token_ids
    assert done.output_text == "b</think>\\boxed{B}"
    assert (done.metrics["model_calls"], done.metrics["lost_share"], done.is_flagged) == (2.0, 0.0, False)


async def test_calls_beside_the_main_path_are_sequences_of_their_own(codec: ChatCodec, agent_url: str) -> None:
    says = [f"{letter}</think>\\boxed{{B}}{END}" for letter in "abc"]
    done, policy = await rollout(codec, agent_url, says, asks_again=True)
    assert done.metrics["model_calls/assistant_missing"] == 1.0 and not done.is_flagged
    assert (done.metrics["num_sequences"], done.metrics["lost_share"]) == (2.0, 0.0)
    sampled = [completion.token_ids for _, completion in policy.sampled]
    assert [turn.token_ids for turn in done.turns] == [sampled[0], sampled[2]] and done.reward == 1.0
    [[beside]] = done.branches  # the first call is trained in the main sequence and prompt in this one
    assert (beside.prompt_token_ids, beside.token_ids) == (policy.sampled[1][0], sampled[1])


async def test_helper_calls_are_not_trained_where_only_the_main_path_is(codec: ChatCodec, agent_url: str) -> None:
    says = [f"a</think>x{END}", f"{'a long thought ' * 40}</think>x{END}", f"c</think>\\boxed{{B}}{END}"]
    done, policy = await rollout(codec, agent_url, says, asks_again=True, settings={"train": "main"})
    sampled = [completion.token_ids for _, completion in policy.sampled]
    assert [turn.token_ids for turn in done.turns] == [sampled[0], sampled[2]] and done.branches == ()
    assert done.reward == 1.0 and not done.is_flagged  # though most of what was sampled is not trained
    assert (done.metrics["lost_share"], done.metrics["num_sequences"]) == (0.0, 1.0)
    assert (
        done.metrics["ignored_share"] == pytest.approx(len(sampled[1]) / sum(map(len, sampled)))
        and len(sampled[1]) > sum(map(len, sampled)) / 2
    )


async def test_a_rollout_of_which_too_much_does_not_fit_is_kept_out_of_the_loss(
    codec: ChatCodec, agent_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "max_model_len", 110)  # the sequences of a rollout have twice as many tokens
    short, long = f"a</think>\\boxed{{B}}{END}", f"{'a long thought ' * 40}</think>\\boxed{{B}}{END}"
    done, _ = await rollout(codec, agent_url, [short, short, long], asks_again=True)
    assert done.branches == () and len(done.turns) == 2
    assert done.metrics["lost_share"] > 0.5 and done.is_flagged


FAILURES = [
    ({"num_calls": 0}, RolloutStatus.ABORTED, "no model call"),
    ({"fails": "at the end"}, RolloutStatus.ENV_FAILED, "the agent broke down"),
    ({"fails": "late", "settings": {"timeout_seconds": 1.0}}, RolloutStatus.TIMED_OUT, "no reply within 1 s"),
    ({"num_calls": 3, "settings": {"max_steps": 2}}, RolloutStatus.ENV_FAILED, "500"),
]


@pytest.mark.parametrize(("fields", "status", "reason"), FAILURES)
async def test_no_failure_is_a_reward(
    codec: ChatCodec, agent_url: str, fields: dict[str, Any], status: RolloutStatus, reason: str
) -> None:
    done, _ = await rollout(codec, agent_url, [f"a</think>\\boxed{{B}}{END}"], **fields)
    assert (done.status, done.reward) == (status, None)
    assert reason in done.reason
    if fields.get("fails") == "at the end":  # for the log
        assert len(done.turns) == 2 and done.metrics["model_calls"] == 2.0


async def test_calls_of_an_attempt_that_was_given_up_are_not_mixed_with_the_next(codec: ChatCodec) -> None:
    says: list[str | Exception] = [f"a</think>\\boxed{{B}}{END}"]

    async def work_later(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        return await work(row)

    with running_agent(work_later) as url:
        done, policy = await rollout(codec, url, says, fails="at the door")
    assert (done.status, done.reward) == (RolloutStatus.COMPLETED, 1.0), done.reason
    assert (len(policy.sampled), done.metrics["num_roots"]) == (2, 1.0)


async def test_case_21_calls_of_an_agent_that_never_ends_stay_without_a_reward(
    codec: ChatCodec, agent_url: str
) -> None:
    settings = {"timeout_seconds": min(patiently(4.0), 30.0)}  # before the agent wakes up
    done, _ = await rollout(codec, agent_url, [CALL], fails="hangs at the end", settings=settings)
    assert (done.status, done.reward, len(done.turns)) == (RolloutStatus.TIMED_OUT, None, 2)
    assert done.metrics["model_calls"] == 2.0


@pytest.mark.parametrize("place", ["127.0.0.1:9", "no-such-host.invalid:9", "a_b.invalid.:9"])
async def test_agent_that_is_not_there(codec: ChatCodec, place: str) -> None:
    done, _ = await rollout(codec, f"http://{place}", ["x"])
    assert (done.status, done.reward) == (RolloutStatus.ENV_FAILED, None) and place in done.reason


async def test_lost_engines_end_the_run_at_once(codec: ChatCodec, agent_url: str) -> None:
    with pytest.raises(EngineError, match="engine 0 died"):
        await rollout(codec, agent_url, [EngineError("engine 0 died")])


@pytest.mark.parametrize("gives_up", [True, False], ids=["the agent reports what it has", "the agent fails"])
async def test_what_an_agent_does_when_the_engine_fails_it_earns_nothing(
    codec: ChatCodec, agent_url: str, gives_up: bool
) -> None:
    says = [f"a</think>\\boxed{{B}}{END}", RequestError("engine 0 was late")]
    done, _ = await rollout(codec, agent_url, says, gives_up=gives_up)
    assert (done.status, done.reward, len(done.turns)) == (RolloutStatus.ABORTED, None, 1), done.reason
    assert "the agent's last model call had no answer: engine 0 was late" in done.reason


def session(codec: ChatCodec, policy: Policy) -> RolloutSession:
    patterns = FlagPatterns(invalid_tool_call=(), thinking_tags=())
    return RolloutSession(codec=codec, model=policy, patterns=patterns, limits=SessionLimits(max_tokens=64))


async def test_openais_client_reads_both_apis_streamed_or_not(codec: ChatCodec) -> None:
    agents, policy = UrlAgents(), Policy(codec, [CALL, CALL, CALL, CALL, f"x</think>Done.{END}"])
    open_session = session(codec, policy)
    server = await agents.server_for("127.0.0.1")
    async with server.serving(open_session) as base_url, openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        chat: Any = {"model": "policy", "messages": [{"role": "user", "content": "u"}]}
        tools: Any = [{"type": "function", "function": TOOL}]
        whole = await client.chat.completions.create(**chat, tools=tools)
        [call] = whole.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.arguments == '{"place": "here"}'
        async with client.chat.completions.stream(**chat, tools=tools) as stream:
            streamed = await stream.get_final_completion()
        [call] = streamed.choices[0].message.tool_calls or ()
        assert call.function.arguments == '{"place": "here"}'
        flat: Any = [{"type": "function", "strict": False, **TOOL}]
        response = await client.responses.create(model="policy", input="u", tools=flat)
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        async with client.responses.stream(model="policy", input="u", tools=flat) as events:
            last = await events.get_final_response()
        assert last.output[1].type == "function_call" and last.output[1].arguments == '{"place": "here"}'
        items: Any = [{"role": "user", "content": "u"}, *last.output]
        items.append({"type": "function_call_output", "call_id": last.output[1].call_id, "output": "nothing"})
        final = await client.responses.create(model="policy", input=items, tools=flat)
        assert final.output_text == "Done."
        with pytest.raises(openai.BadRequestError, match="'n'"):
            await client.chat.completions.create(**chat, n=2)
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert [node.kind for node in open_session.forest.nodes] == ["root"] * 4 + ["extend"]
    with pytest.raises(openai.NotFoundError):
        await openai.AsyncOpenAI(base_url=base_url, api_key="any").chat.completions.create(**chat)
    agents.close()


@pytest.mark.parametrize("case", ["30", "31"])
async def test_openais_client_gives_up_at_once_where_no_retry_can_help(
    codec: ChatCodec, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Case 30: a full context is an error that agents know. Case 31: calls after the end are not repeated."""
    monkeypatch.setattr(Policy, "max_model_len", 8)
    agents, requests = UrlAgents(), []

    async def count(request: httpx.Request) -> None:
        requests.append(request)

    class Full(Policy):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")

    open_session = session(codec, Full(codec, []))
    server = await agents.server_for("127.0.0.1")
    async with (
        server.serving(open_session) as base_url,
        httpx.AsyncClient(event_hooks={"request": [count]}) as http,
        openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=5, http_client=http) as client,
    ):
        if case == "31":
            open_session.end()
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "u"}])
    agents.close()
    assert len(requests) == 1
    if case == "31":
        assert isinstance(raised.value, openai.NotFoundError)
    else:
        assert isinstance(raised.value, openai.BadRequestError) and raised.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 8 tokens. However, you requested " in str(raised.value)


async def test_a_thousand_connections_do_not_break_it(codec: ChatCodec) -> None:
    agents, policy = UrlAgents(), Policy(codec, [f"x</think>Done.{END}"])
    server = await agents.server_for("127.0.0.1")
    idle = [await asyncio.open_connection(server.address, server.port) for _ in range(1000)]
    async with server.serving(session(codec, policy)) as base_url, httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{base_url}/chat/completions", json={"messages": [{"role": "user", "content": "u"}]})
        assert reply.status_code == 200
        assert (await client.get(base_url.replace("/r/", "/r/x") + "/models")).status_code == 404
    for _, writer in idle:
        writer.close()
    agents.close()


PROGRAM = """
import json, os, sys, urllib.request
messages = json.load(sys.stdin)["responses_create_params"]["input"]
for hides in (False, True, False):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST")
    request.data = json.dumps({"messages": messages}).encode()
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += ([] if hides else [message]) + [{"role": "user", "content": "go on"}]
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_program_is_checked(
    codec: ChatCodec, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = f"{sys.executable} {program} {status}"
    assert agent_check.main(["--command", command, "--tokenizer", str(tmp_path / "tokenizer")]) == int(bool(status))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown[:3]] == ["root 0", "  extend 1", "  fork 2 (assistant_missing)"]
    assert "NOT TRAINED" not in "".join(shown)
    assert any(line.endswith("sampled tokens would be trained, in 2 sequences") for line in shown)
    assert any("would have no reward" in line for line in shown) == bool(status)
    assert any("give ROWS of the kind that it reads" in line for line in shown) == bool(status)


CALLS_AS_TEXT = """
import json, os, sys, urllib.request
tools = [{"type": "function", "function": tool} for tool in json.load(sys.stdin)["responses_create_params"]["tools"]]
messages = [{"role": "user", "content": "u"}]
for number in range(12):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    request.add_header("content-type", "application/json")
    request.data = json.dumps({"messages": messages, "tools": tools}).encode()
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    said = [call["function"] for call in message["tool_calls"]]
    messages.append({"role": "assistant", "content": "Calling tools: " + json.dumps(said)})
    messages.append({"role": "user", "content": "x"})
"""


def test_what_cannot_be_matched_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "program.py").write_text(CALLS_AS_TEXT, encoding="utf-8")
    task = {"responses_create_params": {"input": [], "tools": [TOOL]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(task), encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text(json.dumps(CALL.removesuffix(END)), encoding="utf-8")
    files = ["--rows", f"{tmp_path}/rows.jsonl", "--answers", f"{tmp_path}/answers.jsonl"]
    command = f"{sys.executable} {tmp_path / 'program.py'}"
    assert agent_check.main(["--command", command, "--tokenizer", f"{tmp_path}/tokenizer", *files]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "12 calls answered, 12 begun, 12 conversations" in shown
    assert any(line.startswith("calls_as_text: 11 (function calls came back as text: send them back") for line in shown)
    assert any(line.startswith("lost: ") and line.endswith(" sampled tokens, calls_as_text") for line in shown)


def test_a_server_is_checked(agent_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row()), encoding="utf-8")
    assert agent_check.main(["--url", agent_url, "--rows", str(rows), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert "2 calls answered, 2 begun, 1 conversations" in capsys.readouterr().out
