"""Chat templates: what cannot be compiled or shown is one clear problem, before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.template import compile_template
from recipes.environments.environments import Environments
from recipes.errors import InputError
from tests.configuration import environments as env_block

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ m }}{% endgeneration %}!", "hi!"),
        ("{%- generation -%} {{ m }} {%- endgeneration -%} !", "hi!"),
        ("{% for c in m %}{% generation %}{{ loop.index }}{{ c }}{% endgeneration %}{% endfor %}", "1h2i"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ {'b': 1, 'a': [1, 2]} | tojson }}", '{"b": 1, "a": [1, 2]}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":[1],"b":1}'),
        ("{{ '\u00e9<>' | tojson(ensure_ascii=true) }}{{ '\u00e9<>' | tojson }}", '"\\u00e9<>""\u00e9<>"'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for c in m %}{% break %}{% endfor %}{% for c in m %}{% continue %}{% endfor %}.", "."),
        ("{{ documents is none }}{{ strftime_now('%Y') | length }}", "True4"),
    ],
)
def test_what_templates_are_written_with(source: str, expected: str) -> None:
    assert compile_template(source).render(m="hi", documents=None) == expected


@pytest.mark.parametrize(
    "source", ["{{ x }", "{% if %}", "{% unknown %}", "{{ x | unknown }}", "{% generation %}", "{{ " + "(" * 9999]
)
def test_what_cannot_be_compiled_is_one_problem(source: str, tokenizer_dir: Path) -> None:
    with pytest.raises(InputError) as raised:
        ChatCodec(tokenizer_dir, chat_template=source)
    (problem,) = raised.value.problems
    assert str(tokenizer_dir) in str(problem) and "the chat template cannot be compiled (" in str(problem)
    assert "\n" not in str(problem)


SHOWS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ANSWER = {"type": "function_call_output", "call_id": "c", "output": "x"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
REFUSES = {  # what a template refuses -> how
    "system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "tools": "{% if tools %}{{ tools | join }}{{ 1 / 0 }}{% endif %}",
    "tool": "{% for m in messages %}{% if m.role == 'tool' %}{{ m.nothing.more }}{% endif %}{% endfor %}",
    "calls": "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments + 'x' }}{% endfor %}",
    "reasoning": "{% for m in messages if m.reasoning_content %}{{ raise_exception('thoughts') }}{% endfor %}",
    "kwargs": "{% if mode %}{{ raise_exception('mode') }}{% endif %}",
}
MODE = {"chat_template_kwargs": '{"mode": 1}'}


@pytest.mark.parametrize(
    ("params", "refused", "refused_later"),
    [
        ({"input": [USER]}, set(), {"reasoning"}),
        ({"input": "u"}, set(), {"reasoning"}),
        ({"input": [SYSTEM, USER]}, {"system"}, {"system", "reasoning"}),
        ({"input": [USER], "instructions": "s"}, {"system"}, {"system", "reasoning"}),
        ({"input": [USER], "tools": [TOOL]}, {"tools"}, {"tools", "tool", "calls", "reasoning"}),
        ({"input": [USER, CALL, ANSWER, USER]}, {"tool", "calls"}, {"tool", "calls", "reasoning"}),
        ({"input": [USER, THOUGHT, {"role": "assistant", "content": "a"}, USER]}, {"reasoning"}, {"reasoning"}),
        ({"input": [USER], "metadata": MODE}, {"kwargs"}, {"kwargs", "reasoning"}),
    ],
)
def test_each_kind_of_request_is_shown_once_before_the_run(
    params: dict[str, Any], refused: set[str], refused_later: set[str], tokenizer_dir: Path
) -> None:
    for what, source in REFUSES.items():
        codec = ChatCodec(tokenizer_dir, chat_template=source + SHOWS)
        for number in range(2):  # other words, the same kind
            asked = {**params, "input": [*params["input"], {**USER, "content": f"{number}"}]} if number else params
            if number and isinstance(params["input"], str):
                continue
            now, later = (codec.why_refused(asked, {}, goes_on=goes_on) for goes_on in (False, True))
            assert (now is not None) is (what in refused), (what, now)
            assert (later is not None) is (what in refused_later), (what, later)
            assert now is None or now.startswith("the chat template refuses the request (")


def test_a_row_that_the_template_refuses_is_named_when_it_is_read(tokenizer_dir: Path) -> None:
    codec = ChatCodec(tokenizer_dir, chat_template=REFUSES["tools"] + SHOWS)
    gym = env_block(instances={}, invalid_tool_call_patterns=(), thinking_tags=())
    environments = Environments.from_config(gym, codec)
    row: dict[str, Any] = {
        "responses_create_params": {"input": [USER]},
        "agent_ref": {"name": "mcqa_simple_agent"},
        "options": [{"A": "x"}],
        "expected_answer": "A",
    }
    assert environments.check_row(row) == []
    row["responses_create_params"]["tools"] = [TOOL]
    expected = "the chat template refuses the request (ZeroDivisionError: division by zero)"
    assert environments.check_row(row) == [f"responses_create_params: {expected}"]
    environments.close()


def test_a_template_may_raise() -> None:
    with pytest.raises(TemplateError, match="no"):
        compile_template("{{ raise_exception('no') }}").render()
