"""What each option of the loss does where the recorded numbers of the reference have no case, hand-computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.grpo.loss import clipped_surrogate, grpo_loss, importance_weights, kl_estimate, reference_kl, sampled_kl
from tests.unit.grpo.test_loss import inputs_of, options

LOGS = [0.0, math.log(0.5), math.log(0.25)]  # of the engine, one token that is not sampled first


def weights(prev: list[float], **values: Any) -> tuple[list[float], float | None]:
    """Return the weights of the sampled tokens of one sequence, and the share out of bounds, if there are any."""
    given = inputs_of([LOGS], torch.tensor([prev]))
    weight_BT, out = importance_weights(torch.tensor([prev]), given, options(**values))
    return weight_BT.expand(1, 3)[0, 1:].tolist(), None if out is None else float(out[0] / out[1])


def bounded(kind: str, low: float | None, high: float) -> dict[str, Any]:
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


# Policy over engine: 2 and 0.5 on the two tokens.
PREV = [-9.0, 0.0, math.log(0.125)]


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected", "share"),
    [
        ("tis", None, 1.5, [1.5, 0.5], 0.5),
        ("tis", 0.75, 1.5, [1.5, 0.75], 1.0),
        ("tis", 0.25, 4.0, [2.0, 0.5], 0.0),
        ("icepop", None, 1.5, [0.0, 0.5], 0.5),
        ("icepop", 0.75, 4.0, [2.0, 0.0], 0.5),
        ("icepop", 0.5, 2.0, [2.0, 0.5], 0.0),  # bounds belong to the range
        ("seq-mask-tis", None, 4.0, [2.0, 0.5], 0.0),  # the mean ratio is 1
        ("seq-mask-tis", 1.5, 4.0, [0.0, 0.0], 1.0),
        ("seq-mask-tis", 0.25, 0.5, [0.0, 0.0], 1.0),
    ],
)
def test_ratios_are_bounded_as_configured(
    kind: str, low: float | None, high: float, expected: list[float], share: float
) -> None:
    got, out = weights(PREV, **bounded(kind, low, high))
    assert got == pytest.approx(expected)
    assert out == pytest.approx(share)


def test_without_a_bound_no_share_is_out_of_it() -> None:
    assert weights(PREV, truncated_importance_sampling_ratio=None) == ([2.0, 0.5], None)


def test_a_ratio_that_no_float_holds_weighs_nothing() -> None:
    for gap in (math.inf, math.nan):
        got, _ = weights([-9.0, gap, LOGS[2]], truncated_importance_sampling_ratio=None)
        assert got == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(("kind", "expected"), [("k1", 3.0), ("k2", 4.5), ("k3", math.exp(-3) - 1 + 3)])
def test_the_distance_in_a_kl_is_bounded_on_both_sides(kind: str, expected: float) -> None:
    near, far = torch.tensor([-1.0]), torch.tensor([-100.0])
    assert kl_estimate(near, far, kind, input_clamp=3.0).item() == pytest.approx(expected)
    other = {"k1": -3.0, "k2": 4.5, "k3": math.exp(3) - 1 - 3}[kind]
    assert kl_estimate(far, near, kind, input_clamp=3.0).item() == pytest.approx(other)


def test_the_sampled_kl_is_bounded_as_configured() -> None:
    logprobs, reference = torch.tensor([-1.0, -9.0]), torch.tensor([-9.0, -1.0])
    base = {"reference_policy_kl_type": "k1", "kl_input_clamp_value": None}
    assert sampled_kl(logprobs, reference, cfg=options(**base, kl_output_clamp_value=None)).tolist() == [8.0, -8.0]
    assert sampled_kl(logprobs, reference, cfg=options(**base, kl_output_clamp_value=5.0)).tolist() == [5.0, -5.0]
    narrow = base | {"kl_input_clamp_value": 2.0}
    assert sampled_kl(logprobs, reference, cfg=options(**narrow, kl_output_clamp_value=5.0)).tolist() == [2.0, -2.0]


def test_a_kl_without_a_reference_is_refused_with_its_key() -> None:
    given = inputs_of([LOGS], torch.tensor([LOGS]))
    with pytest.raises(ValueError, match=r"^loss_fn\.reference_policy_kl_penalty > 0 needs reference log-prob"):
        reference_kl(torch.tensor([LOGS]), given, options())


def test_the_second_clip_bounds_what_a_negative_advantage_costs() -> None:
    ratio = torch.tensor([[9.0, 9.0, 2.0]])
    advantages = torch.tensor([[-1.0, 1.0, -1.0]])
    got = clipped_surrogate(ratio, ratio, ratio.clamp(0.8, 1.2), advantages, options(ratio_clip_c=3.0))
    assert got.tolist() == [[3.0, pytest.approx(-1.2), 2.0]]


@pytest.mark.parametrize(("forced", "ratio"), [(True, 1.0), (False, 1.2)])
def test_only_a_ratio_that_is_not_forced_is_clipped(forced: bool, ratio: float) -> None:
    current = torch.tensor([[-9.0, 0.0, 0.0]])
    given = replace(inputs_of([LOGS], current), prev_logprobs_BT=torch.tensor([LOGS]))
    values = {"force_on_policy_ratio": forced, "use_importance_sampling_correction": False}
    cfg = options(**values, ratio_clip_min=0.2, ratio_clip_max=0.2)
    sums = grpo_loss(current, given, cfg=cfg, mismatch_threshold=None)
    assert sums.loss.item() == pytest.approx(-2 * ratio)
    assert float(sums.metrics["probs_ratio_clamped_max"]) == pytest.approx(ratio)
