"""Engines of two ranks that share the experts: each has whole experts, and a push brings each rank its own.

The reference is transformers on the same weights, float32. In test_refit.py it is a real policy of two ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_engine
import torch
from safetensors.torch import load_file

from recipes.cluster.private import private_ray
from recipes.generation.generation import Generation
from recipes.types import Completion, Sampling

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=24)
PROMPTS = [tuple(10 + (7 * row + 3 * place) % 100 for place in range(3 * tiny_engine.BLOCK + 5)) for row in range(4)]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with private_ray(2):
        yield


def sample(generation: Generation) -> list[Completion]:
    async def all_prompts() -> list[Completion]:
        return list(await asyncio.gather(*(generation.generate(p, SAMPLING, affinity=0) for p in PROMPTS)))

    return asyncio.run(all_prompts())


def gap(completions: list[Completion], model: Any) -> float:
    """Return the largest difference to the reference."""
    pairs = zip(PROMPTS, completions, strict=True)
    return max(
        float((torch.tensor(one.logprobs) - tiny_engine.logprobs(model, prompt, one.token_ids)).abs().max())
        for prompt, one in pairs
    )


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(tiny_engine.build_latent, id="latent experts"),
        pytest.param(tiny_engine.build_mixture, id="experts with a gate", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_the_experts_get_their_own_by_a_push(build: Callable[..., Any], tmp_path: Path) -> None:
    models = [build(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    files = [load_file(tmp_path / str(seed) / "model.safetensors") for seed in (0, 1)]
    holders: list[Any] = [SimpleNamespace(named_parameters=file.items) for file in files]
    generation = Generation.start(
        tiny_engine.generation_config(tensor_parallel_size=2, expert_parallel_size=2),
        model_path=str(tmp_path / "0"),
        seed=1,
        placement=[{"num_cpus": 0}],
        deadlines=tiny_engine.deadlines(),
        loads_weights=True,
    )
    try:
        assert gap(sample(generation), models[0]) < TOLERANCE, "as its files have them"
        weights = tiny_engine.WeightFile(tmp_path / "weights", holders[0])
        generation.connect_weights(weights.layout)
        for version in (1, 0, 1):  # the second push and those after it repeat what the first has recorded
            weights.write(holders[version])
            generation.update_weights(version)
            for _ in range(2):  # the second time the prompts come from the prefix cache
                completions = sample(generation)
                assert gap(completions, models[version]) < TOLERANCE
                assert gap(completions, models[1 - version]) > 100 * TOLERANCE
        assert generation.stats()[0]["cached_prompt_tokens"] > 0, "the prefix cache was never used"
    finally:
        generation.shutdown()
