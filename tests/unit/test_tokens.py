"""The arrays of a group: every token in its place, every size in the header, whatever the rollouts are like."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from recipes.tokens import MOST_CHARACTERS, characters_per_token, pack_rollouts
from recipes.types import Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import as_lists


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...], *spans: tuple[int, int, int], **flags: bool) -> Turn:
    return Turn(
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=tuple(-0.5 * (n + 1) for n in range(len(sampled))),
        versions=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        finish_reason="stop" if sampled else "length",
        **flags,
    )


def rollout(*turns: Turn, text: str = "", reward: float | None = 1.0, trajectory: Any = None) -> Rollout:
    done = Rollout(turns=turns, status=RolloutStatus.COMPLETED, reason="r", reward=reward, output_text=text)
    return replace(done, trajectory=trajectory)


ROLLOUTS = [
    rollout(
        turn((1, 2), (3, 4, 5), (6, 0, 1), (7, 1, 3), is_invalid_tool_call=True),
        turn((6,), (7,), (7, 0, 1), has_malformed_thinking=True),
        turn((8, 9), ()),
        text="half a pair \ud800, a line \u2028 and \u00e4",
    ),
    rollout(reward=None),
    rollout(turn((), ())),
    rollout(turn((1,), (2**31 - 1,), (7, 0, 1)), text="x", trajectory={"patch": "half \ud800"}),
]


def test_rows_are_cut_out_of_the_group() -> None:
    _, tokens = pack_rollouts(ROLLOUTS)
    row = tokens.row(0)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.token_mask().tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 0]
    assert row.logprobs().tolist() == [0, 0, -0.5, -1.0, -1.5, 0, -0.5, 0, 0]
    assert row.advantages(0.25, (None, -5.0, -2.0, None)).tolist() == [0.25] * 2 + [-5] * 3 + [0.25, -2] + [0.25] * 2
    assert tokens.row(3).token_ids.tolist() == [1, 2**31 - 1]
    assert [tokens.output_text(member) for member in range(4)] == [one.output_text for one in ROLLOUTS]
    assert [tokens.trajectory(member) for member in range(4)] == [one.trajectory for one in ROLLOUTS]


def test_the_last_answer_has_its_ids_log_probabilities_and_versions() -> None:
    turns = turn((1, 2), (3, 4), (6, 0, 2)), turn((5,), (6, 7, 8), (6, 0, 1), (7, 1, 3))
    _, tokens = pack_rollouts([rollout(reward=None), rollout(*turns)])
    ids, logprobs, versions = tokens.last_answer(1)
    assert (ids.tolist(), logprobs.tolist(), versions) == ([6, 7, 8], [-0.5, -1.0, -1.5], [(6, 1), (7, 2)])
    assert [len(part) for part in tokens.last_answer(0)] == [0, 0, 0]


def test_each_token_has_its_characters() -> None:
    parts = [b"The ", "\u20ac".encode()[:2], "\u20ac".encode()[2:], b"!", b"<end>"]

    def text_of(ids: tuple[int, ...]) -> str:
        return b"".join(parts[one] for one in ids).decode(errors="replace")

    assert characters_per_token([0, 1, 2, 3], text_of, "The \u20ac!") == [4, 0, 1, 1]
    assert characters_per_token([0, 1, 2], text_of, "The \u20ac!") == [4, 0, 1]  # the beginning of a longer answer
    assert characters_per_token([0, 3, 4], text_of, "The !") == [4, 1, 5]  # the text lacks the end token
    assert characters_per_token([0, 3], text_of, "quite another text") == []
    assert characters_per_token([], text_of, "") == []


def test_the_routes_of_a_row_are_those_of_its_turns_in_order() -> None:
    first, second = replace(turn((1,), (2,)), routes=b"one"), replace(turn((3,), (4,)), routes=b"two")
    _, tokens = pack_rollouts([rollout(), rollout(first, second), rollout(turn((5,), (6,)))])
    assert [tokens.row(row).routes for row in range(3)] == [b"", b"onetwo", b""]
    of_before = replace(tokens, routes=np.zeros(0, np.uint8), routes_offsets=np.zeros(0, np.int64))
    assert of_before.row(1).routes == b"", "an older checkpoint has none"


def test_a_teachers_log_probabilities_lie_on_the_tokens_that_were_sampled() -> None:
    first = replace(turn((1,), (2, 3)), teacher_logprobs=(-1.0, -2.0))
    second = replace(turn((4, 5), (6,)), teacher_logprobs=(-3.0,))
    _, tokens = pack_rollouts([rollout(), rollout(first, second), rollout(turn((7,), (8,)), reward=None)])
    taught = [tokens.row(row).teacher_logprobs() for row in range(3)]
    assert [own if own is None else own.tolist() for own in taught] == [[0.0], [0, -1, -2, 0, 0, -3], [0.0, 0.0]]
    _, without = pack_rollouts([rollout(turn((7,), (8,)))])
    assert without.row(0).teacher_logprobs() is None


@pytest.mark.parametrize("member", [1, 2])
def test_a_rollout_without_a_token_is_a_row_that_nothing_is_learned_from(member: int) -> None:
    row = pack_rollouts(ROLLOUTS)[1].row(member)
    assert (row.token_ids.tolist(), row.token_mask().tolist(), row.logprobs().tolist()) == ([0], [0.0], [0.0])
    assert row.advantages(0.5, (None,) * 4).tolist() == [0.5]


def test_a_header_has_every_size_that_the_driver_needs() -> None:
    (first, failed, empty, last), _ = pack_rollouts(ROLLOUTS)
    assert (first.num_tokens, first.num_prompt_tokens, first.num_generated_tokens, first.num_turns) == (9, 2, 4, 3)
    assert (first.first_answer_tokens, first.last_answer_tokens, first.longest_answer_tokens) == (3, 0, 3)
    assert (first.turns_by_flags, first.generated_by_flags) == ((1, 1, 1, 0), (0, 3, 1, 0))
    assert first.tokens_by_version == ((6, 1), (7, 3))
    assert (first.finish_reason, failed.finish_reason, last.finish_reason) == ("length", None, "stop")
    assert [one.is_valid for one in (first, failed, empty, last)] == [True, False, False, True]


def test_a_header_does_not_grow_with_the_tokens() -> None:
    sizes = []
    for length in (200, 20_000):
        headers, tokens = pack_rollouts(
            [rollout(turn((1,) * length, (2,) * length, (3, 0, length)), text="t" * length)]
        )
        assert tokens.token_ids.dtype == np.int32
        assert tokens.logprobs.dtype == np.float32
        sizes.append(len(pickle.dumps(headers)))
    assert sizes[1] < sizes[0] + 50


def test_a_group_without_rollouts_and_one_without_tokens_have_arrays() -> None:
    assert as_lists(pack_rollouts([])[1])["token_ids_offsets"] == ("int64", [0])
    assert as_lists(pack_rollouts([rollout()])[1])["turns"] == ("int32", [])


def test_an_id_that_does_not_fit_is_an_error_and_not_another_token() -> None:
    with pytest.raises(OverflowError):
        pack_rollouts([rollout(turn((1,), (2**31,)))])


def test_a_header_has_only_the_beginning_of_a_reason_that_quotes_an_answer() -> None:
    long = replace(ROLLOUTS[0], reason="wrong: " + "7" * 10**6)
    (header,), _ = pack_rollouts([long])
    assert header.reason.startswith("wrong: 777") and header.reason.endswith("7 (998007 characters more)")
    assert len(header.reason) < MOST_CHARACTERS + 50
    assert pack_rollouts(ROLLOUTS[:1])[0][0].reason == "r"


def test_a_reason_has_no_character_that_cannot_be_written() -> None:
    """The reasons of failed prompts are in the checkpoint, where half a surrogate pair would end every save."""
    failed = Rollout(turns=(), status=RolloutStatus.ENV_FAILED, reason="answer \ud800", reward=None)
    [header], _ = pack_rollouts([failed])
    assert header.reason == r"answer \ud800"
    assert orjson.loads(orjson.dumps(header.reason)) == header.reason
