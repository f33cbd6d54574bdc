"""JSON that stays what it is: long integers on their way through rows, requests and answers; each key once."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from recipes.environments.agents.by_url.messages import CalledFunction, tools_digest
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.verifier import read_arguments
from recipes.environments.swe.task import facts_of
from recipes.environments.verifiers import swerl_gen
from recipes.exact_json import dumps, loads, loads_row
from recipes.grpo.data import PromptDataset, check_line, row_id
from tools.data.curriculum import write
from tools.environments.check.answers import goldens
from tools.environments.check.target import _has_reward

INTEGERS = [
    sign * (2**power + more) for power in (31, 53, 63, 64, 100, 1000) for more in (-1, 0, 1) for sign in (1, -1)
]


@pytest.mark.parametrize("integer", INTEGERS)
def test_integers_of_any_length_are_read_and_written(integer: int) -> None:
    value = {"a": [integer, {"b": integer}], "text": str(integer), "float": 0.1234567890123456789}
    for text in (dumps(value), json.dumps(value), json.dumps(value, indent=1).encode()):
        assert loads(text) == value
        assert isinstance(loads(text)["a"][0], int)
    assert dumps(value) == json.dumps(value, separators=(",", ":")).encode()
    assert loads_row(dumps(value)) == value
    assert read_arguments(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["{", "NaN", "[1" + "0" * 20 + ", Infinity]", "[" * 500_000, b"\xff", "1" * 5000, '"\\ud800"']
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)
    with pytest.raises(ValueError):
        loads_row(text.encode() if isinstance(text, str) else text)


def test_what_has_no_form_in_json_is_a_type_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ({"a": {1, 2}}, [2**64, float("nan")], deep, [object()]):
        with pytest.raises(TypeError):
            dumps(value)
    assert dumps({"b": "\ud800", "a": 2**64}, sort_keys=True) == b'{"a":18446744073709551616,"b":"?"}'


def test_plain_rows_keep_their_ids() -> None:
    row = {"b": [1, 2.5, None, True, "\u4e2d"], "a": {"z": 0, "y": 2**63}}
    assert dumps(row, sort_keys=True) == orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
    assert row_id({"seed": 2**64 + 1}) != row_id({"seed": 2**64})


@pytest.mark.parametrize(
    ("line", "key", "count"),
    [
        ('{"a": 1, "a": 1}', "a", 2),
        ('{"x": [{"options": {"A": "x", "B": "y", "A": "z", "A": "z"}}]}', "A", 3),
        ('{"a": 1, "\\u0061": 2}', "a", 2),
    ],
)
def test_a_key_that_is_repeated_in_one_object_is_named(line: str, key: str, count: int) -> None:
    (problem,) = check_line(line.encode(), lambda row: [])
    assert problem == f"invalid JSON (one object has the key '{key}' {count} times)"


def test_a_drawn_row_holds_its_integers(tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "u"}, "agent_ref": {"name": "x"}, "seed": -(2**70), "top": {"a": 2**64}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert PromptDataset(tmp_path / "rows.jsonl")[0] == row


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ('{"id": 9007199254740993}', '{"id": 9007199254740992}', False),
        ('{"id": 18446744073709551617}', '{"id": 18446744073709551616}', False),
        ('{"id": 18446744073709551617}', '{"id":18446744073709551617}', True),
        ('{"id": 2}', '{"id": 2.0}', True),
        ('{"id": 10000000000000000000000}', '{"id": 1e22}', True),
        ('{"id": true}', '{"id": 1}', False),
        ('{"id": 0.1}', '{"id": 0.10}', True),
        ('{"id": 1e400}', '{"id":1e400}', False),
    ],
)
def test_numbers_of_calls_are_compared_as_they_are(one: str, other: str, is_same: bool) -> None:
    compared = [CalledFunction(name="f", arguments=text).compared for text in (one, other)]
    assert (compared[0] == compared[1]) is is_same


def test_tools_with_long_integers_are_told_apart() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"n": {"maximum": 2**64 + n}}}} for n in (0, 1)]
    assert tools_digest(tools[:1]) != tools_digest(tools[1:])


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, '{"a": NaN}', '{"a":' * 50_000])
def test_json_text_inside_a_row_is_refused_with_its_field(text: str) -> None:
    """It is read as exactly as the row: what is nested too deep, or is no number of JSON, is no crash and no value."""
    params = {"input": "hi", "metadata": {"chat_template_kwargs": text, "instance_dict": text}}
    with pytest.raises(ValueError, match=r"chat_template_kwargs: got"):
        write.template_kwargs({"responses_create_params": params})
    with pytest.raises(ValueError, match=r"instance_dict.*: got"):
        facts_of({"responses_create_params": params})
    with pytest.raises(ValueError, match=r"chat_template_kwargs.*: got"):
        row_template_kwargs(params)
    with pytest.raises(ValueError, match=r"relevant_file_contents.*: got"):
        swerl_gen._files(text)
    with pytest.raises(ValueError, match=r"FAIL_TO_PASS.*: got"):
        swerl_gen._names({"FAIL_TO_PASS": text}, "FAIL_TO_PASS")


def test_a_reply_whose_reward_is_no_number_of_json_is_no_reward() -> None:
    for reply, has_reward in ((b'{"reward": 1}', True), (b'{"reward": NaN}', False), (b'{"reward": true}', False)):
        assert _has_reward(reply) == has_reward, reply
    assert not _has_reward(DEEP.encode())


def test_an_answer_to_a_schema_has_its_large_numbers() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 2**70 + 1}}, "required": ["n"]}
    (golden,) = goldens("structured_outputs", {"schema_str": dumps(schema).decode()})
    assert str(2**70 + 1) in str(golden)
