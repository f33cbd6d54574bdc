"""Router replay on one rank: the engine's choice of experts takes the place of the policy's own, and nothing else.

The engine is played by the policy itself: what it computes without noise is what an engine would report. The scores of
its routers lie close together, as those of many experts do, so that a little noise makes another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import one_rank
from policy_case import load_case, save_experts, save_hybrid
from random_batch import batch_of, random_rollouts, with_random_routes
from torch import Tensor

from recipes import routes
from recipes.grpo.loss import grpo_loss
from recipes.policy import shards, step
from recipes.policy.shards import BatchShard
from recipes.types import ReferenceUse, Rollout
from tests.groups import LocalStore

pytestmark = [pytest.mark.functional, pytest.mark.timeout(180)]

NUM_LAYERS = 6
NOISE = 1.0  # in what a router sees, of about 1
CLOSENESS, WEIGHT, SHARPNESS = 0.003, 100.0, 4.0  # of experts: their scores, what they say; of the logits
RECOMPUTE = {"megatron_cfg__activation_checkpointing": "true"}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one forward and backward pass over all rows gave."""

    logprobs: Tensor  # of all rows, end to end
    gradients: Tensor
    metrics: dict[str, shards.Measured]
    maps: dict[int, Tensor]  # of each layer, by number: which expert gets which token of the packed rows
    changed: float  # share of the replayed choices that the routers would not have made


def _layers(trainer: step.Trainer) -> list[Any]:
    return [module for module in trainer.model.modules() if hasattr(module, "router")]


@torch.no_grad()
def bring_scores_together(trainer: step.Trainer) -> None:
    step.unwrap_model(trainer.model).output_layer.weight.mul_(SHARPNESS)
    for layer in _layers(trainer):
        layer.router.weight.mul_(CLOSENESS)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.mul_(CLOSENESS)
        for name, weight in layer.experts.named_parameters():
            if "linear_fc2" in name:
                weight.mul_(WEIGHT)


@contextmanager
def noisy_routers(trainer: step.Trainer, noise: float, maps: dict[int, list[Tensor]]) -> Iterator[None]:
    """Add noise to what the routers see, and note where they send the tokens."""
    generator, hooks = torch.Generator().manual_seed(3), []
    for layer in _layers(trainer):

        def before(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return (given[0] + noise * torch.randn(given[0].shape, generator=generator), *given[1:])

        def after(_: Any, __: Any, result: Any, number: int = layer.layer_number) -> None:
            maps.setdefault(number, []).append(result[1].detach())

        hooks += [layer.router.register_forward_pre_hook(before), layer.router.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(trainer: step.Trainer, shard: BatchShard, *, noise: float) -> Pass:
    maps: dict[int, list[Tensor]] = {}
    with noisy_routers(trainer, noise, maps):
        logprobs = torch.cat(step.logprobs(trainer, shard))
    with noisy_routers(trainer, noise, {}):
        metrics = step.accumulate_gradients(trainer, shard, step.Passes())
    changed, replayed = step.take_changed_routes(trainer.model)
    return Pass(
        logprobs=logprobs,
        gradients=torch.cat([p.main_grad.flatten() for p in trainer.model.parameters()]).clone(),
        metrics=metrics,
        maps={number: torch.cat(parts) for number, parts in maps.items()},
        changed=changed / replayed if replayed else 0.0,
    )


def as_engine(trainer: step.Trainer, rollouts: Sequence[Rollout]) -> tuple[BatchShard, BatchShard, Tensor]:
    """Return the rollouts with the log-probabilities of an engine, with and without its routes, and who has a route."""
    plan, shard = _split(trainer, rollouts)
    maps: dict[int, list[Tensor]] = {}
    with noisy_routers(trainer, 0.0, maps):
        found = step.logprobs(trainer, shard)
    result, known = list(rollouts), []
    num_chosen = int(next(iter(maps.values()))[0][0].sum())
    for number, packed in enumerate(step._microbatches(trainer, shard)):
        known.append(torch.zeros(packed.tokens_1T.shape[1], dtype=torch.bool))
        for start, row in zip(packed.starts, packed.rows, strict=True):
            length = len(shard.row(row).token_ids)
            known[-1][start : start + length - 1] = True
            chosen_TDK = np.zeros((length, NUM_LAYERS, num_chosen), np.uint16)
            for layer, parts in maps.items():
                chosen = parts[number][start : start + length].nonzero()[:, 1]
                chosen_TDK[:, layer - 1] = chosen.view(length, num_chosen).numpy()
            result[plan.rows[row]] = _reported(result[plan.rows[row]], chosen_TDK, found[row])
    bare = [replace(one, turns=tuple(replace(turn, routes=b"") for turn in one.turns)) for one in result]
    return _split(trainer, bare)[1], _split(trainer, result)[1], torch.cat(known)


def _reported(rollout: Rollout, chosen_TDK: Any, logprobs_S: Tensor) -> Rollout:
    """Return what an engine would say of a rollout: the last token of a turn is first computed with the next turn."""
    turns, begin, end = [], 0, 0
    for turn in rollout.turns:
        end += len(turn.prompt_token_ids) + len(turn.token_ids)
        own = tuple(logprobs_S[end - len(turn.token_ids) : end].tolist())
        turns.append(replace(turn, logprobs=own, routes=routes.pack(chosen_TDK[begin : end - 1], begin)))
        begin = end - 1
    return replace(rollout, turns=tuple(turns))


def _split(trainer: step.Trainer, rollouts: Sequence[Rollout]) -> tuple[Any, BatchShard]:
    batch = batch_of(rollouts, LocalStore())
    (plan,) = shards.divide(batch, trainer.cfg, num_shards=1, training=True)
    (shard,) = shards.split(batch, [plan])
    return plan, shard


@pytest.mark.parametrize(
    ("save", "sizes", "overrides"),
    [
        pytest.param(save_hybrid, {}, {}, id="hybrid"),
        pytest.param(save_hybrid, {}, RECOMPUTE, id="hybrid-recomputed"),
        pytest.param(save_hybrid, GROUPS, {}, id="groups-of-experts"),
        pytest.param(save_experts, {"num_hidden_layers": NUM_LAYERS}, RECOMPUTE, id="softmax-recomputed"),
    ],
)
def test_noise_changes_no_route_that_is_replayed(
    save: Callable[..., Path], sizes: dict[str, Any], overrides: dict[str, Any], tmp_path: Path
) -> None:
    config = load_case(
        save(tmp_path / "model", **sizes),
        router_replay__enabled="true",
        megatron_cfg__moe_router_bias_update_rate=0.0,
        **overrides,
    )
    loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=config.grpo.seq_logprob_error_threshold)
    with one_rank(config):
        trainer = step.build_trainer(config.policy, loss)
        bring_scores_together(trainer)
        bare, routed, known = as_engine(trainer, random_rollouts(12))
        plain, replayed = run(trainer, bare, noise=0.0), run(trainer, routed, noise=0.0)
        off, on = run(trainer, bare, noise=NOISE), run(trainer, routed, noise=NOISE)

    assert torch.equal(plain.logprobs, replayed.logprobs) and torch.equal(plain.gradients, replayed.gradients)
    assert replayed.changed == 0.0
    assert (share(plain.metrics[routes.ROUTES_UNKNOWN]), share(replayed.metrics[routes.ROUTES_UNKNOWN])) == (1.0, 0.0)
    figures = {
        name: (flipped(one, plain, known), mismatch(one, plain), masked(one))
        for name, one in (("off", off), ("on", on))
    }
    print(figures)  # what `pytest -s` shows
    assert figures["off"][0] > 0.05 and figures["on"][0] == 0.0, "of the choices of experts"
    assert on.changed > 0.05, "what the metric says of it"
    assert figures["off"][1] > 10 * figures["on"][1]
    assert figures["off"][2] > 0.2 and figures["on"][2] == 0.0


def test_the_reference_policy_replays_the_same_routes(tmp_path: Path) -> None:
    """Whatever the routes are: with its own choice, the reference would differ from a policy that has not moved."""
    config = load_case(save_hybrid(tmp_path / "model"), router_replay__enabled="true")
    loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
    with one_rank(config):
        trainer = step.build_trainer(config.policy, loss, reference=ReferenceUse())
        _, shard = _split(trainer, with_random_routes(random_rollouts(6)))
        own, start = step.logprobs(trainer, shard), step.reference_logprobs(trainer, shard)
        _, bare = _split(trainer, random_rollouts(6))
        unrouted = step.logprobs(trainer, bare)
    assert start is not None and torch.equal(torch.cat(own), torch.cat(start))
    assert not torch.equal(torch.cat(own), torch.cat(unrouted))


def share(measured: shards.Measured) -> float:
    assert isinstance(measured, tuple)
    return measured[0] / measured[1]


def flipped(one: Pass, plain: Pass, known: Tensor) -> float:
    """Return the share of the choices of experts that differ, of the tokens that have a route."""
    pairs = [(one.maps[number][known], own[known]) for number, own in plain.maps.items()]
    return sum(int((b & ~a).sum()) for a, b in pairs) / sum(int(b.sum()) for _, b in pairs)


def mismatch(one: Pass, plain: Pass) -> float:
    return float((one.logprobs - plain.logprobs).abs().mean())


def masked(one: Pass) -> float:
    """Return the share of the sequences that are out of the loss since their log-probabilities differ too much."""
    count, kept = one.metrics["num_masked_seqs_by_logprob_error"], one.metrics["num_valid_samples"]
    assert isinstance(count, float) and isinstance(kept, float)
    return count / (count + kept)
