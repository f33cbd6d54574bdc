"""The gate before the first step: engine and policy agree, or the run does not start."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jinja2 import TemplateError

from recipes.errors import RequestError, RunError
from recipes.grpo.parity import Probe, check_parity, mult_prob_errors, pick_probes, probe_batch
from recipes.grpo.run import Run
from recipes.types import Completion, PromptRef, TrainBatch
from tests.groups import LocalStore
from tests.unit.grpo.loop_case import LOGPROB, make_run


def probe(agent: str, length: int, row: int = 0) -> Probe:
    return Probe(prompt=PromptRef(epoch=0, row_index=row, prompt_id="ab"), agent=agent, token_ids=tuple(range(length)))


def test_each_environment_is_tried_at_several_lengths() -> None:
    candidates = [probe("math", length) for length in (9, 2, 5, 7, 3)] + [probe("code", 4), probe("art", 8)]
    picked = [(one.agent, len(one.token_ids)) for one in pick_probes([*candidates, probe("art", 1)])]
    assert picked == [("art", 1), ("art", 8), ("code", 4), ("math", 2), ("math", 5), ("math", 9)]


def test_errors_are_means_over_sampled_tokens() -> None:
    answer = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), versions=(), finish_reason="stop")
    logprobs = [  # far off wherever nothing was sampled
        torch.tensor([50.0, 50.0, -1.0, -2.0]),
        torch.tensor([50.0, -1.0 - math.log(2.0), -2.0 + math.log(4.0)]),
        torch.tensor([50.0, 50.0, -1.0, math.nan]),
    ]
    equal, apart, no_number = mult_prob_errors([answer] * 3, logprobs)
    assert (equal, apart) == pytest.approx((1.0, 3.0))
    assert math.isnan(no_number)


def test_rows_fill_every_rank() -> None:
    answer = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), versions=(), finish_reason="stop")
    batch = probe_batch([(probe("a", 2), answer), (probe("a", 1), answer)], num_rows=4, store=LocalStore())
    assert batch.lengths_B.tolist() == [4, 3, 4, 3]
    assert [batch.tokens[0].row(member).token_ids.tolist() for member in range(2)] == [[0, 1, 7, 8], [0, 7, 8]]


def drifted(run: Run, by: float, *, longer_than: int = 0) -> None:
    def logprobs(batch: TrainBatch) -> list[torch.Tensor]:
        lengths = batch.lengths_B.tolist()
        return [torch.full((length,), LOGPROB + (by if length > longer_than else 0.0)) for length in lengths]

    run.policy.logprobs = logprobs  # type: ignore[method-assign]
    run.generation.update_weights(0)


@pytest.mark.parametrize(
    ("by", "is_refused"), [(0.0, False), (math.log(1.4), False), (math.log(1.6), True), (math.nan, True)]
)
def test_a_run_whose_sides_disagree_does_not_start(tmp_path: Path, by: float, is_refused: bool) -> None:
    run = make_run(tmp_path, ["math:a", "math:bbbb", "code:c", "code:d"])
    drifted(run, by)
    if is_refused:
        with pytest.raises(
            RunError, match=r"above 1\.5 \(grpo\.parity_error_threshold\) for 0:2:.* of code \(8 prompt"
        ):
            check_parity(run)
    else:
        check_parity(run)
    run.close()


def test_the_prompts_that_differ_are_named_and_no_others(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["math:a", "math:bbbb", "code:c"])
    drifted(run, 1.0, longer_than=12)
    with pytest.raises(RunError) as caught:
        check_parity(run)
    assert "0:1:" in str(caught.value)
    assert "0:0:" not in str(caught.value)
    assert "code" not in str(caught.value)
    assert run.collector.state().position == 0, "a prompt was drawn"
    run.close()


def test_a_row_that_the_template_refuses_does_not_keep_the_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Codec:
        def encode(self, params: dict[str, str]) -> tuple[int, ...]:
            if params["input"] == "math:bad":
                raise TemplateError("roles must alternate")
            return (1, 2)

    run = make_run(tmp_path, ["math:bad", "math:good"])
    run.environments.codec = Codec()  # type: ignore[misc]
    drifted(run, 1.0)
    with pytest.raises(RunError, match="for 0:1:"):  # the other row is compared
        check_parity(run)
    assert "1 prompts ahead cannot be rendered, the first: 0:0:" in caplog.text
    assert "TemplateError: roles must alternate" in caplog.text
    run.close()


def test_a_request_that_fails_does_not_keep_the_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, ["math:a", "code:b"])
    generate = run.generation.generate

    async def refuse_code(ids: tuple[int, ...], *arguments: Any, **options: Any) -> Completion:
        if len(ids) == 2 + len("code:b") and not caplog.messages:
            raise RequestError("late")
        return await generate(ids, *arguments, **options)

    run.generation.generate = refuse_code  # type: ignore[method-assign]
    drifted(run, 1.0)
    with pytest.raises(RunError, match=r"0:[01]:") as caught:  # the other prompt is compared
        check_parity(run)
    assert str(caught.value).count("prompt tokens") == 1
    assert sum("late" in message for message in caplog.messages) == 1
    run.close()


def test_the_gate_can_be_switched_off(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["math:a", "math:b"], "grpo.parity_error_threshold=null")
    drifted(run, 9.0)
    check_parity(run)
    run.close()


@pytest.mark.parametrize("metadata", [{"problem_statement": "Repair it."}, {"problem_statement": ""}, {}, None])
def test_rows_whose_agent_writes_the_prompt_are_compared_with_their_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, str] | None
) -> None:
    """As in stage 2.2, all of whose rows are such."""
    run = make_run(tmp_path, ["code:a", "code:b"])
    ahead = run.collector.prompts_ahead(1)
    given: list[str] = []

    def encode(params: dict[str, Any]) -> tuple[int, ...]:
        given.append(params["input"][0]["content"])
        return (1,) * 10_000  # longer than a prompt can be

    params = {"input": [], **({} if metadata is None else {"metadata": metadata})}
    rows = [(prompt, {**row, "responses_create_params": params}) for prompt, row in ahead]
    monkeypatch.setattr(type(run.collector), "prompts_ahead", lambda _self, _count: rows)
    monkeypatch.setattr(run.environments, "codec", SimpleNamespace(encode=encode))
    drifted(run, 1.0)
    with pytest.raises(RunError, match="disagree"):
        check_parity(run)
    assert len(given) == 1
    assert given[0], "no template renders an empty turn the same way"
    run.close()
