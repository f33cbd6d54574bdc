"""A group from row to rewards, compared over HTTP by a server that stands for the generative reward model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.verifier import NoVerdict, Response, Verdict
from recipes.environments.environments import Environments
from recipes.environments.scoring.clients import score_group
from recipes.types import Completion, Rollout, RolloutStatus, Row, VersionSpan
from tests.configuration import block
from tests.quiet_server import QuietHandler, QuietServer

SERVER = "genrm_compare_resources_server"
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Which?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "genrm_simple_agent"},
}


class RewardModel(QuietHandler):
    """Gives each answer its length as score; an answer `hang` is never judged, `refuse` is an error."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012 (of all connections)
    ended = threading.Event()

    def do_POST(self) -> None:  # noqa: N802 (http.server gives the name)
        """Compare one pair."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        RewardModel.seen.append(body)
        texts = {message["role"]: message["content"] for message in body["messages"]}
        pair = texts["response_1"], texts["response_2"]
        if "hang" in pair:
            RewardModel.ended.wait(60)
        scores = {"score_1": len(pair[0]), "score_2": len(pair[1]), "ranking": 3.5}
        message = {"role": "assistant", "content": json.dumps(scores)}
        content = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(400 if "refuse" in pair else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def address() -> Iterator[str]:
    server = QuietServer(("127.0.0.1", 0), RewardModel)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    RewardModel.seen, RewardModel.ended = [], threading.Event()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    RewardModel.ended.set()
    server.shutdown()
    server.server_close()


def environments(codec: ChatCodec, address: str | None, **settings: Any) -> Environments:
    genrm = {"vllm_model": {"model": "tiny", **({"base_url": address} if address else {})}}
    compare = {
        "genrm_model_server": {"type": "responses_api_models", "name": "genrm_model"},
        "genrm_responses_create_params": {"max_output_tokens": 64, "temperature": 0.6},
        "reasoning_bonus": 0.0,
        "answer_bonus": 0.0,
        **settings,
    }
    off = {"enable_thinking": False}
    instances = {
        "genrm_model": {"responses_api_models": genrm},
        SERVER: {"resources_servers": {"genrm_compare": compare}},
        "policy_model_reasoning_off": {
            "_copy": "policy_model",
            "responses_api_models": {"vllm_model": {"chat_template_kwargs": off}},
        },
        **{
            f"genrm_simple_agent{suffix}": {
                "responses_api_agents": {
                    "simple_agent": {
                        "resources_server": {"type": "resources_servers", "name": SERVER},
                        "model_server": {"type": "responses_api_models", "name": f"policy_model{suffix}"},
                    }
                }
            }
            for suffix in ("", "_reasoning_off")
        },
    }
    gym = block("env.nemo_gym", instances=instances, invalid_tool_call_patterns=(), thinking_tags=())
    return Environments.from_config(block("env", nemo_gym=gym), codec)


class Scripted:
    """A policy that answers with a given text, and remembers its prompt."""

    def __init__(self, codec: ChatCodec, text: str) -> None:
        self.codec, self.text, self.prompt = codec, text, ""

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        self.prompt = self.codec.text(prompt_token_ids)
        ids = self.codec._tokenize(f"thought</think>{self.text}" if self.text else "")
        return Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason="stop" if self.text else "abort",
        )


def group(codec: ChatCodec, made: Environments, texts: list[str], row: Row = ROW) -> tuple[Rollout, ...]:
    async def run() -> tuple[Rollout, ...]:
        rollouts = await asyncio.gather(*(made.run(row, Scripted(codec, text), max_tokens=400) for text in texts))
        assert all(rollout.reward is None for rollout in rollouts)
        return await made.finish_group(row, rollouts)

    try:
        return asyncio.run(run())
    finally:
        made.close()


def test_a_group_is_compared_and_rewarded(codec: ChatCodec, address: str) -> None:
    texts = ["x", "yyy", "", "zz"]
    rollouts = group(codec, environments(codec, address), texts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 3.0, None, 2.0]
    assert [rollout.status for rollout in rollouts] == [
        RolloutStatus.COMPLETED,
        RolloutStatus.COMPLETED,
        RolloutStatus.ABORTED,
        RolloutStatus.COMPLETED,
    ]
    assert "the engine ended the request" in rollouts[2].reason
    assert all(rollout.response is None and rollout.env_seconds > 0 for rollout in (rollouts[0], rollouts[3]))
    assert len(RewardModel.seen) == 3
    assert [message["role"] for message in RewardModel.seen[0]["messages"]] == [
        "user",
        "principle",
        "response_1",
        "response_2",
    ]
    assert (RewardModel.seen[0]["model"], RewardModel.seen[0]["max_tokens"]) == ("tiny", 64)


def test_what_is_not_compared_in_time_is_no_number(codec: ChatCodec, address: str) -> None:
    rollouts = group(codec, environments(codec, address, timeout_seconds=3.0), ["x", "yyy", "hang", "zz"])
    assert [rollout.reward for rollout in rollouts] == [1.0, 3.0, None, 2.0]
    assert rollouts[2].status is RolloutStatus.JUDGE_FAILED
    assert (
        rollouts[2].reason == "each of its 2 comparisons failed: genrm_model: no reply in the time that its group has"
    )
    assert rollouts[1].metrics["num_failed_comparisons"] == 1.0


def test_a_refused_comparison_is_no_number(codec: ChatCodec, address: str) -> None:
    rollouts = group(codec, environments(codec, address), ["refuse", "yyy", "zz"])
    assert [rollout.reward for rollout in rollouts] == [None, 3.0, 2.0]
    assert "400" in rollouts[0].reason


def test_nothing_is_scored_without_a_reward_model(codec: ChatCodec) -> None:
    made = environments(codec, None)
    assert made.compares(ROW)
    assert made.check_row(ROW) == [
        f"agent 'genrm_simple_agent' needs a judge: {SERVER} names none with a base_url",
    ]
    rollouts = group(codec, made, ["x", "y"])
    assert [(rollout.reward, rollout.status) for rollout in rollouts] == [(None, RolloutStatus.ENV_FAILED)] * 2
    assert "none is configured" in rollouts[0].reason


@pytest.mark.parametrize(("suffix", "thinks"), [("", True), ("_reasoning_off", False)])
def test_an_agent_of_a_variant_renders_prompts_with_its_arguments(
    codec: ChatCodec, address: str, suffix: str, thinks: bool
) -> None:
    row = {**ROW, "agent_ref": {"name": f"genrm_simple_agent{suffix}"}}
    made, policy = environments(codec, address), Scripted(codec, "x")
    asyncio.run(made.run(row, policy, max_tokens=400))
    made.close()
    assert policy.prompt.rstrip().endswith("<think>") is thinks


def test_a_row_decides_over_the_variant_of_its_agent(codec: ChatCodec, address: str) -> None:
    params = {**ROW["responses_create_params"], "metadata": {"chat_template_kwargs": '{"enable_thinking": true}'}}
    row = {"responses_create_params": params, "agent_ref": {"name": "genrm_simple_agent_reasoning_off"}}
    made, policy = environments(codec, address), Scripted(codec, "x")
    asyncio.run(made.run(row, policy, max_tokens=400))
    made.close()
    assert policy.prompt.rstrip().endswith("<think>")


def test_a_verdict_on_a_group_keeps_what_was_known_of_a_rollout() -> None:
    """An agent by URL that has lost tokens is flagged before its answer is compared, and must stay out of the loss."""

    class Scorer:
        name = "genrm"

        async def score(self, row: Row, responses: Sequence[Response]) -> list[Verdict | NoVerdict]:
            return [Verdict(reward=1.0, reason="best", metrics={"tie_rate": 0.5}) for _ in responses]

    waiting = Rollout(
        turns=(),
        status=RolloutStatus.COMPLETED,
        reason="its group is not scored yet",
        reward=None,
        is_flagged=True,
        metrics={"lost_share": 0.4},
        response={},
    )
    flagged, clean = asyncio.run(score_group(Scorer(), ROW, [waiting, replace(waiting, is_flagged=False)]))
    assert (flagged.is_flagged, clean.is_flagged) == (True, False)
    assert flagged.reward == 1.0
    assert flagged.metrics == {"lost_share": 0.4, "tie_rate": 0.5}
