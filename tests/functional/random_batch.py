"""Random ragged batches for the tests of the policy, and the same rows padded; needs no Megatron and no Ray."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from recipes.grpo.batch import build_batch
from recipes.routes import pack
from recipes.tokens import TokenStore, store_rollouts
from recipes.types import Group, LossInputs, PromptRef, Rollout, RolloutStatus, TrainBatch, Turn

FLAG_ADVANTAGES = (None, -2.0, None, -2.0)


def random_rollouts(num_rows: int, *, seed: int = 1, width: int = 40, vocab: int = 96) -> list[Rollout]:
    """Return rollouts of one to four turns, some of them flagged; the fourth rollout failed before its first token."""
    draw = random.Random(seed)
    rollouts = []
    for row in range(num_rows):
        turns = []
        left = draw.randint(5, width)
        while left >= 4 and len(turns) < 4 and row != 3:
            prompt, sampled = draw.randint(1, left // 2), draw.randint(1, left // 2)
            turns.append(
                Turn(
                    prompt_token_ids=tuple(draw.randrange(vocab) for _ in range(prompt)),
                    token_ids=tuple(draw.randrange(vocab) for _ in range(sampled)),
                    logprobs=tuple(-6 * draw.random() for _ in range(sampled)),
                    versions=(),
                    finish_reason="stop",
                    is_invalid_tool_call=draw.random() < 0.2,
                )
            )
            left -= prompt + sampled
        status, reward = (RolloutStatus.COMPLETED, draw.random()) if turns else (RolloutStatus.ENV_FAILED, None)
        rollouts.append(Rollout(turns=tuple(turns), status=status, reason="", reward=reward))
    return rollouts


def with_random_routes(rollouts: Sequence[Rollout], *, layers: Sequence[int] = (3, 6)) -> list[Rollout]:
    """Return them with three of eight experts for each token but some, in layers with these numbers, from 1."""
    draw = np.random.default_rng(2)
    result = []
    for rollout in rollouts:
        turns, begin, end = [], 0, 0
        for turn in rollout.turns:
            end += len(turn.prompt_token_ids) + len(turn.token_ids)
            chosen_TDK = np.zeros((end - 1 - begin, max(layers), 3), np.uint8)
            for layer in layers:
                chosen_TDK[:, layer - 1] = draw.random((end - 1 - begin, 8)).argsort(axis=1)[:, :3]
            turns.append(replace(turn, routes=pack(chosen_TDK[begin % 2 :], begin + begin % 2)))
            begin = end - 1
        result.append(replace(rollout, turns=tuple(turns)))
    return result


def full_rollouts(num_rows: int, *, width: int, vocab: int) -> list[Rollout]:
    """Return rollouts of `width` tokens each, the first quarter of them the prompt."""
    draw = random.Random(0)
    rollouts = []
    for _ in range(num_rows):
        ids = tuple(draw.randrange(vocab) for _ in range(width))
        sampled = width - width // 4
        turn = Turn(
            prompt_token_ids=ids[: width // 4],
            token_ids=ids[width // 4 :],
            logprobs=tuple(-6 * draw.random() for _ in range(sampled)),
            versions=(),
            finish_reason="stop",
        )
        rollouts.append(Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="", reward=draw.random()))
    return rollouts


def batch_of(rollouts: Sequence[Rollout], store: TokenStore, *, size: int = 2, seed: int = 1) -> TrainBatch:
    """Return groups of `size` rollouts as a batch with random advantages; the row in the middle is masked out."""
    groups = []
    for first in range(0, len(rollouts), size):
        headers, tokens = store_rollouts(rollouts[first : first + size], store)
        prompt = PromptRef(epoch=0, row_index=first, prompt_id="")
        values: dict[str, Any] = {"agent": "a", "prompt_text": "", "target_step": 0, "version": 0}
        groups.append(Group(prompt=prompt, rollouts=headers, tokens=tokens, **values))
    rewards_B = torch.tensor([torch.nan if r.reward is None else r.reward for r in rollouts], dtype=torch.float64)
    batch = build_batch(groups, rewards_B, overlong_filtering=False, mask_flagged=False)
    sample_mask_B = batch.sample_mask_B.clone()
    sample_mask_B[len(rollouts) // 2] = 0.0
    advantages_B = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed))
    return replace(batch, sample_mask_B=sample_mask_B, advantages_B=advantages_B, flag_advantages=FLAG_ADVANTAGES)


def random_batch(num_rows: int, store: TokenStore, *, seed: int = 1, width: int = 40, vocab: int = 96) -> TrainBatch:
    """Return random rollouts as a batch."""
    return batch_of(random_rollouts(num_rows, seed=seed, width=width, vocab=vocab), store, seed=seed)


def padded(rollouts: Sequence[Rollout], batch: TrainBatch) -> tuple[torch.Tensor, LossInputs]:
    """Return input_ids_BS and the loss's inputs for all rows at once, padded on the right, token by token."""
    rows: list[list[tuple[int, float, float, float]]] = []  # id, mask, log-probability, advantage of every token
    for rollout, own in zip(rollouts, batch.advantages_B.tolist(), strict=True):
        row = []
        for turn in rollout.turns:
            advantage = FLAG_ADVANTAGES[1] if turn.is_invalid_tool_call else own
            row += [(token, 0.0, 0.0, own) for token in turn.prompt_token_ids]
            row += [(token, 1.0, lp, advantage) for token, lp in zip(turn.token_ids, turn.logprobs, strict=True)]
        rows.append(row or [(0, 0.0, 0.0, own)])
    width = max(len(row) for row in rows)
    table_BS4 = torch.tensor([row + [(0, 0.0, 0.0, 0.0)] * (width - len(row)) for row in rows])
    ids_BS, mask_BS, logprobs_BS, advantages_BS = table_BS4.unbind(-1)
    inputs = LossInputs(
        token_mask_BT=mask_BS[:, 1:],
        sample_mask_B=batch.sample_mask_B,
        advantages_BT=advantages_BS[:, 1:],
        rewards_B=batch.rewards_B,
        prev_logprobs_BT=torch.zeros_like(mask_BS[:, 1:]),
        generation_logprobs_BT=logprobs_BS[:, 1:],
    )
    return ids_BS.long(), inputs
