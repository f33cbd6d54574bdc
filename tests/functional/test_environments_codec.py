"""The codec against the reference implementation of chat templates, on the tiny model's real tokenizer."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.template import compile_template

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
    from tools.tiny.model import build_tokenizer

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


def test_templates_have_what_those_of_transformers_have() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs, ours = _compile_jinja_template("").environment, compile_template("").environment
    for names in ("filters", "tests", "globals"):
        assert getattr(ours, names).keys() == getattr(theirs, names).keys(), names
    assert {tag for one in ours.extensions.values() for tag in one.tags} == {
        tag for one in theirs.extensions.values() for tag in one.tags
    }
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)
    parameters = [inspect.signature(one.filters["tojson"]).parameters for one in (ours, theirs)]
    assert [*parameters[0]][1:] == [*parameters[1]][1:]


GENERATION = """{%- for m in messages %}
<|im_start|>{{ m.role }}
    {% if m.role == "assistant" %}
{% generation %}
  {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content }}<|im_end|>
{% endgeneration %}
    {%- else %}
{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{{ tools | tojson(separators=(",", ":"), sort_keys=true) }}{{ documents is none }}{{ sep_token is defined }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_of_another_trainer_gives_the_prompt_of_transformers(tmp_path: Path) -> None:
    from tools.tiny.model import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = GENERATION
    tokenizer.save_pretrained(tmp_path)
    tools = [{"type": "function", "function": TOOL}]
    expected = tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False)
    codec = ChatCodec(tmp_path)
    assert codec.text(codec.encode({"input": HISTORY, "tools": [{"type": "function", **TOOL}]})) == expected


@pytest.mark.parametrize("place", ["settings", "file", "files"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_a_template_for_tools_is_used_for_requests_with_tools(tmp_path: Path, place: str, has_tools: bool) -> None:
    from transformers import AutoTokenizer

    from tools.tiny.model import build_tokenizer

    tokenizer = build_tokenizer()
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    several = {"default": plain, "tool_use": "tools: {{ tools | tojson }}" + plain}
    tokenizer.chat_template = plain if place == "file" else several
    tokenizer.save_pretrained(tmp_path)
    if place == "settings":
        for file in tmp_path.rglob("*.jinja"):
            file.unlink()
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["chat_template"] = [{"name": name, "template": text} for name, text in several.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tools = [{"type": "function", "function": TOOL}] if has_tools else None
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES[:2], tools=tools, tokenize=False)
    codec = ChatCodec(tmp_path)
    ours = codec.text(codec.encode({"input": MESSAGES[:2], "tools": [{"type": "function", **TOOL}] if tools else []}))
    assert ours == expected
    assert ("tools: " in ours) is (has_tools and place != "file")
