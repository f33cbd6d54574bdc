"""The requests of real clients, attached as a reader would attach them. Numbers are those of the conformance cases."""

from __future__ import annotations

import pytest

from recipes.environments.agents.by_url.agent import sequences_of
from recipes.environments.agents.by_url.forest import CallNode, Forest
from recipes.environments.agents.by_url.messages import ApiError
from tests.unit.environments.agents.by_url.clients import add, kinds, read, recording, recordings

CASES = [
    pytest.param("openai_chat_tools", "R E", id="1"),
    pytest.param("openai_chat_two_tools", "R E", id="2"),
    pytest.param("openai_chat_bad_arguments", "R E", id="3"),
    pytest.param("openai_chat_stream_helper", "R E", id="4"),
    pytest.param("openai_responses_tools", "R E", id="5"),
    pytest.param("openai_responses_stream", "R E", id="5-stream"),
    pytest.param("openai_no_tool_call_id", "R E", id="5-no-call-id"),
    pytest.param("langchain_chat_tools", "R E", id="7"),
    pytest.param("langchain_chat_two_tools", "R E", id="7-two-tools"),
    pytest.param("langchain_no_tool_call_id", "R E", id="7-no-call-id"),
    pytest.param("langchain_responses_tools", "R E", id="8"),
    pytest.param("mini_swe_agent_chat", "R E F E E F", id="9"),
    pytest.param("mini_swe_agent_responses", "R E F E E F", id="9-responses"),
    pytest.param("mini_swe_agent_text", "R E F", id="11"),
]


def replayed(name: str) -> tuple[Forest, list[CallNode]]:
    recorded, forest = recording(name), Forest()
    pairs = zip(recorded.requests, recorded.served, strict=True)
    return forest, [add(forest, read(request), served) for request, served in pairs]


@pytest.mark.parametrize(("name", "expected"), CASES)
def test_calls_are_attached_as_a_reader_would(name: str, expected: str) -> None:
    forest, nodes = replayed(name)
    assert kinds(nodes) == expected
    sampled = [token for node in nodes for token in node.turn.token_ids]
    kept = sequences_of(forest, max_tokens=10**6)
    trained = [t for index in range(len(kept.paths)) for made in kept.turns(index) for t in made.token_ids]
    assert sorted(trained) == sorted(sampled), "each sampled token is trained once"
    assert kept.lost_share == 0


@pytest.mark.parametrize("name", [name for name in recordings() if recording(name).expected])
def test_every_recording_gives_the_calls_that_it_expects(name: str) -> None:
    """Those that expect none are of retries, refusals and ids, which have tests of their own."""
    expected = recording(name).expected
    _, nodes = replayed(name)
    parents = [node.parent.number if node.parent else None for node in nodes]
    assert [node.kind for node in nodes] == [call["result"] for call in expected]
    assert parents == [call["parent"] for call in expected]


@pytest.mark.parametrize("name", ["mini_swe_agent_chat", "mini_swe_agent_responses"])
def test_hidden_turns_fork_and_say_so(name: str) -> None:
    forest, nodes = replayed(name)
    assert forest.counts == {"assistant_missing": 2}
    kept = sequences_of(forest, max_tokens=10**6)
    assert [[node.number for node in path] for path in kept.paths] == [[0, 2, 3, 5], [0, 2, 3, 4], [0, 1]]
    assert kept.trained == ({0, 2, 3, 5}, {4}, {1})
    [dead_end] = kept.turns(1)
    assert dead_end.token_ids == nodes[4].turn.token_ids
    assert dead_end.prompt_token_ids == (9000, 0, 1, 9002, 200, 201, 9003, 300, 301, 9004)


@pytest.mark.parametrize("pair", [("openai_chat_tools", "openai_responses_tools")])
def test_both_apis_of_one_script_give_the_same_messages(pair: tuple[str, str]) -> None:
    one, other = (replayed(name)[1] for name in pair)
    assert one[-1].served.text.strip() == other[-1].served.text.strip()
    assert [m.role for m in one[-1].messages()][-4:] == [m.role for m in other[-1].messages()][-4:]


def test_several_answers_to_one_request_are_refused() -> None:
    """Case 12: the field is named; without it, sampling fields are counted and have no effect."""
    request = recording("mini_swe_agent_sampling_fields").requests[0]
    with pytest.raises(ApiError, match="field 'n'") as refused:
        read(request)
    assert refused.value.status == 400
    del request["body"]["n"]
    taken = read(request)
    assert {"replaced.temperature", "replaced.seed"} <= taken.counts.keys()
    assert taken.stop and taken.has_logprobs and taken.max_tokens
