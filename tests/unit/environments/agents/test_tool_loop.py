"""The agent of tools: turns and ids that are trained, the ways a rollout ends, and calls that a model gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents import conversation
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.tokens import pack_rollouts
from recipes.types import Completion, RolloutStatus
from tests.unit.environments.agents.tool_case import (
    DONE,
    ROW,
    SEND,
    Scripted,
    all_ids,
    called,
    ids,
    made,
    made_environments,
)

environments = pytest.fixture(made_environments)


async def test_every_turn_is_kept_and_the_tools_answers_are_prompts(environments: Environments) -> None:
    codec = environments.codec
    model = Scripted(codec, [called("email_search_emails", query="lunch"), called("email_send_email", **SEND), DONE])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert rollout.reason == "the office is as it should be (1 changes, 1 expected)"
    assert rollout.metrics == {"num_tool_calls": 2.0}
    assert rollout.output_text == "all done</think>Sent."
    assert [codec.text(turn.token_ids) for turn in rollout.turns] == list(model.says)
    assert [turn.versions[0].version for turn in rollout.turns] == [0, 1, 2]
    assert [turn.logprobs[0] for turn in rollout.turns] == [-0.5, -1.5, -2.5]
    first, second, third = (codec.text(turn.prompt_token_ids) for turn in rollout.turns)
    assert "Write to Ana." in first
    assert second.startswith("\n<|im_start|>")
    assert '"subject":"Lunch"' in second
    assert "Write to Ana." not in second
    assert '{"output":"Email sent successfully."}' in third
    assert third.endswith("<|im_start|>assistant\n<think>\n")
    # what each call was given is what came before it, id by id
    for number, prompt in enumerate(model.prompts):
        before = sum(len(turn.prompt_token_ids) + len(turn.token_ids) for turn in rollout.turns[:number])
        assert prompt == all_ids(rollout)[: before + len(rollout.turns[number].prompt_token_ids)]


async def test_every_sampled_token_is_trained_once_and_the_rest_is_masked(environments: Environments) -> None:
    codec = environments.codec
    says = [called("email_search_emails", query="lunch"), called("email_send_email", **SEND), DONE]
    rollout = await environments.run(ROW, Scripted(codec, says), max_tokens=64)
    (header,), tokens = pack_rollouts([rollout])
    assert (header.num_turns, header.num_generated_tokens) == (3, rollout.num_generated_tokens)
    row = tokens.row(0)
    mask = row.token_mask() > 0
    assert tuple(row.token_ids) == all_ids(rollout)
    assert codec.text(row.token_ids[mask].tolist()) == "".join(says)
    assert row.logprobs()[mask].tolist() == [
        -0.5 - number for number, said in enumerate(says) for _ in ids(codec, said)
    ]
    untrained = codec.text(row.token_ids[~mask].tolist())
    assert "Write to Ana." in untrained
    assert "Email sent successfully." in untrained


async def test_thinking_without_an_answer_ends_the_rollout(environments: Environments) -> None:
    model = Scripted(environments.codec, ["still thinking<|im_end|>"])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, len(rollout.turns), rollout.reward) == (RolloutStatus.COMPLETED, 1, 0.0)


async def test_sampled_ids_are_never_rendered_again(environments: Environments) -> None:
    """Letters in place of one token for a tag: the text is a call all the same, its rendering would be other ids."""
    codec = environments.codec
    letters = tuple(codec._tokenize(letter)[0] for letter in "<tool_call>")
    call = called("email_send_email", **SEND)
    start, _, rest = call.partition("<tool_call>")
    sampled = (*codec._tokenize(start), *letters, *codec._tokenize(rest))
    assert codec.text(sampled) == call
    assert codec._tokenize(call) != sampled
    model = Scripted(codec, [sampled, DONE])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert rollout.reward == 1.0
    assert rollout.turns[0].token_ids == sampled
    assert model.prompts[1][: len(model.prompts[0]) + len(sampled)] == model.prompts[0] + sampled


async def test_several_calls_of_one_turn_run_in_order(environments: Environments) -> None:
    codec = environments.codec
    both = called("email_send_email", **SEND).removesuffix("<|im_end|>") + called(
        "email_delete_email", email_id="3"
    ).removeprefix("why not</think>")
    rollout = await environments.run(ROW, Scripted(codec, [both, DONE]), max_tokens=64)
    assert rollout.reward == 0.0  # sent, then deleted again
    answers = codec.text(rollout.turns[1].prompt_token_ids)
    assert answers.index("sent successfully") < answers.index("deleted successfully")


async def test_steps_end_with_the_last_calls_run(environments: Environments) -> None:
    model = Scripted(environments.codec, [called("email_search_emails"), called("email_send_email", **SEND)])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, len(rollout.turns), rollout.reward) == (RolloutStatus.COMPLETED, 6, 0.0)
    assert rollout.reason == "the office is not as it should be (5 changes, 1 expected)"


async def test_the_agents_configuration_sets_the_steps(codec: ChatCodec) -> None:
    agent = {"max_steps": 2, "resources_server": {"type": "resources_servers", "name": "workplace_assistant"}}
    environments = made(codec, mine={"responses_api_agents": {"simple_agent": agent}})
    row = {**ROW, "agent_ref": {"name": "mine"}}
    rollout = await environments.run(row, Scripted(codec, [called("email_send_email", **SEND)]), max_tokens=64)
    assert len(rollout.turns) == 2
    environments.close()


async def test_a_full_context_and_a_cut_are_truncations_with_a_verdict(environments: Environments) -> None:
    codec, says = environments.codec, [called("email_send_email", **SEND), DONE]
    num_prompt = len(codec.encode(ROW["responses_create_params"]))
    full = await environments.run(ROW, Scripted(codec, says, room=num_prompt + 1), max_tokens=64)
    assert (full.status, full.reward, len(full.turns)) == (RolloutStatus.TRUNCATED, 1.0, 1)
    cut = await environments.run(ROW, Scripted(codec, says, cut_from=1), max_tokens=64)
    assert (cut.status, cut.reward, len(cut.turns)) == (RolloutStatus.TRUNCATED, 1.0, 2)
    first = await environments.run(ROW, Scripted(codec, says, room=1), max_tokens=64)
    assert (first.status, first.reward, first.turns) == (RolloutStatus.ABORTED, None, ())


async def test_a_cut_call_is_not_run(environments: Environments) -> None:
    model = Scripted(environments.codec, [called("email_send_email", **SEND)], cut_from=0)
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert len(rollout.turns) == 1
    assert rollout.status == RolloutStatus.TRUNCATED


async def test_endless_answers_are_cut_off(environments: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls of one turn could otherwise answer more than the memory holds."""
    monkeypatch.setattr(conversation, "MAX_ANSWERED", 1000)
    call = called("email_search_emails").removeprefix("why not</think>").removesuffix("<|im_end|>")
    model = Scripted(environments.codec, ["x</think>" + call * 20 + "<|im_end|>", DONE])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.COMPLETED, 2)
    assert len(environments.codec.text(rollout.turns[1].prompt_token_ids)) < 1000 + 20 * 60


WRONG_CALLS = {
    "a tool that was not offered": (called("email_forward_email", email_id="1"), "Unknown tool: email_forward_email"),
    "an address of the server": (called("verify", reward=1.0), "Unknown tool: verify"),
    "a wrong argument": (called("email_send_email", cc=1), "got an unexpected argument 'cc'"),
    "a list": (called("email_send_email", **{**SEND, "body": ["x"]}), "got a list, expected a text or a number"),
    "a huge text": (called("email_send_email", **{**SEND, "body": "x" * 30_000}), "expected 20000 at most"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
async def test_what_is_wrong_with_a_call_is_its_answer(environments: Environments, name: str) -> None:
    call, answer = WRONG_CALLS[name]
    model = Scripted(environments.codec, [call, called("email_send_email", **SEND), DONE])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.reward, len(rollout.turns)) == (1.0, 3)
    assert answer in environments.codec.text(rollout.turns[1].prompt_token_ids)
    assert not rollout.turns[0].is_invalid_tool_call
    assert [turn.tool_calls for turn in rollout.turns] == [(1, int("Unknown tool" in answer)), (1, 0), (0, 0)]


async def test_a_malformed_call_ends_the_rollout_and_is_flagged(environments: Environments) -> None:
    for text in ("x</think><tool_call>{bad</tool_call><|im_end|>", "x</think>a</think><tool_call><|im_end|>"):
        rollout = await environments.run(ROW, Scripted(environments.codec, [text]), max_tokens=64)
        assert (rollout.reward, len(rollout.turns)) == (0.0, 1)
        assert rollout.turns[0].is_invalid_tool_call
    assert rollout.turns[0].has_malformed_thinking


async def test_a_prompt_that_does_not_go_on_ends_the_rollout(tokenizer_dir: Path) -> None:
    """A template that takes an end token back once a tool has answered."""
    template = "{{ messages[-1]['role'] }}{% if messages[-1]['role'] != 'tool' %}<|im_end|>{% endif %}"
    environments = made(ChatCodec(tokenizer_dir, chat_template=template))
    model = Scripted(environments.codec, [called("email_send_email", **SEND)])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, rollout.reward, rollout.turns) == (RolloutStatus.ABORTED, None, ())
    assert rollout.reason == (
        "prefix break before turn 2: the prompt has 0 end tokens, the conversation before it 1: "
        "seen 'assistant<|im_end|>', now 'tool'"
    )
    assert rollout.metrics == {"prefix_breaks": 1.0}
    environments.close()


def test_real_rows_are_accepted(codec: ChatCodec, gym_row: Callable[..., dict[str, Any]]) -> None:
    environments = made(codec)
    for number in range(5):
        row = {**gym_row("workplace_assistant", number), "agent_ref": ROW["agent_ref"]}
        assert environments.check_row(row) == []
    environments.close()


async def test_nan_in_a_later_turn_is_no_reward(environments: Environments) -> None:
    class Nan(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            answer = await super().generate(prompt_token_ids, max_tokens=max_tokens)
            bad = (float("nan"), *answer.logprobs[1:]) if len(self.prompts) == 2 else answer.logprobs
            return replace(answer, logprobs=bad)

    model = Nan(environments.codec, [called("email_send_email", **SEND), DONE])
    rollout = await environments.run(ROW, model, max_tokens=64)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ABORTED, None)
    assert "log-probability nan for token 0" in rollout.reason


async def test_prompts_are_those_of_the_whole_conversation(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later turns render the new messages alone; that changes no id, and the whole is rendered now and then."""
    codec = environments.codec
    says = [called("email_search_emails", query=f"a{number}") for number in range(5)] + [DONE]
    whole: list[int] = []
    extend = codec.extend

    def counted(seen_ids: tuple[int, ...], *given: Any) -> tuple[int, ...]:
        whole.append(len(seen_ids))
        return extend(seen_ids, *given)

    monkeypatch.setattr(codec, "extend", counted)

    async def prompts(every: int) -> list[tuple[int, ...]]:
        whole.clear()
        monkeypatch.setattr(conversation, "CHECKED_TURNS", every)
        model = Scripted(codec, says)
        rollout = await environments.run(ROW, model, max_tokens=64)
        assert len(rollout.turns) == 6
        return model.prompts

    with monkeypatch.context() as patch:
        patch.setattr(conversation.Conversation, "_short_ids", lambda _: None)
        expected = await prompts(16)
        assert len(whole) == 5, "every later turn"
    for every, num_whole in {1: 4, 2: 3, 16: 1}.items():  # not the fourth of the later turns: 3 is no power of 2
        assert await prompts(every) == expected
        assert len(whole) == num_whole


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize("start", ["", NO_SYSTEM])
async def test_a_template_that_shows_more_than_the_new_messages_is_rendered_whole(
    tokenizer_dir: Path, start: str
) -> None:
    """One that counts the messages behind each tool's answer, and one that refuses system messages."""
    template = (
        f"{start}"
        "{% for m in messages %}{{ m['role'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}"
        "{% if m['role'] == 'tool' %}{{ loop.index }}{% endif %}{% endfor %}"
    )
    environments = made(ChatCodec(tokenizer_dir, chat_template=template))
    says = [called("email_search_emails", query=f"a{number}") for number in range(4)] + [DONE]
    rollout = await environments.run(ROW, Scripted(environments.codec, says), max_tokens=64)
    codec = environments.codec
    assert [codec.text(turn.prompt_token_ids) for turn in rollout.turns[1:]] == ["tool3", "tool5", "tool7", "tool9"]
    environments.close()
