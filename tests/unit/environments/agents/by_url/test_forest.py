"""What attaches, forks or starts a root, and what of it is trained; numbers are those of the conformance cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recipes.environments.agents.by_url.agent import sequences_of
from recipes.environments.agents.by_url.forest import CallNode, Forest
from recipes.environments.agents.by_url.messages import CHAT, CalledFunction, ChatMessage, ModelRequest, tools_digest
from tests.unit.environments.agents.by_url.calling import TOOL
from tests.unit.environments.agents.by_url.clients import add

OTHER = {"type": "function", "function": {"name": "look", "parameters": {"properties": {}, "type": "object"}}}
SYSTEM = ChatMessage(role="system", text="be brief")
MANY = 10**6


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", text=text)


def tool(text: str) -> ChatMessage:
    return ChatMessage(role="tool", text=text)


def said(text: str = "", *, reasoning: str = "", arguments: str | None = None) -> ChatMessage:
    calls = () if arguments is None else (CalledFunction(name="bash", arguments=arguments),)
    return ChatMessage(role="assistant", text=text, reasoning=reasoning, calls=calls)


def ask(
    forest: Forest, *messages: ChatMessage, served: ChatMessage, tools: Any = (TOOL,), sampled: int = 2
) -> CallNode:
    return add(forest, ModelRequest(api=CHAT, messages=messages, tools=tuple(tools)), served, sampled=sampled)


def second(served: ChatMessage, echoed: ChatMessage, **options: Any) -> CallNode:
    """Return the node of a second call whose history has `echoed` in place of `served`."""
    forest = Forest()
    ask(forest, SYSTEM, user("u"), served=served)
    return ask(forest, SYSTEM, user("u"), echoed, user("more"), served=said("end"), **options)


def test_case_22_edited_reasoning_is_another_history() -> None:
    served = said("x", reasoning="plan")
    assert second(served, said("x", reasoning="plan ")).kind == "extend"
    assert second(served, said("x")).kind == "extend"
    node = second(served, said("x", reasoning="another plan"))
    assert (node.kind, node.reason) == ("root", "reasoning_changed")


@pytest.mark.parametrize(
    ("stored", "given", "kind"),
    [
        ('{"a": 1.0, "b": [true]}', '{"b":[true],"a":1}', "extend"),
        ('{"n": 12345678901234567890}', '{"n": 12345678901234567000}', "root"),  # equal as float64 only
        ('{"a": true}', '{"a": 1}', "root"),
        ('{"a": null}', "{}", "root"),
        ('{"a": ', '{"a": ', "extend"),
        ('{"a": ', '{"a":', "root"),
        ("[" * 2000, "[" * 2000, "extend"),
        ("", "{}", "root"),
    ],
)
def test_case_23_arguments_are_compared_as_values(stored: str, given: str, kind: str) -> None:
    node = second(said(arguments=stored), said(arguments=given))
    assert (node.kind, node.reason) == (kind, "" if kind == "extend" else "tool_calls_changed")


def test_case_23_after_the_first_turn_changed_arguments_fork() -> None:
    forest = Forest()
    first, called = said("a"), said(arguments='{"a": true}')
    ask(forest, user("u"), served=first)
    ask(forest, user("u"), first, user("v"), served=called)
    node = ask(forest, user("u"), first, user("v"), said(arguments='{"a": 1}'), tool("r"), served=said("b"))
    assert (node.kind, node.parent, node.reason) == ("fork", forest.nodes[0], "tool_calls_changed")


def test_case_24_tools_are_compared_by_name_and_schema() -> None:
    reordered = {"function": {**dict(reversed(TOOL["function"].items())), "strict": True}, "type": "function"}  # type: ignore[union-attr,attr-defined]
    assert tools_digest([TOOL, OTHER]) == tools_digest([OTHER, reordered])
    assert second(said("x"), said("x"), tools=[reordered]).kind == "extend"
    node = second(said("x"), said("x"), tools=[TOOL, OTHER])
    assert (node.kind, node.reason) == ("root", "tools_changed")


def test_case_25_changed_system_text_starts_a_root() -> None:
    forest = Forest()
    ask(forest, SYSTEM, user("u"), served=said("x"))
    node = ask(forest, replace(SYSTEM, text="step 2"), user("u"), said("x"), user("more"), served=said("y"))
    assert (node.kind, node.reason) == ("root", "system_changed")
    assert forest.counts == {"system_changed": 1}


def test_case_26_a_shortened_tool_result_forks_and_later_answers_are_context() -> None:
    forest = Forest()
    a, b, c = said("a"), said("b"), said("c")
    ask(forest, user("u"), served=a)
    ask(forest, user("u"), a, tool("long result"), served=b)
    ask(forest, user("u"), a, tool("long result"), b, tool("r2"), served=c)
    node = ask(forest, user("u"), a, tool("..."), b, tool("r2"), c, tool("r3"), served=said("d"))
    assert (node.kind, node.parent, node.reason) == ("fork", forest.nodes[0], "tool_result_changed")
    assert [message.text for message in node.appended] == ["...", "b", "r2", "c", "r3"]
    kept = sequences_of(forest, max_tokens=MANY)
    assert [sorted(numbers) for numbers in kept.trained] == [[0, 1, 2], [3]]


def test_the_routes_of_a_context_come_with_the_turn_behind_it() -> None:
    forest = Forest()
    a = said("a")
    ask(forest, user("u"), served=a)
    ask(forest, user("u"), a, tool("one"), served=said("b"))
    ask(forest, user("u"), a, tool("other"), served=said("c"))
    for node in forest.nodes:
        node.turn = replace(node.turn, routes=bytes([node.number]))
    kept = sequences_of(forest, max_tokens=MANY)
    assert [turn.routes for turn in kept.turns(0)] == [b"\x00", b"\x02"]
    assert [[turn.routes for turn in turns] for turns in kept.branches()] == [[b"\x00\x01"]]


def test_first_difference_names_the_reason() -> None:
    forest = Forest()
    ask(forest, user("u"), served=said("a"))
    ask(forest, user("u"), said("a"), user("v"), served=said("b"))
    reasons = {
        "user_changed": (user("w"),),
        "assistant_text_changed": (user("u"), said("other"), user("v")),
        "foreign_assistant": (said("hello"), user("u")),
        "sibling": (user("u"),),
    }
    assert {ask(forest, *messages, served=said("z")).reason for messages in reasons.values()} == set(reasons)
    extended = Forest()
    ask(extended, user("u"), served=said("a"))
    more = ask(extended, user("u"), said("a\nCalling tools: [b]"), user("v"), served=said("b"))
    assert more.reason == "assistant_text_extended"
    long = Forest()
    ask(long, user("u"), user("v"), served=said("a"))
    assert ask(long, user("u"), served=said("a")).reason == "history_shorter"


def test_twins_are_told_apart_by_their_ids_else_the_newest_is_continued() -> None:
    forest = Forest()
    for name in ("call_0", "call_1"):
        ask(forest, user("u"), served=replace(said(arguments="{}"), ids=(name,)))
    named = ask(forest, user("u"), replace(said(arguments="{}"), ids=("call_0",)), tool("r"), served=said("x"))
    other = ask(forest, user("u"), said(arguments="{}"), tool("r"), served=said("x"))
    assert (named.parent, other.parent) == (forest.nodes[0], forest.nodes[1])


def test_case_38_each_delivered_token_is_trained_once() -> None:
    forest = Forest()
    ask(forest, user("u"), served=said("a"), sampled=3)
    ask(forest, user("u"), said("a"), user("v"), served=said("b"), sampled=4)
    ask(forest, user("u"), said("a"), user("w"), served=said("c"), sampled=5)
    ask(forest, user("other"), served=said("d"), sampled=6)
    hidden = ask(forest, user("nobody took this"), served=said("e"), sampled=7)
    hidden.is_delivered = False
    kept = sequences_of(forest, max_tokens=MANY)
    assert len(kept.paths) == 3 and kept.lost_share == 0
    turns = [turn for index in range(3) for turn in kept.turns(index)]
    assert sum(len(turn.token_ids) for turn in turns) == kept.num_delivered == 3 + 4 + 5 + 6
    for index, path in enumerate(kept.paths):  # a sequence is the whole path, what is context included
        ids = [i for turn in kept.turns(index) for part in (turn.prompt_token_ids, turn.token_ids) for i in part]
        assert tuple(ids) == path[-1].token_ids()


def test_only_the_main_conversation_is_trained_where_that_is_asked() -> None:
    forest = Forest()
    ask(forest, user("a title, please"), served=said("t"), sampled=90)
    ask(forest, user("u"), served=said("a"), sampled=3)
    ask(forest, user("u"), said("a"), user("v"), served=said("b"), sampled=4)
    ask(forest, user("u"), said("a"), user("w"), served=said("c"), sampled=3)
    kept = sequences_of(forest, max_tokens=MANY, main_only=True)
    assert [[node.number for node in path] for path in kept.paths] == [[1, 3]] and kept.trained == ({1, 3},)
    assert (kept.num_trained, kept.lost_share, kept.ignored_share) == (6, 0.0, 0.94)
    assert sequences_of(forest, max_tokens=MANY).ignored_share == 0.0


def test_an_undelivered_call_that_a_delivered_one_continues_is_trained() -> None:
    forest = Forest()
    first = ask(forest, user("u"), served=said("a"))
    first.is_delivered = False
    ask(forest, user("u"), said("a"), user("v"), served=said("b"))
    assert sequences_of(forest, max_tokens=MANY).trained == ({0, 1},)


def test_case_39_what_does_not_fit_is_left_out_and_reported() -> None:
    forest = Forest()
    for number in range(20):
        ask(forest, user(str(number)), served=said("a"), sampled=2 + (number == 3))
    kept = sequences_of(forest, max_tokens=MANY)
    assert [path[0].number for path in kept.paths] == [19, 3, 18, 17, 16, 15, 14, 13]
    assert kept.lost_share == pytest.approx(1 - 17 / 41)
    short = sequences_of(forest, max_tokens=4)  # room for one
    assert len(short.paths) == 1 and short.num_trained == 2


def test_an_empty_forest_has_no_sequences() -> None:
    for main_only in (False, True):
        kept = sequences_of(Forest(), max_tokens=MANY, main_only=main_only)
        assert (kept.paths, kept.lost_share, kept.ignored_share) == ((), 0.0, 0.0)
