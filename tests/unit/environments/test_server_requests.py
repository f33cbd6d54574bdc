"""What a server cannot read is 422 and carries no number: it would else be taken for an answer that earns nothing."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import httpx
import pytest

from recipes.environments.agents.by_url.messages import ApiError, read_request
from recipes.environments.contract.verifier import (
    function_call_item,
    function_call_output_item,
    message_item,
    reasoning_item,
    require_response,
    response_object,
)
from recipes.environments.instances import GROUP_VERIFIERS, VERIFIERS, ServerInstance
from recipes.environments.server.resources import create_app
from recipes.exact_json import dumps
from tests.unit.environments.verifiers.test_verifier_contract import ROWS, SETTINGS

CALL = function_call_item("f", "{}", call_id="c")
MESSAGE = message_item("\\boxed{A}")
WRONG: dict[str, tuple[Any, str]] = {
    "no response": (None, "'response'"),
    "a text": ("\\boxed{A}", "'response'"),
    "a list": ([MESSAGE], "'response'"),
    "a chat completion": ({"choices": [{"message": {"role": "assistant", "content": "x"}}]}, "response.output"),
    "no output": ({"output": None}, "response.output"),
    "output as a text": ({"output": "\\boxed{A}"}, "response.output"),
    "one item for a list": ({"output": MESSAGE}, "response.output"),
    "an item that is null": ({"output": [MESSAGE, None]}, "response.output.1"),
    "an item as a text": ({"output": ["x"]}, "response.output.0"),
    "no type": ({"output": [{key: MESSAGE[key] for key in MESSAGE if key != "type"}]}, "response.output.0.type"),
    "a type of null": ({"output": [{**MESSAGE, "type": None}]}, "response.output.0.type"),
    "no content": ({"output": [{**MESSAGE, "content": None}]}, "response.output.0.content"),
    "a number as content": ({"output": [{**MESSAGE, "content": 3}]}, "response.output.0.content"),
    "a part as a text": ({"output": [{**MESSAGE, "content": ["x"]}]}, "response.output.0.content.0"),
    "a part without a type": ({"output": [{**MESSAGE, "content": [{"text": "x"}]}]}, "response.output.0.content.0"),
    "a part without text": ({"output": [{**MESSAGE, "content": [{"type": "output_text"}]}]}, "content.0.text"),
    "text of null": ({"output": [{**MESSAGE, "content": [{"type": "text", "text": None}]}]}, "content.0.text"),
    "a call without a name": ({"output": [{**CALL, "name": None}]}, "response.output.0.name"),
    "arguments as an object": ({"output": [{**CALL, "arguments": {}}]}, "response.output.0.arguments"),
    "a summary of numbers": ({"output": [{**reasoning_item([]), "summary": [1]}]}, "response.output.0.summary.0"),
    "a failed response": ({**response_object([]), "status": "failed"}, "response.status"),
    "an unfinished response": ({**response_object([MESSAGE]), "status": "in_progress"}, "response.status"),
}
RIGHT: dict[str, Any] = {
    "a message": response_object([MESSAGE]),
    "nothing": response_object([]),
    "cut": response_object([reasoning_item(["x"])], incomplete_reason="max_output_tokens"),
    "a turn with tools": response_object(
        [reasoning_item([]), CALL, function_call_output_item("x", call_id="c"), MESSAGE]
    ),
    "content as a text": {"output": [{**MESSAGE, "content": "x"}]},
    "a refusal": {"output": [{**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]}]},
    "another kind of item": {"output": [{"type": "web_search_call", "id": "w"}, MESSAGE]},
    "null padding": {"output": [{**MESSAGE, "name": None, "summary": None}], "status": None},
    "null as a summary": {"output": [{**reasoning_item([]), "summary": None}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_names_its_field(name: str) -> None:
    response, field = WRONG[name]
    with pytest.raises(ValueError, match=r"field '.*': got .*, expected") as raised:
        require_response(response)
    assert field in str(raised.value)


@pytest.mark.parametrize("name", RIGHT)
def test_answers_are_read(name: str) -> None:
    response = deepcopy(RIGHT[name])
    assert require_response(response) == RIGHT[name]


@pytest.mark.parametrize("verifier", ROWS)
async def test_no_verifier_answers_with_a_number(verifier: str) -> None:
    settings = VERIFIERS[verifier].settings(**SETTINGS.get(verifier, {}))
    instance = ServerInstance(name="s", verifier=verifier, url=None, timeout_seconds=30, settings=settings)
    transport = httpx.ASGITransport(create_app(instance))
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        for name, (response, field) in WRONG.items():
            reply = await http.post("/verify", content=dumps({**ROWS[verifier], "response": response}))
            assert (reply.status_code, list(reply.json())) == (422, ["detail"]), name
            assert field in reply.json()["detail"], name


async def test_a_comparison_names_the_answer_that_cannot_be_read() -> None:
    own = GROUP_VERIFIERS["genrm_compare"]
    instance = ServerInstance(name="s", verifier="genrm_compare", url=None, timeout_seconds=30, settings=own.settings())
    transport = httpx.ASGITransport(create_app(instance))
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        for name, (response, field) in WRONG.items():
            body = {"conversation_history": [], "response_objs": [RIGHT["a message"], response]}
            reply = await http.post("/compare", content=dumps(body))
            assert (reply.status_code, list(reply.json())) == (422, ["detail"]), name
            assert field.strip("'").replace("response", "response_objs.1", 1) in reply.json()["detail"], name


USER = [{"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("responses", {"input": ["text"]}),
        ("responses", {"input": [*USER, None]}),
        ("responses", {"input": []}),
        ("responses", {"input": USER, "text": "json"}),
        ("responses", {"input": USER, "stream": "yes"}),
        ("chat", {"messages": USER, "stream": 1}),
        ("chat", {"messages": USER, "logprobs": "true"}),
        ("chat", {"messages": USER, "stream_options": [True]}),
        ("chat", {"messages": USER, "stream_options": {"include_usage": "yes"}}),
        ("chat", {"messages": USER, "max_tokens": "5"}),
        ("chat", {"messages": USER, "stop": [""]}),
        ("chat", {"messages": USER, "tools": [{"type": "function"}]}),
        ("chat", {"messages": [*USER, "text"]}),
    ],
)
def test_a_request_to_the_model_server_is_never_read_in_part(api: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        read_request(api, dumps(body))
    assert raised.value.status == 400 and "field '" in str(raised.value)
