"""Policy and engine on one GPU: both compute the log-probabilities of the tokens that the engine sampled."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from recipes.types import Rollout, RolloutStatus, Turn
from tests.gpu import gpu_case
from tests.gpu.conftest import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPTS = [[(7 * row + 3 * place) % 5000 + 10 for place in range(40)] for row in range(16)]


def test_engine_and_policy_agree(tmp_path: Path, record: Record) -> None:
    from vllm import LLM, SamplingParams

    from recipes.policy import step

    model = gpu_case.save_model(tmp_path, gpu_case.SMALL)
    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.3,
        max_model_len=512,
        logprobs_mode="processed_logprobs",
        seed=1,
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)
    theirs = torch.tensor(
        [
            [entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs, strict=True)]
            for out in (answer.outputs[0] for answer in answers)
        ]
    )
    rollouts = [
        Rollout(
            turns=(
                Turn(
                    prompt_token_ids=tuple(prompt),
                    token_ids=tuple(answer.outputs[0].token_ids),
                    logprobs=(0.0,) * 64,
                    versions=(),
                    finish_reason="length",
                ),
            ),
            status=RolloutStatus.COMPLETED,
            reason="",
            reward=0.0,
        )
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    shard = gpu_case.shard_of(rollouts, rows_per_microbatch=len(rollouts))
    trainer = gpu_case.build_trainer(
        gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=4096, recompute=False)
    )
    ours = torch.stack(step.logprobs(trainer, shard))[:, 40:]
    gap = (ours - theirs).abs()
    record("log-probability gap engine - policy, bf16", f"mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean() < 0.05
