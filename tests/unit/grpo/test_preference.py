"""DPO: its loss by numbers of others, its gradient against that of the formula, and which rollouts are pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.config.tree import DpoConfig
from recipes.grpo.preference import pairs_of, prefer, preference_loss, unknown_tool_rate
from recipes.types import Group, LossInputs, PolicyRow, Rollout, RolloutStatus, Turn
from tests.configuration import block
from tests.groups import group_of

WAYS = [
    {},
    {"sft_loss_weight": 0.2},
    {"preference_average_log_probs": True, "sft_loss_weight": 0.5, "sft_average_log_probs": True},
    {"preference_loss_weight": 0.3, "reference_policy_kl_penalty": 2.0},
]


def config(**options: Any) -> DpoConfig:
    cfg: DpoConfig = block("dpo", **options)
    return cfg


def row(pair: int, logprobs: list[float], start: list[float], mask: list[float] | None = None) -> PolicyRow:
    """Return a row of sampled tokens behind a prompt of one."""
    return PolicyRow(
        advantage=0.0,
        loss_mask_S=torch.tensor([0.0, *(mask or [1.0] * len(logprobs))]),
        logprobs_S=torch.tensor([0.0, *logprobs]),
        reference_logprobs_S=torch.tensor([0.0, *start]),
        pair=pair,
    )


def on_ranks(ranks: list[list[PolicyRow]], cfg: DpoConfig) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Return what each rank gets when the sums go over all of them."""
    given: list[list[Tensor]] = [[] for _ in ranks]
    for rows, own in zip(ranks, given, strict=True):
        prefer(rows, lambda part, own=own: own.append(part) or part, cfg=cfg, most_pairs=4)
    sums = [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]
    results = []
    for rows in ranks:
        left = iter(sums)
        results.append(prefer(rows, lambda _, left=left: next(left), cfg=cfg, most_pairs=4))
    return results


def test_the_loss_has_the_values_of_others() -> None:
    """Log-ratios of 2 and -1 with beta 0.1: TRL's `sigmoid` loss and NeMo RL's DPOLossFn are 0.554355."""
    rows = [row(1, [-1.0, -2.0], [-2.0, -3.0]), row(-1, [-4.0], [-3.0]), row(0, [-9.0], [-1.0])]
    _, metrics = prefer(rows, lambda own: own, cfg=config(reference_policy_kl_penalty=0.1), most_pairs=4)
    assert metrics.pop("loss") == metrics["preference_loss"] == (pytest.approx(0.554355244468527, abs=1e-9), 1.0)
    del metrics["preference_loss"]
    ours = {"accuracy": (1.0, 1.0), "rewards_chosen_mean": (2.0, 1.0), "rewards_rejected_mean": (-1.0, 1.0)}
    assert metrics == ours | {"num_pairs": (1.0, 1.0)}
    _, metrics = prefer(rows, lambda own: own, cfg=config(sft_loss_weight=0.2), most_pairs=4)
    assert metrics["sft_loss"] == (3.0, 1.0)
    assert metrics["loss"][0] == pytest.approx(metrics["preference_loss"][0] + 0.2 * 3.0)  # type: ignore[index]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_gradient_is_that_of_the_formula_wherever_the_rows_lie(options: dict[str, Any]) -> None:
    cfg, generator = config(**options), torch.Generator().manual_seed(0)
    lengths, pairs = [3, 5, 2, 4, 3], [1, -1, -2, 2, 0]
    own = [torch.randn(n, generator=generator).double().requires_grad_(True) for n in lengths]
    start = [torch.randn(n, generator=generator).double() for n in lengths]
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in ((0, 1), (3, 2)):
        r = [(own[n] - start[n]).sum() / (lengths[n] if cfg.preference_average_log_probs else 1) for n in range(5)]
        margin = cfg.reference_policy_kl_penalty * (r[chosen] - r[rejected])
        nll = -own[chosen].sum() / (lengths[chosen] if cfg.sft_average_log_probs else 1)
        total = total - cfg.preference_loss_weight * torch.nn.functional.logsigmoid(margin) + cfg.sft_loss_weight * nll
    expected = torch.autograd.grad(total / 2, own, allow_unused=True)

    rows = [row(pair, one.tolist(), ref.tolist()) for pair, one, ref in zip(pairs, own, start, strict=True)]
    found = on_ranks([[rows[0], rows[2], rows[4]], [rows[1], rows[3]]], cfg)
    advantages = {0: found[0][0][0], 2: found[0][0][1], 4: found[0][0][2], 1: found[1][0][0], 3: found[1][0][1]}
    for number, gradient in enumerate(expected):
        loss = by_loss(own[number], advantages[number][1:]) / sum(lengths)  # a batch divides by its tokens
        [got] = torch.autograd.grad(loss, own[number])
        wanted = torch.zeros_like(got) if gradient is None else gradient
        assert torch.allclose(got, wanted, atol=1e-6), number
    for _, metrics in found:  # each rank reports the whole: the mean over ranks is that of the batch
        assert metrics["loss"] == (pytest.approx(float(total.detach()), abs=1e-5), 2.0)


def by_loss(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    ones_BT = torch.ones(1, len(logprobs_T))
    inputs = LossInputs(
        token_mask_BT=ones_BT,
        sample_mask_B=torch.ones(1),
        advantages_BT=advantages_T[None],
        rewards_B=torch.zeros(1, dtype=torch.float64),
        prev_logprobs_BT=logprobs_T.detach()[None],
        generation_logprobs_BT=logprobs_T.detach()[None] - 90.0,  # far away: the engine decides nothing
    )
    sums = preference_loss(logprobs_T[None], inputs, cfg=block("loss_fn"), mismatch_threshold=1.5)
    assert float(sums.count) == len(logprobs_T) and float(sums.sample_mask_B.sum()) == 1
    assert "loss" not in sums.metrics  # which is that of the pairs
    return sums.loss


def test_a_pair_of_which_one_side_is_out_of_the_loss_teaches_nothing() -> None:
    rows = [row(1, [-1.0], [-2.0]), row(-1, [-4.0], [-3.0], [0.0])]
    advantages, metrics = prefer(rows, lambda own: own, cfg=config(sft_loss_weight=1.0), most_pairs=2)
    assert [own.tolist() for own in advantages] == [[0.0, 0.0], [0.0, 0.0]]
    assert metrics == {"num_pairs": (0.0, 1.0)}  # a mean of nothing is not reported


def rollout(reward: float | None, calls: int, unknown: int) -> Rollout:
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=(2, 3),
        logprobs=(-1.0, -1.0),
        versions=(),
        finish_reason="stop",
        tool_calls=(calls, unknown),
    )
    status = RolloutStatus.COMPLETED if reward is not None else RolloutStatus.ENV_FAILED
    return Rollout(turns=(turn,), status=status, reason="", reward=reward)


def groups() -> list[Group]:
    first = [rollout(0.0, 1, 1), rollout(0.2, 1, 0), rollout(1.0, 1, 0), rollout(1.0, 0, 0), rollout(0.0, 2, 1)]
    alike = [rollout(0.0, 1, 1), rollout(0.0, 1, 1)]
    last = [rollout(None, 1, 0), rollout(0.0, 1, 1), rollout(0.0, 1, 0)]
    return [group_of(first), group_of(alike), group_of(last)]


def test_what_calls_an_unknown_tool_is_paired_with_the_best_that_does_not() -> None:
    valid_B = torch.tensor([True] * 7 + [False, True, True])
    # calls before answers without one, then by reward; a group without both kinds has none
    assert pairs_of(groups(), valid_B).tolist() == [-1, 2, 1, 0, -2, 0, 0, 0, -3, 3]
    valid_B[2] = valid_B[8] = False
    assert pairs_of(groups(), valid_B).tolist() == [-1, 1, 0, 2, -2, 0, 0, 0, 0, 0]


def test_the_share_of_unknown_tools_is_one_of_calls() -> None:
    headers = [one for group in groups() for one in group.rollouts]
    assert unknown_tool_rate(headers) == {"unknown_tool_rate": 5 / 10}
    assert unknown_tool_rate([replace(headers[3])]) == {}  # nothing was called
