"""One rollout from row to reward: routing, the single-turn agent, and every way to end without a verdict."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.verifier import NoVerdict, Response, Verdict, message_item
from recipes.environments.environments import Environments
from recipes.environments.instances import VERIFIERS
from recipes.environments.scoring.clients import InProcessVerifier, VerifierClient
from recipes.environments.scoring.pool import MAX_PROCESSES, ScoringPool, num_processes
from recipes.errors import ConfigError, EngineError
from recipes.types import Completion, Rollout, RolloutStatus, Row, VersionSpan
from tests.configuration import block
from tests.office import small_office

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Capital of England?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    "options": [{"A": "Paris"}, {"B": "London"}],
    "expected_answer": "B",
}


def judged(regex: str) -> Row:
    """Return a row of a judge, with an expression of its own."""
    agent = {"name": "equivalence_llm_judge_simple_agent"}
    return {**ROW, "agent_ref": agent, "template_metadata": {"output_regex": regex}}


@dataclass
class Scripted:
    """A policy that answers with given text."""

    codec: ChatCodec
    text: str
    finish_reason: str = "stop"
    seen: list[tuple[str, int]] = field(default_factory=list)

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        self.seen.append((self.codec.text(prompt_token_ids), max_tokens))
        ids = self.codec._tokenize(self.text)
        return Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            versions=(VersionSpan(version=3, start=0, end=len(ids)),),
            finish_reason=self.finish_reason,
        )


def env_config(**instances: Any) -> Any:
    return block(
        "env",
        nemo_gym=block(
            "env.nemo_gym",
            instances=instances,
            invalid_tool_call_patterns=("<tool_call>", "</tool_call>"),
            thinking_tags=("<think>", "</think>"),
        ),
    )


@pytest.fixture
def environments(codec: ChatCodec) -> Iterator[Environments]:
    made = Environments.from_config(env_config(), codec)
    yield made
    made.close()


async def rollout(environments: Environments, text: str, *, row: Row = ROW, finish_reason: str = "stop") -> Rollout:
    model = Scripted(environments.codec, text, finish_reason)
    return await environments.run(row, model, max_tokens=64)


async def test_a_right_answer(environments: Environments) -> None:
    result = await rollout(environments, "London</think>\\boxed{B}<|im_end|>")
    assert (result.status, result.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert result.reason == "answered B, expected B"
    assert result.output_text == "London</think>\\boxed{B}"
    (turn,) = result.turns
    assert environments.codec.text(turn.prompt_token_ids).endswith("<|im_start|>assistant\n<think>\n")
    assert environments.codec.text(turn.token_ids) == "London</think>\\boxed{B}<|im_end|>"
    assert turn.logprobs == (-0.5,) * len(turn.token_ids)
    assert turn.versions == (VersionSpan(version=3, start=0, end=len(turn.token_ids)),)
    assert (turn.is_invalid_tool_call, turn.has_malformed_thinking) == (False, False)
    assert result.is_valid
    assert 0.0 <= result.env_seconds <= result.seconds


async def test_agents_render_prompts_with_the_arguments_of_the_policys_server(codec: ChatCodec) -> None:
    """Those that the configuration names, and those that verifiers bring; a variant that copies the server, too."""
    policy = {"responses_api_models": {"vllm_model": {"chat_template_kwargs": {"enable_thinking": False}}}}
    agents = {
        name: {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "mcqa"}, **model}}}
        for name, model in {"mine": {}, "copied": {"model_server": {"name": "again"}}}.items()
    }
    environments = Environments.from_config(
        env_config(policy_model=policy, again={"_copy": "policy_model"}, **agents), codec
    )
    model = Scripted(codec, "\\boxed{B}<|im_end|>")
    for row in (ROW, *({**ROW, "agent_ref": {"name": name}} for name in agents)):
        await environments.run(row, model, max_tokens=64)
    assert [prompt.rpartition("assistant\n")[2] for prompt, _ in model.seen] == ["<think></think>"] * 3
    environments.close()


async def test_an_agent_may_sample_from_a_variant_of_the_policy(codec: ChatCodec) -> None:
    """Its template's arguments are the variant's; the row still has the last word, and other agents keep their own."""
    variant = {
        "responses_api_models": {"vllm_model": {"chat_template_kwargs": {"enable_thinking": False}}},
        "_copy": "policy_model",
    }
    agent = {"resources_server": {"name": "mcqa"}, "model_server": {"name": "off"}}
    environments = Environments.from_config(
        env_config(off=variant, again={"_copy": "off"}, mine={"responses_api_agents": {"simple_agent": agent}}), codec
    )
    on = {**ROW["responses_create_params"], "metadata": {"chat_template_kwargs": '{"enable_thinking": true}'}}
    rows = [
        {**ROW, "agent_ref": {"name": "mine"}},
        {**ROW, "agent_ref": {"name": "mine"}, "responses_create_params": on},
        ROW,
    ]
    model = Scripted(codec, "\\boxed{B}<|im_end|>")
    for row in rows:
        result = await environments.run(row, model, max_tokens=64)
    assert [prompt.rpartition("assistant\n")[2] for prompt, _ in model.seen] == ["<think></think>", *["<think>\n"] * 2]
    result = await environments.run(rows[0], model, max_tokens=64)
    assert result.reward == 1.0  # without an open block the text is the answer
    environments.close()


async def test_reasoning_is_never_graded(environments: Environments) -> None:
    result = await rollout(environments, "\\boxed{B}", finish_reason="length")
    assert (result.status, result.reward) == (RolloutStatus.TRUNCATED, 0.0)
    assert result.reason == "the answer is empty"


async def test_a_cut_answer_is_scored_as_it_stands(environments: Environments) -> None:
    result = await rollout(environments, "x</think>\\boxed{B} because", finish_reason="length")
    assert (result.status, result.reward) == (RolloutStatus.TRUNCATED, 1.0)


async def test_flags(environments: Environments) -> None:
    (turn,) = (await rollout(environments, "x</think></think><tool_call>")).turns
    assert (turn.is_invalid_tool_call, turn.has_malformed_thinking) == (True, True)


@pytest.mark.timeout(60)
async def test_a_rows_own_pattern_cannot_stop_the_driver() -> None:
    row = {**ROW, "template_metadata": {"output_regex": "(a+)+$"}}
    pool, own = ScoringPool(num_workers=1, cpu_seconds=1.0), VERIFIERS["mcqa"]
    verifier = InProcessVerifier(name="mcqa", verifier=own, settings=own.settings(), pool=pool, timeout_seconds=50.0)
    endless = asyncio.create_task(verifier.verify(row, {"output": [message_item("a" * 40 + "!")]}))  # 2 ** 40 tries
    verdict = await verifier.verify(ROW, {"output": [message_item("\\boxed{B}")]})
    assert (verdict.reason, endless.done()) == ("answered B, expected B", False)
    assert (await endless).reason == "mcqa: scoring used more than 1 s of processor time"
    pool.close()


async def test_the_smaller_token_limit_wins(environments: Environments) -> None:
    model = Scripted(environments.codec, "x</think>y")
    for limit in (16, 1000, None):
        params = {**ROW["responses_create_params"], "max_output_tokens": limit}
        await environments.run({**ROW, "responses_create_params": params}, model, max_tokens=64)
    assert [max_tokens for _, max_tokens in model.seen] == [16, 64, 64]


async def test_no_room_for_an_answer_is_no_reward(environments: Environments) -> None:
    result = await rollout(environments, "", finish_reason="length")
    assert (result.status, result.reward, result.turns) == (RolloutStatus.ABORTED, None, ())
    assert "leaves no room for an answer" in result.reason


async def test_aborted_and_broken_completions_are_no_reward(environments: Environments) -> None:
    for ending in ("abort", "error", "repetition"):
        ended = await rollout(environments, "x</think>\\boxed{B}", finish_reason=ending)
        assert (ended.status, ended.reward) == (RolloutStatus.ABORTED, None)
        assert ended.reason == f"the engine ended the request: {ending}"

    class Broken(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            made = await super().generate(prompt_token_ids, max_tokens=max_tokens)
            return replace(made, logprobs=(-0.5, math.nan, *made.logprobs[2:]))

    result = await environments.run(ROW, Broken(environments.codec, "abc"), max_tokens=9)
    assert (result.reward, result.reason) == (None, "the engine returned log-probability nan for token 1")


async def test_a_dead_engine_is_not_swallowed(environments: Environments) -> None:
    class Dead:
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            raise EngineError("engine 0 died")

    with pytest.raises(EngineError, match="engine 0 died"):
        await environments.run(ROW, Dead(), max_tokens=9)


@dataclass
class Failing:
    """A verifier client that ends in a given way."""

    outcome: Verdict | NoVerdict | Exception

    async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (NoVerdict(status=RolloutStatus.JUDGE_FAILED, reason="judge is down"), RolloutStatus.JUDGE_FAILED),
        (NoVerdict(status=RolloutStatus.ENV_FAILED, reason="no answer"), RolloutStatus.ENV_FAILED),
        (KeyError("surprise"), RolloutStatus.ENV_FAILED),
    ],
)
async def test_no_verdict_is_no_reward(
    environments: Environments, outcome: NoVerdict | Exception, status: RolloutStatus
) -> None:
    environments.wrap_verifiers(lambda _: Failing(outcome))
    result = await rollout(environments, "x</think>\\boxed{B}")
    assert (result.status, result.reward, result.is_valid) == (status, None, False)
    assert str(outcome.reason if isinstance(outcome, NoVerdict) else "KeyError: 'surprise'") in result.reason


async def test_a_wrapper_can_slow_every_verifier(environments: Environments) -> None:
    @dataclass
    class Slow:
        inner: VerifierClient

        async def verify(self, row: Row, response: Response) -> Verdict | NoVerdict:
            await asyncio.sleep(0.05)
            return await self.inner.verify(row, response)

    environments.wrap_verifiers(Slow)
    result = await rollout(environments, "x</think>\\boxed{B}")
    assert result.reward == 1.0
    assert result.env_seconds >= 0.05


async def test_a_row_that_cannot_be_rendered_fails_alone(environments: Environments) -> None:
    params = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    result = await rollout(environments, "x", row={**ROW, "responses_create_params": params})
    assert result.status == RolloutStatus.ENV_FAILED
    assert "field 'content': got string 'input_image', expected text parts only" in result.reason


def with_params(**params: Any) -> dict[str, Any]:
    return {**ROW, "responses_create_params": {"input": "hi", **params}}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**ROW, "agent_ref": {}}, "no agent_ref.name"),
        ({**ROW, "agent_ref": {"name": "mcqa_agent"}}, "unknown agent 'mcqa_agent'; did you mean 'mcqa_simple_agent'?"),
        ({**ROW, "agent_ref": {"name": "swe_pivot_tool_simulation_agent"}}, "unknown agent"),
        ({**ROW, "options": 5}, "field 'options': got number 5"),
        (judged("("), "field 'template_metadata.output_regex': got string '(', expected a regular expression (missing"),
        (with_params(tempurature=1), "responses_create_params: unknown key 'tempurature'; did you mean 'temperature'?"),
        (with_params(max_output_tokens=0), "max_output_tokens: got 0, expected a positive integer"),
        (with_params(max_output_tokens=True), "max_output_tokens: got True, expected a positive integer"),
        (with_params(metadata="x"), "responses_create_params: field 'metadata': got string 'x', expected an object"),
        (with_params(reasoning=[1]), "responses_create_params: field 'reasoning': got list [1], expected an object"),
        (with_params(instructions=5), "responses_create_params: field 'instructions': got number 5, expected a string"),
        (with_params(input=[]), "field 'input': got no message"),
        (with_params(input=[{"role": "robot", "content": "x"}]), "field 'input': got string 'robot'"),
        (with_params(tools=[{"type": "web_search"}]), "field 'tools': got object"),
        (with_params(tool_choice="required"), "tool_choice='required' requires at least one tool"),
        (with_params(metadata={"chat_template_kwargs": "{"}), "field 'metadata.chat_template_kwargs': got string '{'"),
        ({**ROW, "responses_create_params": None}, "responses_create_params: the object is missing"),
    ],
)
def test_check_row_names_the_problem(environments: Environments, row: Mapping[str, Any], problem: str) -> None:
    (found,) = environments.check_row(row)
    assert problem in found


def test_check_row_names_what_is_nested_too_deep(environments: Environments) -> None:
    deep: Any = 1
    for _ in range(1000):  # as deep as orjson reads
        deep = [deep]
    request = {"input": "q"}
    (found,) = environments.check_row({**ROW, "options": deep})
    assert "field 'options': got list that is nested too deep to be shown, expected a list of {letter: text}" in found
    brackets = "[" * 100_000
    image = {"image": "i", "relevant_file_contents": brackets}
    instance = {"repo": "o/r", "setup_script": "", "test_script": ""}
    row = {"responses_create_params": request, "agent_ref": {"name": "swerl_gen_simple_agent"}}
    (found,) = environments.check_row({**row, "mode": "eval", "instance": instance, "metadata": image})
    assert found.startswith("field 'metadata.relevant_file_contents': got string '[[[")
    assert found.endswith("..., expected JSON text of an object of texts")
    request = {"input": "q", "metadata": {"chat_template_kwargs": brackets}}
    (found,) = environments.check_row({**ROW, "responses_create_params": request})
    assert found.startswith("responses_create_params: field 'metadata.chat_template_kwargs': got string '[[[")
    assert found.endswith("..., expected JSON text of an object")


@pytest.mark.parametrize("has_tables", [True, False])
def test_check_row_names_what_the_tools_of_a_row_lack(codec: ChatCodec, has_tables: bool) -> None:
    row = {**ROW, "agent_ref": {"name": "workplace_assistant_simple_agent"}, "ground_truth": []}
    tables = small_office() if has_tables else "/none"
    office = {"resources_servers": {"workplace_assistant": {"tables": tables}}}
    environments = Environments.from_config(env_config(workplace_assistant=office), codec)
    expected = [] if has_tables else ["/none/processed/emails.csv: the office's tables cannot be read"]
    assert [problem.partition(" (")[0] for problem in environments.check_row(row)] == expected
    environments.close()


def test_check_row_accepts_real_rows(environments: Environments, gym_row: Callable[..., dict[str, Any]]) -> None:
    for name in ("math_with_judge", "mcqa", "reasoning_gym", "structured_outputs"):
        row = {**gym_row(name), "agent_ref": {"name": f"{name}_simple_agent"}}
        assert environments.check_row(row) == []


def server(verifier: str, **settings: Any) -> dict[str, Any]:
    return {"resources_servers": {verifier: settings}}


async def test_a_configured_agent_uses_its_own_server(codec: ChatCodec) -> None:
    agent = {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "mcqa_markdown"}}}}
    instances = {"mcqa_markdown": server("mcqa", grading_mode="lenient_answer_colon_md"), "my_agent": agent}
    environments = Environments.from_config(env_config(**instances), codec)
    row = {**ROW, "agent_ref": {"name": "my_agent"}}
    assert environments.check_row(row) == []
    assert (await rollout(environments, "x</think>**Answer:** B", row=row)).reward == 1.0
    assert (await rollout(environments, "x</think>**Answer:** B")).reward == 0.0  # the default instance is strict
    environments.close()


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ({"mcqa": server("mcqa", url="localhost:5000")}, r"mcqa.url: got localhost:5000, expected http://host:port"),
        ({"mcqa": server("mcqa", url="http://fd00::2:5000")}, r"mcqa.url: got http://fd00::2:5000, expected http://ho"),
        ({"mcqa": server("mcqa", timeout_seconds="2m")}, r"mcqa.timeout_seconds: got '2m', expected a positive number"),
        ({"mcqa": server("mcqa", grading_mod="x")}, r"mcqa.grading_mod: no code reads this setting; .*'grading_mode'"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(codec: ChatCodec, instances: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Environments.from_config(env_config(**instances), codec)


def test_upstream_settings_of_unused_parts_are_accepted(codec: ChatCodec) -> None:
    judge = {"judge_model_server": {"name": "j"}, "should_use_judge": False, "entrypoint": "app.py"}
    instances = {"math_with_judge": server("math_with_judge", **judge), "code_gen": server("code_gen", num_processes=8)}
    Environments.from_config(env_config(**instances), codec).close()


@pytest.mark.parametrize(("cores", "pools", "each"), [(112, 1, MAX_PROCESSES), (112, 8, 7), (16, 4, 2), (2, 4, 1)])
def test_the_pools_of_a_node_share_half_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, pools: int, each: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert num_processes(num_pools=pools) == each
