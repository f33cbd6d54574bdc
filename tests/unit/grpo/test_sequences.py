"""Rollouts with several sequences: each call is trained once, and a rollout counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.grpo.advantage import add_advantages
from recipes.grpo.batch import build_batch, spread_over_sequences
from recipes.grpo.buffer import read_groups, write_groups
from recipes.grpo.loss import grpo_loss
from recipes.grpo.metrics import aggregate_rollouts
from recipes.grpo.reward import verdicts
from recipes.policy.shards import BatchShard, divide, optimizer_batches, padded
from recipes.types import Group, LossInputs, Rollout, RolloutStatus, TrainBatch, Turn
from tests.configuration import block, config
from tests.groups import as_lists, group_of
from tests.unit.grpo.test_loss import CONFIG

SCALAR = block(
    "grpo.adv_estimator", name="grpo", normalize_rewards=False, use_leave_one_out_baseline=True, minus_baseline=True
)


def settings(*, token_level: bool = True, nll_weight: float = 0.0) -> Any:
    loss = {"token_level_loss": token_level, "positive_example_nll_weight": nll_weight, "use_kl_in_reward": False}
    grpo = block(
        "grpo",
        adv_estimator=SCALAR,
        invalid_tool_call_advantage=-5.0,
        malformed_thinking_advantage=None,
        advantage_clip_low=None,
        advantage_clip_high=None,
    )
    return config(grpo=grpo, loss_fn=replace(CONFIG, **loss))


def turn(prompt: Sequence[int], sampled: Sequence[int], **flags: bool) -> Turn:
    logprobs = tuple(-0.1 * (token % 7 + 1) for token in sampled)
    return Turn(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(sampled),
        logprobs=logprobs,
        versions=(),
        finish_reason="stop",
        **flags,
    )


def rollout(reward: float | None, turns: Sequence[Turn], *branches: Sequence[Turn]) -> Rollout:
    status = RolloutStatus.COMPLETED if reward is not None else RolloutStatus.ENV_FAILED
    kept = tuple(tuple(branch) for branch in branches)
    return Rollout(turns=tuple(turns), status=status, reason="r", reward=reward, branches=kept)


# The second rollout has three sequences: the main one, a hidden malformed turn, and a side conversation.
GROUP = group_of(
    [
        rollout(1.0, [turn((1, 2), (10, 11))]),
        rollout(
            0.0,
            [turn((1, 2), (20, 21)), turn((3,), (22,))],
            [turn((1, 2, 20, 21, 4), (23, 24, 25), is_invalid_tool_call=True)],
            [turn((5,), (26,))],
        ),
        rollout(None, [turn((1,), (30,))], [turn((7,), (31,))]),
        rollout(0.5, [turn((1, 2), (40,))]),
    ]
)


def trained(config: Any, *groups: Group) -> tuple[TrainBatch, dict[str, float]]:
    batch = build_batch(groups, verdicts(groups), overlong_filtering=False, mask_flagged=True)
    batch, metrics = add_advantages(batch, groups, config)
    return spread_over_sequences(batch, groups, token_level_loss=config.loss_fn.token_level_loss), metrics


def test_case_38_a_rollout_counts_once_and_each_sampled_token_is_trained_once() -> None:
    batch, metrics = trained(settings(), GROUP)
    assert batch.rollout_B is not None and batch.rollout_B.tolist() == [0, 1, 1, 1, 2, 2, 3]
    # Leave one out, over the rollouts with a verdict: 1, 0 and 0.5.
    assert batch.advantages_B.tolist() == [0.75, -0.75, -0.75, -0.75, 0.0, 0.0, 0.0]
    assert batch.sample_mask_B.tolist() == [1.0] * 4 + [0.0] * 2 + [1.0]
    shard = BatchShard(batch=batch, microbatches=())
    rows = [shard.row(row) for row in range(7)]
    sampled = [row.token_ids[row.token_mask() > 0].tolist() for row in rows]
    assert sampled == [[10, 11], [20, 21, 22], [23, 24, 25], [26], [30], [31], [40]]
    assert [len(row.token_ids) for row in rows] == batch.lengths_B.tolist() == [4, 6, 8, 2, 2, 2, 3]
    own = [row.advantages(float(a), batch.flag_advantages) for row, a in zip(rows, batch.advantages_B, strict=True)]
    assert own[2].tolist() == [-0.75] * 5 + [-5.0] * 3  # the flag of the hidden turn overwrites, nowhere else
    assert own[1].tolist() == [-0.75] * 6
    assert metrics["num_assistant_messages"] == 8 and metrics["num_invalid_tool_calls"] == 1


def test_sizes_of_a_rollout_are_those_of_all_its_sequences() -> None:
    header = GROUP.rollouts[1]
    assert header.sequences == ((6, 3), (8, 3), (2, 1))
    assert (header.num_tokens, header.num_generated_tokens, header.num_turns) == (16, 7, 4)
    assert (header.last_answer_tokens, header.longest_answer_tokens, header.num_prompt_tokens) == (1, 3, 2)
    totals = aggregate_rollouts([GROUP], 0)
    assert (totals["num_rollouts"], totals["num_sequences"], totals["total_num_tokens"]) == (4, 7, 4 + 16 + 4 + 3)


def test_rollouts_with_one_sequence_are_left_as_they_are() -> None:
    group = group_of([rollout(1.0, [turn((1,), (2,))]), rollout(0.0, [turn((1,), (3,))])])
    batch = build_batch([group], verdicts([group]), overlong_filtering=False, mask_flagged=True)
    assert spread_over_sequences(batch, [group], token_level_loss=False) is batch


def loss_of(batch: TrainBatch, config: Any) -> tuple[float, Tensor]:
    """Return the loss of a batch, as one microbatch, and the gradient of each of its rows' tokens end to end."""
    shard, width = BatchShard(batch=batch, microbatches=()), int(batch.lengths_B.max())
    rows = [shard.row(row) for row in range(len(batch.lengths_B))]

    def align(values: Sequence[Any]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(torch.tensor(v), (0, width - len(v))) for v in values])[:, 1:]

    generation_BT, mask_BT = align([row.logprobs() for row in rows]), align([row.token_mask() for row in rows])
    current_BT = (generation_BT - 0.25 * mask_BT).requires_grad_()
    own = zip(rows, batch.advantages_B, strict=True)
    inputs = LossInputs(
        token_mask_BT=mask_BT,
        sample_mask_B=batch.sample_mask_B,
        advantages_BT=align([row.advantages(float(advantage), batch.flag_advantages) for row, advantage in own]),
        rewards_B=batch.rewards_B,
        prev_logprobs_BT=current_BT.detach(),
        generation_logprobs_BT=generation_BT,
        nll_weight_B=batch.nll_weight_B,
        row_weight_B=batch.row_weight_B,
    )
    sums = grpo_loss(current_BT, inputs, cfg=config.loss_fn, mismatch_threshold=None)
    loss = sums.loss / sums.count
    (gradient_BT,) = torch.autograd.grad(loss, current_BT)
    return float(loss.detach()), gradient_BT[mask_BT > 0]


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("nll_weight", [0.0, 0.3])
def test_calls_in_several_sequences_weigh_as_the_same_calls_in_one(token_level: bool, nll_weight: float) -> None:
    config = settings(token_level=token_level, nll_weight=nll_weight)
    calls = [turn((1, 2), (10, 11)), turn((3,), (12, 13, 14))]
    context = (1, 2, 10, 11, 3)
    others = [rollout(None, [turn((1,), (30,))]), *[rollout(0.0, [turn((1,), (token,))]) for token in (20, 21)]]
    one = group_of([rollout(1.0, calls), *others])
    several = group_of([rollout(1.0, calls[:1], [turn(context, calls[1].token_ids)]), *others])
    for size in (4, 2):  # rollouts of an optimizer step
        parts = zip(*(optimizer_batches(trained(config, group)[0], size) for group in (one, several)), strict=True)
        for whole, split in ((loss_of(part, config), loss_of(same, config)) for part, same in parts):
            assert split[0] == pytest.approx(whole[0])
            torch.testing.assert_close(split[1], whole[1])


def test_an_optimizer_step_is_as_many_rollouts_however_many_sequences_they_have() -> None:
    batch, _ = trained(settings(), GROUP)
    assert optimizer_batches(batch, 4) == [batch]
    first, second = optimizer_batches(batch, 2)
    assert (first.lengths_B.tolist(), second.lengths_B.tolist()) == ([4, 6, 8, 2], [2, 2, 3])
    assert second.member_B.tolist() == [4, 5, 6]


@pytest.mark.parametrize("multiple", [1, 2, 7, 16])
def test_ranks_get_equally_many_rows_of_which_the_added_ones_teach_nothing(multiple: int) -> None:
    batch, config = trained(settings(), GROUP)[0], settings()
    full = padded(batch, multiple)
    assert len(full.lengths_B) % multiple == 0 and len(full.lengths_B) < 7 + multiple
    assert full.sample_mask_B[7:].tolist() == [0.0] * (len(full.lengths_B) - 7)
    assert loss_of(full, config)[0] == pytest.approx(loss_of(batch, config)[0])


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("size", [4, 2])
def test_ranks_share_any_number_of_sequences_of_which_each_fills_a_bin(is_packed: bool, size: int) -> None:
    packing = block(
        "policy.sequence_packing", enabled=is_packed, train_mb_tokens=8, algorithm="modified_first_fit_decreasing"
    )
    cfg = block("policy", sequence_packing=packing, train_micro_batch_size=1, make_sequence_length_divisible_by=8)
    for part in optimizer_batches(trained(settings(), GROUP)[0], size, num_shards=2):
        first, second = divide(part, cfg, num_shards=2, training=True)
        assert len(first.microbatches) == len(second.microbatches)
        assert sorted(first.rows + second.rows) == list(range(len(part.lengths_B)))


def test_sequences_outlive_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "buffer.safetensors"
    write_groups(path, [GROUP], [GROUP.tokens])
    [read], [tokens] = read_groups(path)
    assert read == replace(GROUP, tokens=None)
    assert as_lists(tokens) == as_lists(GROUP.tokens)
    assert [tokens.output_text(member) for member in range(4)] == [""] * 4
