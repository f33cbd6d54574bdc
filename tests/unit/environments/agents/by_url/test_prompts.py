"""The ids behind an answer, and one against the other: suffix and whole rendering. Numbers of conformance cases."""

from __future__ import annotations

import asyncio

import pytest

from recipes.environments.agents.by_url.forest import cut_at_stop
from recipes.environments.agents.by_url.server import ModelServer
from recipes.environments.chat.codec import ChatCodec
from tests.unit.environments.agents.by_url.calling import END, TOOL, Policy, answered, serving, user

DONE = f"fine</think>Done.{END}"
TAILS = {
    "tool": [answered("r")],
    "tool tool": [answered("r"), answered("{}")],
    "user": [user("go on")],
    "tool user": [answered("r"), user("go on")],
    "system": [{"role": "system", "content": "note"}],
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"truncate_history_thinking": True}])
def test_case_36_suffix_equals_whole_rendering(codec: ChatCodec, tail: str, kwargs: dict[str, bool]) -> None:
    call = {"name": "bash", "arguments": "{}"}
    answer = {"role": "assistant", "content": "<think>so</think>text", "tool_calls": [{"id": "0", "function": call}]}
    history = [{"role": "system", "content": "long"}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    suffix = codec.suffix(answer, TAILS[tail], kwargs)
    whole = codec.encode_chat([*history, answer, *TAILS[tail]], [TOOL], kwargs)
    assert suffix[0] == codec.eos_token_id and whole[-len(suffix) :] == suffix
    assert whole[: -len(suffix)].count(codec.eos_token_id) == len(history)


@pytest.mark.parametrize(("keeps", "expected"), [(True, "R E E"), (False, "R E F")])
async def test_case_37_template_that_drops_old_reasoning(codec: ChatCodec, keeps: bool, expected: str) -> None:
    """Kept by default; else the call forks where the rendering leaves what was sampled."""
    kwargs = {"truncate_history_thinking": True, "enable_thinking": False}
    policy = Policy(codec, [f"Yes.{END}", f"<think>hm</think>Sure.{END}", f"Done.{END}"])
    async with serving(policy, keeps_history=keeps, template_kwargs=kwargs) as rollout:
        history = [user("a")]
        for text in ("b", "c", "d"):
            message = await rollout.chat(history)
            history += [message, user(text)]
    assert rollout.kinds == expected
    assert rollout.session.forest.counts == ({} if keeps else {"thinking_stripped": 1})
    last = codec.text(policy.prompts[-1])
    assert ("hm</think>" in last) == keeps and "Sure." in last


async def test_template_that_shows_no_end_starts_roots(codec: ChatCodec) -> None:
    policy = Policy(codec, [DONE])
    plain = ChatCodec.__new__(ChatCodec)
    for name, value in vars(codec).items():
        setattr(plain, name, value)
    plain._end = "<|never|>"
    policy.codec = plain
    async with serving(policy) as rollout:
        message = await rollout.chat([user("a")])
        await rollout.chat([user("a"), message, user("b")])
    assert rollout.kinds == "R R"
    assert rollout.session.forest.counts == {"template_not_extendable": 1}


def test_stop_strings_cut_at_the_first_token_that_completes_one(codec: ChatCodec) -> None:
    ids = codec._tokenize("abc STOP def STOP")
    assert codec.text(ids[: cut_at_stop(codec, ids, ["STOP", "zzz"])]) == "abc STOP"
    assert cut_at_stop(codec, ids, ["zzz"]) is None and cut_at_stop(codec, (), ["a"]) is None


@pytest.mark.parametrize(("num_rollouts", "num_turns"), [(24, 3), pytest.param(768, 20, marks=pytest.mark.slow)])
async def test_case_41_rollouts_side_by_side_do_not_mix(codec: ChatCodec, num_rollouts: int, num_turns: int) -> None:
    app = ModelServer()

    async def one(number: int) -> None:
        policy = Policy(codec, [f"r{number}</think>rollout {number}{END}"])
        async with serving(policy, app=app) as rollout:
            history = [user(f"task {number}")]
            for turn in range(num_turns):
                message = await rollout.chat(history)
                assert message["content"] == f"rollout {number}"
                history += [message, user(str(turn))]
            assert rollout.kinds == " ".join(["R", *"E" * (num_turns - 1)])
            assert f"task {number}<" in codec.text(policy.prompts[-1])

    await asyncio.gather(*(one(number) for number in range(num_rollouts)))
    assert app._sessions == {}
