"""A server of a type that this project does not know plugs in by its address; what it answers wrongly is no reward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mailroom import TOOL, Mailroom, mailroom, settings

from recipes.config.load import load_config, refusals, require_valid
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.scoring.clients import MAX_METRICS, MAX_REASON
from recipes.types import Rollout, RolloutStatus
from tests.scripted import Scripted, written_call
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOOLS = [{"type": "function", "name": TOOL, "parameters": {"type": "object", "properties": {"email_id": {}}}}]
ROW = {
    "responses_create_params": {"input": "Delete 7", "tools": TOOLS},
    "agent_ref": {"name": "mail_agent"},
    "wanted": "7",
}
DONE = "so</think>Done<|im_end|>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return ChatCodec(directory)


@pytest.fixture(scope="module")
def server() -> Iterator[Mailroom]:
    with mailroom() as made:
        yield made


@pytest.fixture(scope="module")
def environments(codec: ChatCodec, server: Mailroom) -> Iterator[Environments]:
    keys = [f"{key}={value}" for key, value in settings(server.url).items()]
    loaded = load_config(CONFIGS / "tiny" / "stage1_rlvr.yaml", keys)
    assert not refusals(loaded)
    made = Environments.from_config(require_valid(loaded).env, codec)
    yield made
    made.close()


def deletes(email_id: str) -> str:
    return f"so</think>{written_call(TOOL, {'email_id': email_id})}<|im_end|>"


async def run(environments: Environments, *says: str, row: dict[str, Any] = ROW) -> Rollout:
    assert environments.check_row(row) == []
    return await environments.run(row, Scripted(environments.codec, says), max_tokens=64)


async def test_its_rows_tools_and_verdicts_are_taken(environments: Environments, server: Mailroom) -> None:
    right = await run(environments, deletes("7"), DONE)
    assert (right.status, right.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert right.metrics["num_deleted"] == 1.0
    assert '"output": "Email deleted."' in environments.codec.text(right.turns[1].prompt_token_ids)
    assert (await run(environments, deletes("8"), DONE)).reward == 0.0
    assert (await run(environments, DONE)).reward == 0.0
    no_tools = {**ROW, "responses_create_params": {"input": "Say hello"}}
    assert (await run(environments, DONE, row=no_tools)).status is RolloutStatus.COMPLETED
    assert server.calls["/seed_session"] == server.calls["/verify"] == 4


def test_its_rows_are_checked_for_their_shape_alone(environments: Environments) -> None:
    assert environments.check_row({**ROW, "wanted": {"any": ["thing"]}}) == []
    (problem,) = environments.check_row({**ROW, "responses_create_params": {"inptu": "x"}})
    assert "unknown key 'inptu'" in problem
    assert environments.check_row({**ROW, "agent_ref": {"name": "male_agent"}})


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"{}", "answered reward nothing, expected a number"),
        (200, b'{"reward": null}', "answered reward nothing, expected a number"),
        (200, b'{"reward": "1.0"}', "answered reward string '1.0', expected a number"),
        (200, b'{"reward": true}', "answered reward boolean True, expected a number"),
        (200, b'{"reward": [1.0]}', "answered reward list [1.0], expected a number"),
        (200, b'{"reward": NaN}', "answered no JSON"),
        (200, b'{"reward": 1e999}', "answered no JSON"),
        (200, b'{"reward": 1e300}', "answered reward number 1e+300, expected a number, at most 1e+06"),
        (200, b"[" * 100_000, "answered no JSON"),
        (200, b"", "answered no JSON"),
        (302, b'{"reward": 1.0}', "answered 302"),
        (404, b'{"reward": 1.0}', "answered 404"),
        (422, b'{"reward": 1.0}', "answered 422"),
    ],
)
async def test_a_broken_answer_is_a_failure_with_its_reason(
    environments: Environments, server: Mailroom, status: int, body: bytes, reason: str
) -> None:
    server.reply = status, body
    try:
        # Without a verdict of its own, the server's echo of a row must not be taken for one.
        rollout = await run(environments, DONE, row={**ROW, "reward": 1.0})
    finally:
        server.reply = None
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
    assert reason in rollout.reason


async def test_a_huge_answer_is_refused_and_much_beside_a_verdict_is_cut(
    environments: Environments, server: Mailroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = b",".join(b'"m%d": 1' % number for number in range(10_000))
    server.reply = 200, b'{"reward": 0.5, "reason": "%s", %s}' % (b"x" * 1_000_000, numbers)
    try:
        rollout = await run(environments, DONE)
        monkeypatch.setattr("recipes.environments.contract.http.MAX_REPLY_BYTES", 1 << 20)
        huge = await run(environments, DONE)
    finally:
        server.reply = None
    assert (rollout.reward, len(rollout.reason), len(rollout.metrics)) == (0.5, MAX_REASON, MAX_METRICS)
    assert (huge.status, huge.reward) == (RolloutStatus.ENV_FAILED, None)
    assert "answered more than 1 MiB" in huge.reason


async def test_an_echo_of_a_row_is_no_verdict(environments: Environments, server: Mailroom) -> None:
    """The row's own `reward` is never sent, so that a server that answers with what it got gives no verdict."""
    sent: list[Any] = []
    answer = server.answer

    def echo(path: str, session: str, body: Any) -> tuple[int, Any]:
        sent.append(body)
        return (200, body) if path == "/verify" else answer(path, session, body)

    server.answer = echo  # type: ignore[method-assign]
    try:
        rollout = await run(environments, DONE, row={**ROW, "reward": 1.0, "_ng_failure_class": "none"})
    finally:
        del server.answer
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
    assert "reward" not in sent[-1]
    assert sent[-1]["wanted"] == "7"
