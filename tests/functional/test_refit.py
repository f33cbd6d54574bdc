"""Policy and engine hold the same model: at the start, after every push, and after the hand-over by export.

A real Megatron policy, of one rank or two, and a real vLLM engine, prefix cache on. The difference is the largest
absolute one between the log-probabilities the engine sampled with and the policy's, float32, at a temperature other
than 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from head_reference import add_heads
from policy_case import local_ray, token_ids
from random_batch import batch_of
from speed import patiently
from transformers import AutoModelForCausalLM

from recipes.cluster.token_store import RayTokenStore
from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.errors import EngineError
from recipes.generation.generation import Generation
from recipes.grpo.loss import grpo_loss
from recipes.grpo.refit import connect, refit
from recipes.policy.policy import Policy
from recipes.types import Completion, Rollout, RolloutStatus, Sampling, TrainBatch, Turn
from tools.tiny.model import build_hybrid_model, build_model, build_model_with_experts, build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-4
TWO_RANKS = {"cluster.gpus_per_node": 3}  # two train, one generates
TENSORS = TWO_RANKS | {  # each rank has a part of every matrix
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.megatron_cfg.sequence_parallel": "true",
}
EXPERTS = TWO_RANKS | {"policy.megatron_cfg.expert_model_parallel_size": 2}  # each rank has half of the experts
SHARED = {  # the two ranks of the engine have half of the experts each, and parts of every other matrix
    "cluster.gpus_per_node": 4,
    "policy.generation.colocated.resources.gpus_per_node": 2,
    "policy.generation.vllm_cfg.tensor_parallel_size": 2,
    "policy.generation.vllm_cfg.expert_parallel_size": 2,
}
# Every run at scale tiny compares a dense model's log-probabilities at its start, and test_smoke.py while it trains.
CASES = [
    pytest.param((build_model, {}), id="dense", marks=pytest.mark.slow),
    pytest.param((partial(build_model, family="qwen2"), {}), id="biased"),
    pytest.param((partial(build_model, family="llama"), {}), id="llama", marks=pytest.mark.slow),
    pytest.param((build_hybrid_model, {}), id="hybrid"),
    pytest.param((build_hybrid_model, TENSORS), id="hybrid, two tensor-parallel ranks", marks=pytest.mark.slow),
    pytest.param((build_hybrid_model, EXPERTS), id="hybrid, two expert-parallel ranks", marks=pytest.mark.slow),
    pytest.param((build_hybrid_model, EXPERTS | SHARED), id="hybrid, to an engine of two", marks=pytest.mark.slow),
    pytest.param((build_model_with_experts, TENSORS | SHARED), id="gated, to an engine of two", marks=pytest.mark.slow),
]
TEMPERATURE = 0.7  # not 1, so that forgetting it on one side shows
SAMPLING = Sampling(temperature=TEMPERATURE, top_p=1.0, max_tokens=24)
PROMPTS = [
    tuple(10 + (7 * row + 3 * place) % 200 for place in range(70)) for row in range(6)
]  # two full KV blocks each


@pytest.fixture(scope="module", params=CASES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build, layout = request.param
    model = build(tokenizer, seed=3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    num_heads = 0
    if build is build_hybrid_model:  # its multi-token heads are sent too, and the engine passes over them
        add_heads(path)
        num_heads = 2
    overrides = {
        "policy.model_name": path,
        "policy.megatron_cfg.mtp_num_layers": num_heads,
        "policy.generation.temperature": TEMPERATURE,
        "policy.generation.verify_weight_pushes": "true",
        "policy.generation.vllm_cfg.expose_http_server": "false",
        "policy.megatron_cfg.optimizer.lr": 2.0e-3,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        **layout,
    }
    return require_valid(
        load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"{k}={v}" for k, v in overrides.items()])
    )


@pytest.fixture(scope="module")
def policy(config: Config) -> Iterator[Policy]:
    cfg = config.policy.megatron_cfg
    num_ranks = cfg.tensor_model_parallel_size * cfg.expert_model_parallel_size
    with local_ray(num_cpus=num_ranks + 2):
        policy = Policy.start(
            config.policy,
            loss=partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None),
            placement=[{"num_cpus": 1}] * num_ranks,
            deadlines=config.deadlines,
            seed=1,
        )
        yield policy
        policy.shutdown()


def start_engine(config: Config, model_path: Path | str, *, loads_weights: bool) -> Generation:
    return Generation.start(
        config.policy.generation,
        model_path=str(model_path),
        seed=1,
        placement=[{"num_cpus": 1}],
        deadlines=config.deadlines,
        loads_weights=loads_weights,
    )


def sample(generation: Generation) -> list[Completion]:
    async def all_prompts() -> list[Completion]:
        return list(
            await asyncio.gather(*(generation.generate(p, SAMPLING, affinity=i) for i, p in enumerate(PROMPTS)))
        )

    return asyncio.run(all_prompts())


def as_batch(completions: list[Completion]) -> TrainBatch:
    rollouts = [
        Rollout(
            turns=(
                Turn(
                    prompt_token_ids=prompt,
                    token_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    versions=completion.versions,
                    finish_reason=completion.finish_reason,
                ),
            ),
            status=RolloutStatus.COMPLETED,
            reason="",
            reward=0.0,
        )
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    batch = batch_of(rollouts, RayTokenStore())
    advantages_B = torch.linspace(-1.0, 1.0, len(PROMPTS))
    return replace(batch, sample_mask_B=torch.ones(len(PROMPTS)), advantages_B=advantages_B)


def difference(policy: Policy, completions: list[Completion]) -> tuple[float, TrainBatch]:
    batch = as_batch(completions)
    gaps = [
        own[-len(completion.logprobs) :] - torch.tensor(completion.logprobs)
        for own, completion in zip(policy.logprobs(batch), completions, strict=True)
    ]
    return max(float(gap.abs().max()) for gap in gaps), batch


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return whether a condition holds within the time that an engine needs to start."""
    deadline = time.monotonic() + patiently(180)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_engine_and_policy_agree_before_and_after_pushes_and_after_export(
    policy: Policy, config: Config, tmp_path: Path
) -> None:
    generation = start_engine(config, config.policy.model_name, loads_weights=False)
    try:
        connect(policy, generation)
        with pytest.raises(EngineError, match="has no weights before the first push"):
            sample(generation)
        refit(policy, generation, version=0)
        for version in range(1, 4):
            sample(generation)  # fills the prefix cache under the weights that are about to be replaced
            gap, batch = difference(policy, sample(generation))
            assert gap < LIMIT, f"version {version - 1}"
            policy.train(batch)
            stale, _ = difference(policy, sample(generation))
            assert stale > 100 * LIMIT, "the step must change the model visibly, or the next comparison proves nothing"
            refit(policy, generation, version=version)
        completions = sample(generation)
        assert {span.version for completion in completions for span in completion.versions} == {3}
        gap, batch = difference(policy, completions)
        assert gap < LIMIT
        assert generation.stats()[0]["cached_prompt_tokens"] > 0, "the prefix cache was never used"
        sent = policy.sent_checksums()
        assert list(sent) == list(policy.weight_layout().names)
        one = next(iter(sent))
        with pytest.raises(EngineError, match=f"is left: generation .*1 of {len(sent)} tensors, .* {one}$"):
            generation.verify_weights({**sent, one: sent[one] + 1})
    finally:
        generation.shutdown()

    policy.export_hf(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for ids, ours in zip(token_ids(batch, RayTokenStore()), policy.logprobs(batch), strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
        theirs = logprobs.gather(-1, ids[1:, None])[:, 0]
        assert (theirs - ours[1:]).abs().max() < LIMIT, "transformers reads the export otherwise"

    other = start_engine(config, tmp_path / "hf", loads_weights=True)
    try:
        gap, _ = difference(policy, sample(other))
        assert gap < LIMIT, "vLLM reads the export otherwise"
        os.kill(other.infos[0].core_pids[0], signal.SIGKILL)
        assert wait_for(lambda: other.num_engines_alive == 0) and wait_for(lambda: other.num_engines_alive == 1)
        gap, _ = difference(policy, sample(other))
        assert gap < LIMIT, "an engine to which nothing is ever pushed reads its weights again when it is back"
    finally:
        other.shutdown()
