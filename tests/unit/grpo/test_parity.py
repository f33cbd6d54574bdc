"""The gate before the first step: engine and policy agree, or the run does not start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from recipes.errors import RunError
from recipes.grpo.parity import Probe, check_parity, mult_prob_errors, pick_probes, probe_batch
from recipes.grpo.run import Run
from recipes.types import Completion, PromptRef, TrainBatch
from tests.unit.grpo.loop_case import LOGPROB, make_run


def probe(agent: str, length: int, row: int = 0) -> Probe:
    return Probe(prompt=PromptRef(epoch=0, row_index=row, prompt_id="ab"), agent=agent, token_ids=tuple(range(length)))


def test_each_environment_is_tried_at_several_lengths() -> None:
    candidates = [probe("math", length) for length in (9, 2, 5, 7, 3)] + [probe("code", 4), probe("art", 8)]
    picked = [(one.agent, len(one.token_ids)) for one in pick_probes([*candidates, probe("art", 1)])]
    assert picked == [("art", 1), ("art", 8), ("code", 4), ("math", 2), ("math", 5), ("math", 9)]


def test_errors_are_means_over_sampled_tokens_and_rows_fill_every_rank() -> None:
    answer = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), versions=(), finish_reason="stop")
    batch = probe_batch([(probe("a", 2), answer), (probe("a", 1), answer)], num_rows=4, pad_token_id=0, divisible_by=4)
    assert batch.input_ids_BS.tolist() == [[0, 1, 7, 8], [0, 7, 8, 0]] * 2
    logprobs = torch.full((4, 4), 50.0)  # far off wherever nothing was sampled
    logprobs[0, 2:] = torch.tensor([-1.0, -2.0])
    logprobs[1, 1:3] = torch.tensor([-1.0 - math.log(2.0), -2.0 + math.log(4.0)])
    logprobs[2, 2:] = torch.tensor([-1.0, math.nan])
    assert mult_prob_errors(batch, logprobs)[:2].tolist() == pytest.approx([1.0, 3.0])
    assert mult_prob_errors(batch, logprobs)[2].isnan()


def drifted(run: Run, by: float, *, longer_than: int = 0) -> None:
    def logprobs(batch: TrainBatch) -> torch.Tensor:
        gap_B1 = torch.where(batch.input_lengths_B > longer_than, by, 0.0)[:, None]
        return (LOGPROB + gap_B1).expand_as(batch.token_mask_BS)

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


def test_the_gate_can_be_switched_off(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["math:a", "math:b"], "grpo.parity_error_threshold=null")
    drifted(run, 9.0)
    check_parity(run)
    run.close()
