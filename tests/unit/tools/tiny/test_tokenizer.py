"""The tiny tokenizer and its chat template: round trips, short sequences, stable prefixes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from recipes.environments.chat.codec import ChatCodec
from tools.tiny.model import build_tokenizer
from tools.tiny.tasks import TASKS, demonstrate

USER = {"role": "user", "content": "Compute 100+20+3"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def codec(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return ChatCodec(directory)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", "Compute 300+40+7", "\u00e9\u4e16\U0001f600", "<think>\n x</think>\\boxed{B}", "\n\n\t\x00 end "],
)
def test_every_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_is_small_and_special_tokens_are_single(tokenizer: Any) -> None:
    assert len(tokenizer) <= 448
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer("<think>a<|im_end|>")["input_ids"], skip_special_tokens=True) == "<think>a"


def test_the_tasks_are_short(tokenizer: Any) -> None:
    rng = Random(1)
    for task in TASKS:
        for _ in range(50):
            problem = task.draw(rng)
            prompt = render(tokenizer, [{"role": "user", "content": problem.prompt}], add_generation_prompt=True)
            assert len(tokenizer(prompt)["input_ids"]) <= 48
            assert len(tokenizer(demonstrate(task, problem, rng))["input_ids"]) < 32


def test_the_generation_prompt_opens_or_closes_the_thinking(tokenizer: Any) -> None:
    opened = render(tokenizer, [USER], add_generation_prompt=True)
    assert opened == "<|im_start|>user\nCompute 100+20+3<|im_end|>\n<|im_start|>assistant\n<think>\n"
    closed = render(tokenizer, [USER], add_generation_prompt=True, enable_thinking=False)
    assert closed.endswith("<|im_start|>assistant\n<think></think>")


def test_roles_and_tools_are_rendered(tokenizer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "two"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    text = render(tokenizer, messages, tools=[TOOL])
    assert text.startswith('<|im_start|>system\nBe brief.\n# Tools\n{"name": "add", "description": "d"')
    assert (
        "<think>\ncall it</think><tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n"
        "<parameter=y>\ntwo\n</parameter>\n</function>\n</tool_call><|im_end|>\n" in text
    )
    assert text.endswith("<|im_start|>tool\n3<|im_end|>\n")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "reply", ["7</think>\\boxed{7}", "</think>\\boxed{7}", " a b \n</think>\n\nx", "two\n</think> y"]
)
def test_a_continued_conversation_starts_with_the_sampled_tokens(tokenizer: Any, reply: str, thinking: bool) -> None:
    reply = reply if thinking else reply.split("</think>")[1]
    prompt = render(tokenizer, [USER], add_generation_prompt=True, enable_thinking=thinking)
    sampled = tokenizer(prompt)["input_ids"] + tokenizer(reply)["input_ids"] + [tokenizer.eos_token_id]
    content = f"<think>\n{reply}" if thinking else reply
    messages = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": "again"}]
    continued = render(tokenizer, messages, add_generation_prompt=True, enable_thinking=thinking)
    ids = tokenizer(continued)["input_ids"]
    assert ids[: len(sampled)] == sampled
    assert tokenizer.decode(ids[len(sampled) :]).startswith("\n<|im_start|>user\nagain")


def test_history_thinking_is_dropped_only_when_asked_for(tokenizer: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "x", "reasoning_content": "secret"}, USER]
    assert "secret" in render(tokenizer, messages)
    assert "secret" not in render(tokenizer, messages, truncate_history_thinking=True)


def test_the_codec_renders_what_transformers_renders(tokenizer: Any, codec: ChatCodec) -> None:
    rng = Random(2)
    for task in TASKS:
        problem = task.draw(rng)
        messages = [{"role": "user", "content": problem.prompt}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(codec.encode({"input": messages})) == expected


def test_the_codec_splits_the_reasoning_of_a_demonstration(tokenizer: Any, codec: ChatCodec) -> None:
    prompt_ids = codec.encode({"input": "Compute 100+20+3"})
    decoded = codec.decode(tokenizer("123</think>\\boxed{123}<|im_end|>")["input_ids"], prompt_ids=prompt_ids)
    assert [item["type"] for item in decoded.items] == ["reasoning", "message"]
    assert decoded.items[1]["content"][0]["text"] == "\\boxed{123}"
