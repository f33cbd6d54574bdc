"""The codec against the reference implementation of chat templates, on the tiny model's real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.environments.chat.codec import ChatCodec

pytestmark = pytest.mark.functional

MESSAGES = [
    {"role": "system", "content": "Answer in JSON."},
    {"role": "user", "content": "caf\u00e9 & <b>? State the final answer."},
    {"role": "assistant", "content": "fine", "reasoning_content": "hm"},
    {"role": "user", "content": "go on"},
]
TOOL = {"name": "f", "description": "\u00e9 <&>", "parameters": {"type": "object", "properties": {}}}
HISTORY = [
    MESSAGES[0],
    MESSAGES[1],
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"role": "assistant", "content": "fine"},
    MESSAGES[3],
]


@pytest.mark.parametrize("thinking", [True, False])
def test_prompt_ids_equal_those_of_transformers(tmp_path: Path, thinking: bool) -> None:
    from tools.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tools = [{"type": "function", "function": TOOL}]
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    codec = ChatCodec(tmp_path, chat_template_kwargs={"enable_thinking": thinking})
    encoded = codec.encode({"input": HISTORY, "tools": [{"type": "function", "strict": True, **TOOL}]})
    assert codec.text(encoded) == expected
    assert list(encoded) == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert (codec.eos_token_id, codec.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
