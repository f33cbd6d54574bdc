"""A real engine in a real Ray actor: log-probabilities, weight pushes, the prefix cache, the HTTP server.

The reference is transformers on the same weights; TOLERANCE is in natural-log units, float32.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import tiny_engine
import torch
from engine_setup import Setup
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from recipes.cluster.private import private_ray
from recipes.generation.generation import Generation
from recipes.generation.serving.requests import AtPush
from recipes.types import Completion, Sampling

pytestmark = pytest.mark.functional

TOLERANCE = 1e-4
NUMBERS = itertools.count()  # no two samples of these tests are the same
BATCH_LIMIT = 4  # sequences an engine runs at once; more wait
PROMPT = tuple(10 + (7 * index) % 100 for index in range(3 * tiny_engine.BLOCK + 5))  # three full KV blocks and a rest


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with private_ray(2):
        yield


def start(path: Path, *, is_tied: bool, eos: int | None, expose_http_server: bool, batch_tokens: int = 2048) -> Setup:
    tiny_engine.build_model(path, seed=0, is_tied=is_tied, eos=eos)
    generation = Generation.start(
        tiny_engine.generation_config(
            max_num_seqs=BATCH_LIMIT,
            max_num_batched_tokens=batch_tokens,
            expose_http_server=expose_http_server,
            enable_vllm_metrics_logger=not expose_http_server,
        ),
        model_path=str(path),
        seed=1,
        placement=[{"num_cpus": 0}],
        deadlines=tiny_engine.deadlines(),
        loads_weights=False,
    )
    for base_url, key in generation.servers():
        body = {"model": "policy", "messages": [{"role": "user", "content": "w5"}]}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=bearer(key), timeout=60)
        assert answer.status_code == 503 and "has no weights: nothing has been pushed to it" in answer.text
    model = tiny_engine.load(path)
    weights = tiny_engine.WeightFile(path / "weights", model)
    weights.write(model)
    generation.connect_weights(weights.layout)
    generation.update_weights(0)
    return Setup(generation, model, weights)


@pytest.fixture(scope="module")
def untied(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """An engine whose model never ends an answer by itself."""
    setup = start(tmp_path_factory.mktemp("untied"), is_tied=False, eos=None, expose_http_server=False)
    yield setup
    setup.generation.shutdown()


@pytest.fixture(scope="module")
def tied(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """An engine with tied embeddings, an end of sequence and the HTTP server; it computes a long prompt in parts."""
    path = tmp_path_factory.mktemp("tied")
    setup = start(path, is_tied=True, eos=tiny_engine.EOS, expose_http_server=True, batch_tokens=2 * tiny_engine.BLOCK)
    yield setup
    setup.generation.shutdown()


def test_a_mixture_of_experts_gets_all_its_weights_by_a_push(local_ray: None, tmp_path: Path) -> None:
    models = [tiny_engine.build_mixture(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    files = [load_file(tmp_path / str(seed) / "model.safetensors") for seed in (0, 1)]
    holders: list[Any] = [SimpleNamespace(named_parameters=file.items) for file in files]
    generation = Generation.start(
        tiny_engine.generation_config(max_num_seqs=BATCH_LIMIT),
        model_path=str(tmp_path / "0"),
        seed=1,
        placement=[{"num_cpus": 0}],
        deadlines=tiny_engine.deadlines(),
        loads_weights=False,
    )
    try:
        weights = tiny_engine.WeightFile(tmp_path / "weights", holders[0])
        generation.connect_weights(weights.layout)
        setup = Setup(generation, models[0], weights)
        for version in (1, 0):  # first what is not in the files of the engine's model
            weights.write(holders[version])
            generation.update_weights(version)
            for completion in asyncio.run(sample(setup, n=4, max_tokens=24)):
                assert gap(completion, models[version]) < TOLERANCE < gap(completion, models[1 - version])
    finally:
        generation.shutdown()


async def sample(
    setup: Setup, *, n: int, max_tokens: int, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0
) -> list[Completion]:
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
    samples = [(next(NUMBERS),) for _ in range(n)]
    calls = [setup.generation.generate(prompt, sampling, affinity=0, sample=sample) for sample in samples]
    return await asyncio.gather(*calls)


def gap(
    completion: Completion, model: PreTrainedModel, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT
) -> float:
    """Return the largest difference to the reference over the tokens of the first weight version."""
    end = completion.versions[0].end
    reference = tiny_engine.logprobs(model, prompt, completion.token_ids[:end], temperature)
    return float((torch.tensor(completion.logprobs[:end]) - reference).abs().max())


def assert_well_formed(completion: Completion) -> None:
    assert len(completion.token_ids) == len(completion.logprobs) > 0
    bounds = [(span.start, span.end) for span in completion.versions]
    assert bounds[0][0] == 0 and bounds[-1][1] == len(completion.token_ids)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_logprobs_match_the_policy_before_and_after_pushes(name: str, request: pytest.FixtureRequest) -> None:
    setup = request.getfixturevalue(name)
    for push in range(4):
        if push:
            setup.push()
        cached = setup.generation.stats()[0]["cached_prompt_tokens"]
        for _ in range(2):  # the second time the prompt comes from the prefix cache
            completions = asyncio.run(sample(setup, n=4, max_tokens=48))
            for completion in completions:
                assert_well_formed(completion)
                assert [span.version for span in completion.versions] == [setup.version]
                assert gap(completion, setup.model) < TOLERANCE
        assert setup.generation.stats()[0]["cached_prompt_tokens"] > cached


def test_logprobs_are_those_of_the_sampling_temperature(untied: Setup) -> None:
    [completion] = asyncio.run(sample(untied, n=1, max_tokens=32, temperature=0.7))
    assert gap(completion, untied.model, 0.7) < TOLERANCE < gap(completion, untied.model, 1.0)


def test_greedy_takes_the_most_likely_token(untied: Setup) -> None:
    [completion] = asyncio.run(sample(untied, n=1, max_tokens=16, temperature=0.0))
    ids = PROMPT
    for token in completion.token_ids:
        assert token == int(untied.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids += (token,)


async def test_samples_of_one_prompt_come_one_by_one(tied: Setup) -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=300)
    work = [tied.generation.generate(PROMPT, sampling, affinity=0, sample=(next(NUMBERS),)) for _ in range(32)]
    tasks = [asyncio.create_task(one) for one in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert 0 < len(done) <= BATCH_LIMIT < len(pending), "only so many run at once, so no more can be done together"
    completions = await asyncio.gather(*tasks)
    assert len({completion.token_ids for completion in completions}) == 32
    prompts_cached = tied.generation.stats()[0]["cached_prompt_tokens"]
    assert prompts_cached >= 31 * 3 * tiny_engine.BLOCK, "the prompt must be computed once"


def test_a_prompt_that_is_computed_in_parts_gives_the_sample_of_its_seed(tied: Setup) -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=16)

    async def one() -> Completion:
        return await tied.generation.generate(PROMPT, sampling, affinity=0, sample=(7, 7))

    tied.push()  # empties the prefix cache: the first request computes the prompt in parts, the second finds it
    first, second = asyncio.run(one()), asyncio.run(one())
    assert first.token_ids == second.token_ids
    assert tied.generation.num_engines_alive == 1


def test_samples_of_one_prompt_differ(untied: Setup) -> None:
    completions = asyncio.run(sample(untied, n=8, max_tokens=32))
    assert len({completion.token_ids for completion in completions}) == 8
    assert all(completion.finish_reason == "length" for completion in completions)


def test_the_token_that_ends_an_answer_is_returned_with_its_logprob(tied: Setup) -> None:
    ended = [c for c in asyncio.run(sample(tied, n=32, max_tokens=128)) if c.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == tiny_engine.EOS and tiny_engine.EOS not in completion.token_ids[:-1]
        assert gap(completion, tied.model) < TOLERANCE


async def interrupted(setup: Setup) -> tuple[Completion, PreTrainedModel]:
    """Push while one request is in flight; return its completion and the old model."""
    for attempt in range(20):
        task = asyncio.create_task(sample(setup, n=1, max_tokens=380))
        await asyncio.sleep(0.05 * (1 + attempt % 4))  # an answer that may end early is to be met early, too
        old = await asyncio.to_thread(setup.push)
        [completion] = await task
        if len(completion.versions) == 2:
            return completion, old
    pytest.fail("no request was in flight at any of 20 pushes")


@torch.no_grad()
def test_a_request_in_flight_keeps_its_cache_and_takes_the_new_weights(untied: Setup) -> None:
    completion, old = asyncio.run(interrupted(untied))
    assert_well_formed(completion)
    assert [span.version for span in completion.versions] == [untied.version - 1, untied.version]
    cut = completion.versions[1].start
    assert gap(completion, old) < TOLERANCE

    ids = torch.tensor([PROMPT + completion.token_ids])
    num_old = len(PROMPT) + cut - 1  # the last old token was sampled, but enters the cache with the new weights
    cache = DynamicCache(config=old.config)
    old(ids[:, :num_old], past_key_values=cache)
    logits = untied.model(ids[:, num_old:], past_key_values=cache).logits[0, :-1]
    new_ids = torch.tensor(completion.token_ids[cut:])
    mixed = torch.log_softmax(logits, -1).gather(-1, new_ids[:, None]).squeeze(-1)
    after = torch.tensor(completion.logprobs[cut:])
    assert float((after - mixed).abs().max()) < TOLERANCE
    recomputed = tiny_engine.logprobs(untied.model, PROMPT, completion.token_ids)[cut:]
    assert float((after - recomputed).abs().max()) > 100 * TOLERANCE


def test_a_request_in_flight_computes_its_cache_again_where_that_is_asked_for(tied: Setup) -> None:
    """Its engine takes 64 tokens at once, so that prompt and answer are computed again in several parts."""
    tied.generation.at_push = AtPush.RECOMPUTE
    try:
        completion, old = asyncio.run(interrupted(tied))
        [fresh] = asyncio.run(sample(tied, n=1, max_tokens=16))
    finally:
        tied.generation.at_push = AtPush.KEEP
    assert_well_formed(completion)
    assert [span.version for span in completion.versions] == [tied.version - 1, tied.version]
    cut = completion.versions[1].start
    assert gap(completion, old) < TOLERANCE
    new = tiny_engine.logprobs(tied.model, PROMPT, completion.token_ids)[cut:]
    assert float((torch.tensor(completion.logprobs[cut:]) - new).abs().max()) < TOLERANCE
    assert gap(fresh, tied.model) < TOLERANCE


def test_a_push_that_waits_for_running_requests_leaves_one_version_in_every_answer(untied: Setup) -> None:
    untied.generation.at_push = AtPush.DRAIN
    try:
        old, (running, waiting, later) = untied.copy(), asyncio.run(around_a_push(untied))
    finally:
        untied.generation.at_push = AtPush.KEEP
    for completion in running:
        assert [span.version for span in completion.versions] == [untied.version - 1]
        assert len(completion.token_ids) == 300
        assert gap(completion, old) < TOLERANCE
    for completion in waiting + later:
        assert [span.version for span in completion.versions] == [untied.version]
        assert gap(completion, untied.model) < TOLERANCE


async def around_a_push(setup: Setup) -> tuple[list[Completion], list[Completion], list[Completion]]:
    """Push with the batch full and as many waiting, all with one prompt; return running, waiting and later ones."""
    running = [asyncio.create_task(sample(setup, n=1, max_tokens=300)) for _ in range(BATCH_LIMIT)]
    await asyncio.sleep(0.2)
    waiting = [asyncio.create_task(sample(setup, n=1, max_tokens=40)) for _ in range(BATCH_LIMIT)]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(setup.push)
    later = asyncio.create_task(sample(setup, n=BATCH_LIMIT, max_tokens=40))
    return (
        [completion for task in running for completion in await task],
        [completion for task in waiting for completion in await task],
        await later,
    )


def test_no_request_sees_cached_prompts_of_older_weights(untied: Setup) -> None:
    asyncio.run(sample(untied, n=1, max_tokens=4))  # the prompt is in the cache, and the running ones hold it
    running, waiting, later = asyncio.run(around_a_push(untied))
    assert {len(completion.versions) for completion in running} == {2}, "none was in flight at the push"
    for completion in waiting + later:
        assert [span.version for span in completion.versions] == [untied.version]
        assert gap(completion, untied.model) < TOLERANCE


async def hammer(setup: Setup, *, num_pushes: int) -> tuple[list[Completion], dict[int, PreTrainedModel]]:
    """Keep requests coming while weights are pushed, so that some arrive while the engine is paused."""
    models = {setup.version: setup.copy()}
    tasks = []

    async def keep_coming() -> None:
        while True:
            tasks.append(asyncio.create_task(sample(setup, n=1, max_tokens=8)))
            await asyncio.sleep(0.004)

    source = asyncio.create_task(keep_coming())
    for _ in range(num_pushes):
        await asyncio.sleep(0.2)
        await asyncio.to_thread(setup.push)
        models[setup.version] = setup.copy()
    await asyncio.sleep(0.1)
    source.cancel()
    return [completion for task in tasks for completion in await task], models


def test_requests_that_arrive_during_pushes_start_from_one_version(untied: Setup) -> None:
    completions, models = asyncio.run(hammer(untied, num_pushes=4))
    assert {completion.versions[0].version for completion in completions} == set(models)
    for completion in completions:
        assert_well_formed(completion)
        assert gap(completion, models[completion.versions[0].version]) < TOLERANCE


def test_memory_is_stable_over_20_pushes(untied: Setup) -> None:
    [info] = untied.generation.infos
    processes = [psutil.Process(pid) for pid in (info.pid, *info.core_pids)]
    for _ in range(10):
        untied.push()
    before = sum(process.memory_info().rss for process in processes)
    for _ in range(20):
        untied.push()
    growth = sum(process.memory_info().rss for process in processes) - before
    assert growth < 10 * untied.weights.layout.num_bytes, "a leak of one copy per push would be 20"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_openai_server_answers_only_who_has_its_key_and_only_the_known_paths(tied: Setup) -> None:
    [(base_url, key)] = tied.generation.servers()
    root = base_url.removesuffix("/v1")
    for headers in ({}, bearer("wrong"), {"Authorization": b"Bearer \xff"}):
        for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/docs"):
            assert httpx.get(f"{root}{path}", headers=headers, timeout=60).status_code == 401
    assert httpx.get(f"{base_url}/models", headers=bearer(key), timeout=60).status_code == 200
    for path in ("/metrics", "/docs", "/v1/load_lora_adapter", "//v1/models"):
        assert httpx.get(f"{root}{path}", headers=bearer(key), timeout=60).status_code == 404


def test_the_openai_server_answers_from_the_same_weights(tied: Setup) -> None:
    [(base_url, key)] = tied.generation.servers()
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": " ".join(f"w{token}" for token in PROMPT)}],
        "max_tokens": 24,
        "logprobs": True,
        "return_token_ids": True,
    }
    for push in range(2):
        if push:
            tied.push()
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=bearer(key), timeout=60)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        [choice] = reply["choices"]
        prompt = tuple(reply["prompt_token_ids"])
        assert prompt == (2, *PROMPT, 3)
        reference = tiny_engine.logprobs(tied.model, prompt, tuple(choice["token_ids"]))
        logprobs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert float((logprobs - reference).abs().max()) < TOLERANCE


def test_a_busy_engine_is_counted_as_such(untied: Setup) -> None:
    before, began = untied.generation.stats()[0], time.monotonic()
    asyncio.run(sample(untied, n=8, max_tokens=50))
    wall, after = time.monotonic() - began, untied.generation.stats()[0]
    assert after["generated_tokens"] - before["generated_tokens"] == 8 * 50
    assert after["prompt_tokens"] - before["prompt_tokens"] == 8 * len(PROMPT)
    assert 0 < after["busy_seconds"] - before["busy_seconds"] <= wall
    assert after["running"] == after["waiting"] == 0


def test_the_queue_and_the_cache_of_an_engine_are_sampled_over_time(untied: Setup, tied: Setup) -> None:
    untied.generation.take_samples()
    asyncio.run(sample(untied, n=8, max_tokens=200))
    [samples] = untied.generation.take_samples()
    assert samples["generation_tokens"] == 8 * 200
    assert 0 < samples["inflight_batch_sizes/mean"] <= samples["inflight_batch_sizes/max"] == BATCH_LIMIT
    assert 0 < samples["num_pending_samples/mean"] <= samples["num_pending_samples/max"] == 8 - BATCH_LIMIT
    assert 0 < samples["kv_cache_usage_perc/mean"] <= samples["kv_cache_usage_perc/max"] <= 1
    time.sleep(0.5)  # of many intervals
    [idle] = untied.generation.take_samples()
    assert set(idle) == set(samples) and set(idle.values()) == {0.0}
    assert tied.generation.take_samples() == [{}]  # of an engine that takes none
