"""The judge client against a real HTTP server: replies, failures of each kind, deadlines, concurrency, the cache."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from recipes.environments.contract.verifier import JudgeQuestion, NoVerdict, Verdict, message_item, response_object
from recipes.environments.scoring.clients import InProcessVerifier
from recipes.environments.scoring.judge import JudgeClient, JudgeFailedError
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.verifiers import math_with_judge, multichallenge
from recipes.types import RolloutStatus
from tests.quiet_server import QuietHandler, QuietServer

pytestmark = pytest.mark.functional


class Judge(QuietHandler):
    """Does what the question says: `say TEXT`, `fail N TEXT` (after N errors), `busy`, `refuse`, `junk`, `hang S`.

    It calls equal what it is asked to `approve`.
    """

    failures: dict[str, int] = {}  # noqa: RUF012 (of all connections)
    seen: list[dict[str, Any]] = []  # noqa: RUF012
    running = most = 0
    lock = threading.Lock()

    def do_POST(self) -> None:  # noqa: N802 (http.server gives the name)
        """Answer one question."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = body["messages"][-1]["content"]
        with Judge.lock:
            Judge.seen.append({**body, "authorization": self.headers.get("authorization"), "path": self.path})
        self._answer(content)

    def _answer(self, content: str) -> None:
        word, _, rest = content.partition(" ")
        if word == "fail":
            times, _, rest = rest.partition(" ")
            Judge.failures[content] = Judge.failures.get(content, 0) + 1
            if Judge.failures[content] <= int(times):
                return self._send(500, b"overloaded")
        elif word == "busy":
            Judge.failures[content] = Judge.failures.get(content, 0) + 1
            if Judge.failures[content] == 1:
                return self._send(429, b"later", {"Retry-After": "0"})
        elif word == "fits" and len(content) > int(rest.split()[0]):
            return self._send(400, b"This model's maximum context length is 2048 tokens.")
        elif word == "refuse":
            return self._send(400, b"the prompt is too long")
        elif word == "junk":
            return self._send(200, b'{"choices": []}')
        elif word == "hang":
            time.sleep(float(rest))
        elif word == "count":
            with Judge.lock:
                Judge.running += 1
                Judge.most = max(Judge.most, Judge.running)
            time.sleep(float(rest))
            with Judge.lock:
                Judge.running -= 1
        said = math_with_judge.EQUAL if "approve" in content else rest
        message = {"role": "assistant", "content": said, "reasoning_content": "hm"}
        completion = {"choices": [{"message": message, "finish_reason": "stop"}]}
        self._send(200, json.dumps(completion).encode())

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def judge() -> Iterator[JudgeClient]:
    server = QuietServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    Judge.failures, Judge.seen, Judge.most = {}, [], 0
    yield JudgeClient(
        name="judge",
        urls=(f"http://127.0.0.1:{server.server_port}/v1",),
        model="tiny",
        params={"max_output_tokens": 64, "temperature": 0.7},
        timeout_seconds=10.0,
        max_concurrency=4,
        api_key="secret",
    )
    server.shutdown()
    server.server_close()


def questions(*contents: str, **params: Any) -> list[JudgeQuestion]:
    return [JudgeQuestion(messages=(("system", "s"), ("user", content)), params=params) for content in contents]


def ask(judge: JudgeClient, *contents: str, **params: Any) -> list[Any]:
    async def run() -> list[Any]:
        try:
            return await judge.ask(questions(*contents, **params))
        finally:
            await judge.http.close()

    return asyncio.run(run())


def texts(replies: list[Any]) -> list[str]:
    return [reply["output"][-1]["content"][0]["text"] for reply in replies]


def test_replies_come_in_the_order_of_the_questions(judge: JudgeClient) -> None:
    replies = ask(judge, "hang 0.3", "say b", "say c", max_output_tokens=8)
    assert texts(replies[1:]) == ["b", "c"]
    assert replies[1]["output"][0]["type"] == "reasoning"
    request = next(seen for seen in Judge.seen if seen["messages"][-1]["content"] == "say b")
    assert request["path"] == "/v1/chat/completions"
    assert (request["max_tokens"], request["temperature"], request["model"]) == (8, 0.7, "tiny")
    assert request["authorization"] == "Bearer secret"


def test_failures_of_the_server_are_asked_again(judge: JudgeClient) -> None:
    assert texts(ask(judge, "fail 2 fine", "busy ok")) == ["fine", "ok"]
    assert Judge.failures == {"fail 2 fine": 3, "busy ok": 2}


@pytest.mark.parametrize(
    ("content", "cause"), [("refuse x", "answered 400: the prompt is too long"), ("junk", "no choices")]
)
def test_a_final_answer_is_not_asked_again(judge: JudgeClient, content: str, cause: str) -> None:
    with pytest.raises(JudgeFailedError, match=cause):
        ask(judge, content)
    assert len(Judge.seen) == 1


def test_a_question_too_long_for_the_judge_loses_its_middle_and_says_so(judge: JudgeClient) -> None:
    """Else an answer that is long enough would never be judged."""
    (reply,) = ask(judge, "fits 9000 " + "x" * 20_000 + " the end")
    assert reply["is_shortened"] and len(Judge.seen) == 3
    asked = Judge.seen[-1]["messages"][-1]["content"]
    assert asked.startswith("fits 9000 xxx") and asked.endswith("xxx the end") and "characters left out" in asked
    assert "is_shortened" not in Judge.seen[-1]
    with pytest.raises(JudgeFailedError, match="maximum context length"):
        ask(judge, "fits 10 " + "x" * 1000)  # nothing of it is long


def test_half_a_surrogate_pair_does_not_keep_an_answer_from_its_judge(judge: JudgeClient) -> None:
    assert texts(ask(judge, "say a\ud800b")) == ["a?b"]


def test_a_question_ends_at_its_deadline(judge: JudgeClient) -> None:
    judge.timeout_seconds = 0.5
    start = time.monotonic()
    with pytest.raises(JudgeFailedError, match=r"judge: no reply within 0\.5 s"):
        ask(judge, "hang 5", "say a")
    assert time.monotonic() - start < 5.0  # the judge's own time


def test_a_server_that_is_gone_is_named(judge: JudgeClient) -> None:
    judge.timeout_seconds, judge.urls = 1.0, ("http://127.0.0.1:9/v1",)
    with pytest.raises(JudgeFailedError, match=r"no reply within 1 s; http://127\.0\.0\.1:9/v1/chat/completions"):
        ask(judge, "say a")


def test_no_more_than_so_many_are_asked_at_once(judge: JudgeClient) -> None:
    judge.timeout_seconds = 2.0  # of one question: twelve in three turns of 0.5 s wait longer than that together
    assert len(ask(judge, *(f"count 0.5{n}" for n in range(20)))) == 20
    assert Judge.most == judge.max_concurrency


def test_only_answers_without_chance_are_remembered(judge: JudgeClient) -> None:
    async def run() -> None:
        for temperature in (0.0, 0.7):
            for _ in range(2):
                await judge.ask(questions(f"say {temperature}", temperature=temperature))
        await judge.http.close()

    asyncio.run(run())
    asked = [seen["messages"][-1]["content"] for seen in Judge.seen]
    assert asked == ["say 0.0", "say 0.7", "say 0.7"]


@pytest.mark.parametrize(
    ("template", "metrics"),
    [
        ("say {question} [[YES]]", None),
        ("fits 6000 {question} [[YES]]" + " so" * 3000, 2.0),
    ],
)
def test_a_verifier_gets_its_verdict_from_the_judge(judge: JudgeClient, template: str, metrics: float | None) -> None:
    rubric = [{"question": "q1", "pass_criteria": "YES"}, {"question": "q2", "pass_criteria": "YES"}]
    row = {"responses_create_params": {"input": "p"}, "rubric": rubric, "context": "c"}
    pool = ScoringPool()

    async def run() -> Verdict:
        client = InProcessVerifier(
            name="multichallenge",
            verifier=multichallenge.VERIFIER,
            settings=multichallenge.Settings(judge_prompt_template=template),
            pool=pool,
            timeout_seconds=10.0,
            judge=judge,
        )
        verdict = await client.verify(row, response_object([message_item("an answer")]))
        await judge.http.close()
        assert isinstance(verdict, Verdict), verdict
        return verdict

    verdict = asyncio.run(run())
    assert verdict.reward == 1.0 and verdict.metrics.get("judge_questions_shortened") == metrics
    pool.close()


def test_a_scoring_process_asks_the_judge_and_goes_on_from_its_replies(judge: JudgeClient) -> None:
    """math-verify runs on model text, so it runs in a jail, which reaches no judge by itself."""
    pool = ScoringPool(num_workers=1)
    row = {"question": "approve this", "expected_answer": "5"}

    async def verify(text: str, **settings: Any) -> Verdict | NoVerdict:
        client = InProcessVerifier(
            name="math_with_judge",
            verifier=math_with_judge.VERIFIER,
            settings=math_with_judge.Settings(**settings),
            pool=pool,
            timeout_seconds=60.0,
            judge=judge,
        )
        try:
            return await client.verify(row, response_object([message_item(text)]))
        finally:
            await judge.http.close()

    right = asyncio.run(verify("\\boxed{5}", should_use_judge=True))
    assert isinstance(right, Verdict)
    assert (right.reward, Judge.seen) == (1.0, [])
    other = asyncio.run(verify("\\boxed{6}", should_use_judge=True))
    assert isinstance(other, Verdict)
    assert len(Judge.seen) == 2, "asked in both orders"
    assert other.reward == 1.0
    judge.urls, judge.timeout_seconds = ("http://127.0.0.1:9/v1",), 1.0
    failed = asyncio.run(verify("\\boxed{7}", should_use_judge=True))
    assert isinstance(failed, NoVerdict)
    assert failed.status is RolloutStatus.JUDGE_FAILED
    pool.close()
