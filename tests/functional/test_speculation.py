"""Speculative decoding by a hybrid model's own heads on CPU: the tokens are those of the model, and the counts say so.

vLLM's own functions are 10 to 16 nats wrong here, and sample from another distribution, without an error. The engines
read no weights: those of the model and of its heads come with a push.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import nccl_push
import pytest
import torch
from head_reference import accepted_share, add_heads
from policy_case import local_ray
from route_reference import check_routes
from safetensors.torch import load_file, save_file
from speed import patiently
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from recipes.config.load import load_config, require_valid
from recipes.generation.engine_args import CPU_ENV, ENV
from recipes.generation.generation import Generation
from recipes.grpo.metrics import engine_samples
from recipes.policy.weights import SharedMemoryWriter
from recipes.types import Completion, Sampling
from tools.tiny.model import build_hybrid_model, build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
NUM_DRAFTED = 2
PROMPTS = [tuple(10 + (7 * row + 3 * place) % 200 for place in range(20 + row)) for row in range(24)]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=60)
ALONE, MAINLY = 1000.0, 40.0  # what the newest token counts for a model, against all that it makes of the others


def write_model(path: Path, *, newest_token: float, mixers: float | None) -> Path:
    """Write a model with heads that go by the newest token and by what their mixers make of it; None: random heads."""
    tokenizer = build_tokenizer()
    hybrid = build_hybrid_model(tokenizer, seed=3)
    hybrid.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(path)
    hybrid.save_pretrained(path)
    add_heads(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight"):
            tensor *= 12  # a few tokens are likely
        elif name.endswith("embeddings.weight"):
            tensor *= newest_token
        elif mixers is None or not name.startswith("mtp."):
            continue
        elif "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "shared_experts.down_proj.weight", "fc2_latent_proj.weight")):
            tensor *= mixers
    if mixers is not None:
        hidden = hybrid.config.hidden_size
        tensors["mtp.layers.0.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads guess some of its tokens."""
    return write_model(tmp_path_factory.mktemp("some"), newest_token=MAINLY, mixers=0.002)


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("random"), newest_token=ALONE, mixers=None)


@pytest.fixture(scope="module")
def agreeing_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("agreeing"), newest_token=ALONE, mixers=1e-4)


class Pushing:
    """An engine that has read no weights, and what pushes those of a model to it."""

    def __init__(self, generation: Generation, model: Path) -> None:
        self.generation = generation
        shapes = [(name, one.dtype, tuple(one.shape)) for name, one in load_file(model / "model.safetensors").items()]
        self._writer = SharedMemoryWriter(shapes, driver_pid=os.getpid())
        generation.connect_weights(self._writer.layout)
        self._version = 0

    def push(self, model: Path, *, drains: bool = True) -> None:
        self._version += 1
        self._writer.write(load_file(model / "model.safetensors").items(), num_before=0)
        if drains:
            self.generation.drain()
        self.generation.update_weights(self._version)

    def close(self) -> None:
        self._writer.close()
        self.generation.shutdown()


@pytest.fixture(scope="module")
def pushing(model: Path) -> Iterator[Pushing]:
    config = require_valid(
        load_config(
            ROOT / "configs/tiny/stage1_rlvr.yaml",
            [f"policy.model_name={model}", "policy.generation.vllm_cfg.expose_http_server=false"],
        )
    )
    own = config.policy.generation
    vllm_cfg = replace(
        own.vllm_cfg,
        enable_prefix_caching=False,
        enable_vllm_metrics_logger=True,
        vllm_metrics_logger_interval=0.1,
    )
    speculation = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTED}
    with local_ray(num_cpus=1):
        generation = Generation.start(
            replace(own, vllm_cfg=vllm_cfg, vllm_kwargs={**own.vllm_kwargs, "speculative_config": speculation}),
            model_path=str(model),
            seed=1,
            placement=[{"num_cpus": 1}],
            deadlines=config.deadlines,
            loads_weights=False,
        )
        pushing = Pushing(generation, model)
        yield pushing
        pushing.close()


@pytest.fixture
def generation(pushing: Pushing, model: Path) -> Generation:
    pushing.push(model)
    return pushing.generation


def sample(generation: Generation, temperature: float, prompts: Sequence[tuple[int, ...]]) -> list[Completion]:
    sampling = replace(SAMPLING, temperature=temperature)

    async def all_prompts() -> list[Completion]:
        return list(
            await asyncio.gather(*(generation.generate(p, sampling, affinity=i) for i, p in enumerate(prompts)))
        )

    return asyncio.run(all_prompts())


def reference(model: Path, completions: list[Completion], temperature: float) -> list[Tensor]:
    """Return the log-probabilities of every token of the vocabulary at each sampled place, of each answer."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for prompt, completion in zip(PROMPTS, completions, strict=False):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            scores = plain(ids).logits[0, len(prompt) - 1 : -1]
        found.append((scores / (temperature or 1.0)).log_softmax(-1))
    return found


def own(scores: Tensor, completion: Completion) -> Tensor:
    return scores.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def test_routes_are_those_of_the_tokens_that_stayed(generation: Generation, model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [*PROMPTS[:4], tuple(PROMPTS[0][place % 20] for place in range(100))]  # the last fills several blocks
    for prompt, completion in zip(prompts, sample(generation, 1.0, prompts), strict=True):
        whole = (*prompt, *completion.token_ids)
        check_routes(plain, whole, completion.routes, start=0, end=len(whole) - 1)


def test_sampled_tokens_have_the_models_log_probabilities_and_its_distribution(
    generation: Generation, model: Path
) -> None:
    generation.take_samples()
    completions = sample(generation, 1.0, PROMPTS)
    scores = reference(model, completions, 1.0)
    for completion, of_answer in zip(completions, scores, strict=True):
        assert torch.allclose(torch.tensor(completion.logprobs), own(of_answer, completion), atol=1e-4, rtol=0)
    # Of tokens that are drawn from p, log p(token) + entropy(p) is 0 on average.
    excess = torch.cat(
        [
            own(of_answer, one) - (of_answer.exp() * of_answer).sum(-1)
            for one, of_answer in zip(completions, scores, strict=True)
        ]
    )
    assert len(excess) > 500
    assert abs(excess.mean()) < 5 * excess.std() / len(excess) ** 0.5
    counts = engine_samples(generation.take_samples())
    assert counts["train/vllm/spec_num_drafts"] > 100
    assert 0.1 < counts["train/vllm/spec_acceptance_rate"] < 0.9  # some drafts were accepted and some refused
    assert 1 < counts["train/vllm/spec_acceptance_length"] < 1 + NUM_DRAFTED


def test_answers_that_run_during_pushes_go_on_from_their_last_accepted_token(pushing: Pushing, model: Path) -> None:
    """Answers of all lengths: at each push some have just ended, and others have accepted drafts in their last step."""
    pushing.push(model)

    async def answers() -> tuple[list[Completion], int]:
        calls = [
            pushing.generation.generate(PROMPTS[row % 24], replace(SAMPLING, max_tokens=8 + row), affinity=row)
            for row in range(96)
        ]
        running, num_pushes = asyncio.gather(*calls), 0
        while not running.done():
            await asyncio.sleep(0.1)
            await asyncio.to_thread(pushing.push, model, drains=False)
            num_pushes += 1
        return list(running.result()), num_pushes

    completions, num_pushes = asyncio.run(answers())
    assert num_pushes > 3
    assert sum(len(one.versions) > 1 for one in completions) > 24
    for first in range(0, 96, 24):
        part = completions[first : first + 24]
        for completion, scores in zip(part, reference(model, part, 1.0), strict=True):
            assert torch.allclose(torch.tensor(completion.logprobs), own(scores, completion), atol=1e-4, rtol=0)


def test_greedy_tokens_are_the_likeliest(generation: Generation, model: Path) -> None:
    completions = sample(generation, 0.0, PROMPTS)
    for completion, scores in zip(completions, reference(model, completions, 0.0), strict=True):
        assert (scores.max(-1).values - own(scores, completion)).max() < 1e-4


def test_a_push_reaches_the_heads_that_guess(
    pushing: Pushing, random_heads: Path, model: Path, agreeing_heads: Path
) -> None:
    shares = []
    for pushed in (random_heads, model, agreeing_heads):
        pushing.push(pushed)
        pushing.generation.take_samples()
        completions = sample(pushing.generation, 0.0, PROMPTS[:6])
        shares.append(engine_samples(pushing.generation.take_samples())["train/vllm/spec_acceptance_rate"])
        for completion, scores in zip(completions, reference(pushed, completions, 0.0), strict=True):
            assert (scores.max(-1).values - own(scores, completion)).max() < 1e-4
            assert torch.allclose(torch.tensor(completion.logprobs), own(scores, completion), atol=1e-4, rtol=0)
        if pushed == model:
            answers = [(prompt, one.token_ids) for prompt, one in zip(PROMPTS, completions, strict=False)]
            assert abs(shares[-1] - accepted_share(pushed, answers, NUM_DRAFTED)) < 0.03
    assert shares[0] < 0.1
    assert shares[-1] > 0.95


def test_a_push_by_nccl_reaches_the_heads_too(model: Path, random_heads: Path, agreeing_heads: Path) -> None:
    argv = [sys.executable, str(HERE / "nccl_push.py"), *map(str, (random_heads, model, agreeing_heads))]
    env = {**os.environ, **ENV, **CPU_ENV, "PYTHONPATH": f"{ROOT}:{HERE}"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=patiently(120))
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix(nccl_push.MARK) for line in done.stdout.splitlines() if line.startswith(nccl_push.MARK)]
    refused, *pushes = map(json.loads, lines)
    assert "no value for 2 of 16 parameters of the drafter: model.layers.0.eh_proj.weight, " in refused
    answers = list(zip(nccl_push.PROMPTS, pushes[0]["tokens"], strict=True))
    assert abs(pushes[0]["accepted"] - accepted_share(model, answers, NUM_DRAFTED)) < 0.03
    assert pushes[-1]["accepted"] > 0.95


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_mamba_layer_goes_on_from_the_accepted_tokens(accepted: int) -> None:
    """The first call is for three tokens of which some are accepted, the second for two that follow those."""
    from recipes.generation.cpu_hybrid import NewTokens, Recurrence, convolve, scan

    generator = torch.Generator().manual_seed(0)
    width, channels, heads, size, states, groups = 4, 6, 4, 3, 5, 2
    first, second = NewTokens(0, 1, 1, 0, 3), NewTokens(0, 1, accepted, 0, 2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # The convolution over all that counts at once, with `width` - 1 inputs before it.
    before, x, y = random(width - 1, channels), random(3, channels), random(2, channels)
    weight, bias = random(channels, width), random(channels)
    kept = torch.zeros(2, channels, width - 1 + 2)
    kept[1, :, : width - 1] = before.T
    convolve(x, kept, weight, bias, [first], silu=True)
    got = convolve(y, kept, weight, bias, [second], silu=True)
    inputs = torch.cat([before, x[:accepted], y]).T
    whole = functional.silu(functional.conv1d(inputs[None], weight[:, None], bias, groups=channels))[0].T
    assert torch.allclose(got, whole[-2:], atol=1e-6)

    # The recurrence likewise: slot k of the request holds its state after token k of the last call.
    x, dt, b, c = random(5, heads, size), random(5, heads, size), random(5, groups, states), random(5, groups, states)
    a, skip, dt_bias = -random(heads, size, states).abs(), random(heads, size), random(heads, size)

    def run(memory: Tensor, rows: list[int], slot: int) -> Tensor:
        out, places = torch.zeros(len(rows), heads, size), torch.arange(1, len(rows) + 1)[None]
        layer = Recurrence(x[rows], dt[rows], a, b[rows], c[rows], skip, dt_bias)
        scan(memory, layer, [NewTokens(0, slot, 1, 0, len(rows))], write_NK=places, out_Thd=out)
        return out

    memory = torch.zeros(8, heads, size, states)
    memory[1] = random(heads, size, states)
    plain = memory.clone()
    run(memory, [0, 1, 2], 1)
    got = run(memory, [3, 4], accepted)
    rows = [*range(accepted), 3, 4]
    assert torch.allclose(got, run(plain, rows, 1)[-2:], atol=1e-6)
    assert torch.allclose(memory[2], plain[len(rows)], atol=1e-6)
