"""Tool calls and reasoning as vLLM's own parsers read them, over generated and broken texts.

What differs on purpose is left out here; the README of the environments lists it.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import parse_tool_calls
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

SCHEMAS: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "many": {"type": "array", "items": {"type": "integer"}},
    "record": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "maybe": {"type": ["integer", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "one_of": {"enum": [1, "x", None]},
    "any": {"type": "any"},
    "long": {"type": "int64"},
    "open": {},
    "odd": 5,
}
TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": SCHEMAS}}},
    {"type": "function", "function": {"name": "bare"}},
]
PLAIN = ["ls -l", "", "5", "-3", "5.0", "1.5", "1e400", "NaN", "-Infinity", "null", "NULL", "true", "False", "0"]
ODD = ["1_000", "9" * 30, "9" * 5000, "[1, 2]", '["5"]', '{"x": "5"}', '{"x": [1, NaN]}', '{"x": 1e999}', "[1", "'x'"]
SPACED = [
    "\n",
    "  two\n lines\n",
    "\u4e2d\u6587 \U0001f600",
    "\u00a0",
    "a > b < c",
    "<",
    ">",
    '{"x": 12345678901234567890123}',
]
TAGS = ["<tool_call>", "</tool_call>", "</function>", "<function=run>", "<function=>", "</parameter>", "<parameter"]
SPACED_TAGS = ["<parameter=count>", "< parameter = count >", "< / parameter >", "<function=run", "</ function>"]
WHITE = "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u180e\u2028\u200b\u3000\ufeff"  # white space for some readers only
NAMES = ["run", "run", "bare", "unknown", "r\u00fcn"]
VALUES = [*PLAIN, *ODD, *SPACED, *TAGS, *SPACED_TAGS]


def written(r: random.Random) -> str:
    """Return a turn with calls, most of them broken somewhere."""
    parts = [r.choice(["Hm. ", "\n", "a <b> c\n"])] if r.random() < 0.3 else []
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        parts += ["<tool_call>", "\n", f"<function={r.choice(NAMES)}>", "\n"]
        for _ in range(r.choice([0, 1, 1, 2, 3])):
            end = r.choice(["\n", "\n", "\n", "", "\r\n", " "])
            parts += [
                f"<parameter={r.choice([*SCHEMAS, 'unknown'])}>",
                end,
                r.choice(VALUES),
                end,
                "</parameter>",
                "\n",
            ]
        parts += ["</function>", "\n", "</tool_call>", r.choice(["\n", "", " and "])]
    for _ in range(r.choice([0, 0, 1, 1, 2, 3])):
        broken(parts, r)
    text = "".join(parts)
    return text[: r.randrange(len(text) + 1)] if r.random() < 0.15 else text


def broken(parts: list[str], r: random.Random) -> None:
    at, other = r.randrange(len(parts)), r.randrange(len(parts))
    kind = r.choice(["drop", "repeat", "space", "insert", "swap", "chop", "without ="])
    if kind == "drop":
        parts[at] = ""
    elif kind in ("repeat", "insert"):
        parts.insert(at, parts[at] if kind == "repeat" else r.choice(VALUES))
    elif kind == "swap":
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == "space":
        space = r.choice([" ", " ", *WHITE])
        parts[at] = parts[at].replace("=", r.choice([f"{space}={space}", f"={space}", f"{space}="]))
        parts[at] = parts[at].replace(
            r.choice(["<", "</", ">"]), r.choice([f"<{space}", f"<{space}/{space}", f"{space}>"])
        )
    else:
        parts[at] = parts[at][:-1] if kind == "chop" else parts[at].replace("=", "")


def written_in_json(r: random.Random) -> str:
    value = r.choice(["x", 5, None, True, [1], {"a": 12345678901234567890123}, "\u4e2d", "<tool_call>", "</tool_call>"])
    right = json.dumps({"name": r.choice(["run", "unknown"]), "arguments": {"text": value}}, ensure_ascii=False)
    wrong = ['{"name": "run"}', "[1]", "x", "", '{"name": 5, "arguments": {}}', '{"name": "run", "arguments": {},}']
    parts = ["Hm. "] if r.random() < 0.3 else []
    for _ in range(r.choice([1, 1, 2])):
        parts += ["<tool_call>", "\n", r.choice([right] * 12 + wrong), "\n", "</tool_call>", r.choice(["", "\n", " x"])]
    if r.random() < 0.3:
        parts.pop(r.randrange(len(parts)))
    return "".join(parts)


class Served:
    """vLLM's parsers, put together as its server does for the parsers that the recipe names."""

    def __init__(self, tokenizer: Any, tool_parser: str) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager

        names = {"tool_parser_name": tool_parser, "reasoning_parser_name": "nemotron_v3"}
        self.parser = ParserManager.get_parser(**names, enable_auto_tools=True)
        self.request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS, model="m")
        self.tokenizer = tokenizer

    def read(self, text: str, *, thinking: bool) -> tuple[str, str, list[tuple[str, str]]]:
        parser = self.parser(self.tokenizer, self.request.tools, chat_template_kwargs={"enable_thinking": thinking})
        reasoning, content, calls = parser.parse(text, self.request, enable_auto_tools=True)
        return reasoning or "", content or "", [(call.name, call.arguments) for call in calls or []]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)  # each text that is no JSON is a traceback in vLLM's log
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("notation", "write"), [("qwen3_coder", written), ("hermes", written_in_json)])
def test_calls_are_those_of_the_serving_parser(notation: str, write: Any) -> None:
    served = Served(build_tokenizer(), notation)
    num_called = 0
    for seed in range(4000):
        text = write(random.Random(seed))
        before, calls = parse_tool_calls(text, TOOLS, notation=notation)
        _, content, expected = served.read(text, thinking=False)
        assert [(call.name, call.arguments) for call in calls] == expected, text
        assert before == (content if expected else text), text
        num_called += bool(calls)
    assert 0.3 < num_called / 4000 < 0.99


def test_reasoning_ends_where_the_serving_parser_ends_it(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    codec, served = ChatCodec(tmp_path), Served(tokenizer, "qwen3_coder")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    prompt = codec.encode({"input": "x", "tools": tools})
    num_called = 0
    for seed in range(1000):
        r = random.Random(seed)
        thoughts = r.choice(["", "I look.", "two\n\nlines ", "\u4e2d\u6587"])
        text = r.choice(["", "<think>"]) + thoughts + r.choice(["", "\n", "</think>", "\n</think>\n\n"]) + written(r)
        items = codec.decode(codec.token_ids(text), prompt_ids=prompt, tools=tools).items
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        reasoning = "".join(part["text"] for item in items for part in item.get("summary", ()))
        expected_reasoning, _, expected = served.read(text, thinking=True)
        assert calls == expected, text
        if calls or "<tool_call>" not in text:
            assert reasoning.removeprefix("<think>").rstrip() == expected_reasoning, text
        num_called += bool(calls)
    assert num_called > 500
