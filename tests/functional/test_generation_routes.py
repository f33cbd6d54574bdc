"""An engine says to which experts each token went: all tokens of a prompt and an answer, each once in a rollout.

The reference is transformers on the same weights and tokens, float32. What an engine chose under the weights of before
a push is compared with those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_engine
from route_reference import check_routes
from safetensors.torch import load_file

from recipes import routes
from recipes.cluster.private import private_ray
from recipes.generation.clients.router import EngineSession
from recipes.generation.generation import Generation
from recipes.generation.serving.requests import AtPush
from recipes.types import Completion, Sampling

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=24)
SHARED = tuple(10 + (7 * place) % 100 for place in range(3 * tiny_engine.BLOCK + 5))
PROMPTS = [(*SHARED, 20 + row, 30 + row) for row in range(4)]
NEW_IDS = (40, 41, 42)  # of the second turn
TWO_RANKS = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with private_ray(2):
        yield


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        pytest.param(tiny_engine.build_latent, {}, id="prefix-cache"),
        pytest.param(tiny_engine.build_latent, {"max_num_batched_tokens": 64}, id="chunked-prefill"),
        pytest.param(tiny_engine.build_mixture, {}, id="experts-with-a-gate"),
        pytest.param(tiny_engine.build_latent, TWO_RANKS, id="two-ranks", marks=pytest.mark.slow),
    ],
)
def test_an_engine_reports_the_experts_of_every_token(
    build: Callable[..., Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    models = [build(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    files = [load_file(tmp_path / str(seed) / "model.safetensors") for seed in (0, 1)]
    generation = Generation.start(
        tiny_engine.generation_config(enable_return_routed_experts=True, **changes),
        model_path=str(tmp_path / "0"),
        seed=1,
        placement=[{"num_cpus": 0}],
        deadlines=tiny_engine.deadlines(),
        loads_weights=True,
    )

    async def ask(prompts: Sequence[tuple[int, ...]], sessions: Sequence[EngineSession]) -> list[Completion]:
        pairs = zip(prompts, sessions, strict=True)
        calls = (generation.generate(one, SAMPLING, affinity=0, session=session) for one, session in pairs)
        return list(await asyncio.gather(*calls))

    async def rollouts(model: Any) -> None:
        """Take two turns of each rollout: the second says only what the first could not."""
        sessions = [EngineSession() for _ in PROMPTS]
        prompts, starts = PROMPTS, [0] * len(PROMPTS)
        for _ in range(2):
            answers = await ask(prompts, sessions)
            wholes = [(*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
            for whole, answer, start in zip(wholes, answers, starts, strict=True):
                check_routes(model, whole, answer.routes, start=start, end=len(whole) - 1)
            prompts, starts = [(*whole, *NEW_IDS) for whole in wholes], [len(whole) - 1 for whole in wholes]

    try:
        asyncio.run(rollouts(models[0]))
        asyncio.run(rollouts(models[0]))  # the prompts come from the prefix cache
        assert generation.stats()[0]["cached_prompt_tokens"] > 0
        holders: list[Any] = [SimpleNamespace(named_parameters=file.items) for file in files]
        weights = tiny_engine.WeightFile(tmp_path / "weights", holders[0])
        generation.connect_weights(weights.layout)
        weights.write(holders[1])
        generation.update_weights(1)
        asyncio.run(rollouts(models[1]))
    finally:
        generation.shutdown()


@pytest.mark.parametrize("at_push", [AtPush.KEEP, AtPush.RECOMPUTE])
def test_each_token_of_a_running_answer_has_the_route_of_its_own_version(at_push: AtPush, tmp_path: Path) -> None:
    """With caches computed again, all that follows the push is as the new weights alone would have it."""
    models = [tiny_engine.build_latent(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    holders: list[Any] = [
        SimpleNamespace(named_parameters=load_file(tmp_path / str(seed) / "model.safetensors").items) for seed in (0, 1)
    ]
    generation = Generation.start(
        tiny_engine.generation_config(enable_return_routed_experts=True),
        model_path=str(tmp_path / "0"),
        seed=1,
        placement=[{"num_cpus": 0}],
        deadlines=tiny_engine.deadlines(),
        loads_weights=True,
    )
    weights = tiny_engine.WeightFile(tmp_path / "weights", holders[0])
    long = Sampling(temperature=1.0, top_p=1.0, max_tokens=380)
    version = 0

    async def interrupted() -> Completion:
        """Push the other weights while an answer is sampled; an answer that ends before is asked for again."""
        nonlocal version
        for attempt in range(5):
            call = asyncio.create_task(generation.generate(PROMPTS[0], long, affinity=0, sample=(attempt,)))
            await asyncio.sleep(0.2)
            version += 1
            weights.write(holders[version % 2])
            await asyncio.to_thread(generation.update_weights, version)
            answer = await call
            if len(answer.versions) == 2:
                return answer
        raise AssertionError("no answer was sampled for as long as a push takes")

    try:
        generation.connect_weights(weights.layout)
        generation.at_push = at_push
        answer = asyncio.run(interrupted())
    finally:
        generation.shutdown()
    whole = (*PROMPTS[0], *answer.token_ids)
    first = len(PROMPTS[0]) + answer.versions[0].end - 1  # place of the first token that the new weights computed
    old, new = models[(version - 1) % 2], models[version % 2]
    check_routes(old, whole, routes.cut(answer.routes, first), start=0, end=first)
    assert [(span.start, span.end) for span in routes.spans(answer.routes)] == [(0, len(whole) - 1)]
    if at_push is AtPush.RECOMPUTE:
        check_routes(new, whole, answer.routes, start=0, end=len(whole) - 1, compared_from=first)
