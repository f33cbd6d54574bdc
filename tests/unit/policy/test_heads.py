"""What multi-token heads read and predict: later tokens of the same row, and only those that stay in the loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_batch import batch_of, random_rollouts

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import load_config, require_valid
from recipes.errors import ConfigError
from recipes.grpo.loss import grpo_loss
from recipes.policy.heads import head_targets, train_heads
from recipes.policy.microbatch import pack_microbatch
from recipes.policy.shards import BatchShard
from recipes.policy.step import _head_targets as head_targets_of
from recipes.policy.step import loss_inputs
from tests.groups import LocalStore

CPU = torch.device("cpu")
ROLLOUTS = random_rollouts(2, seed=1, vocab=12)


def test_heads_look_ahead_within_a_row() -> None:
    ids = [np.array([1, 2, 3, 4], np.int32), np.array([5, 6], np.int32)]
    masks = [np.array([0, 0, 1, 1], np.float32), np.array([0, 1], np.float32)]
    packed = pack_microbatch(ids, [0, 1], multiple=1, row_multiple=4, where=torch.device("cpu"))
    targets = head_targets(packed, ids, masks, torch.ones(2), num_heads=4)
    assert targets.tokens_KT.tolist() == [
        [2, 3, 4, 0, 6, 0, 0, 0],
        [3, 4, 0, 0, 0, 0, 0, 0],
        [4, 0, 0, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert targets.labels_KT[0].tolist() == targets.tokens_KT[1].tolist()
    assert targets.mask_KT.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert targets.count.item() == 3


def test_heads_learn_from_no_row_that_the_loss_has_taken_out() -> None:
    """In the second row policy and engine disagree, so that the loss masks it."""
    store = LocalStore()
    shard = BatchShard(batch=batch_of(ROLLOUTS, store, size=2, seed=1), microbatches=((1, 0),)).fetched(store)
    shard = replace(shard, batch=replace(shard.batch, sample_mask_B=torch.ones(2)))
    rows = [shard.row(row) for row in (1, 0)]
    packed = pack_microbatch([row.token_ids for row in rows], (1, 0), multiple=4, row_multiple=1, where=CPU)
    logprobs_T = torch.zeros(packed.tokens_1T.shape[1])
    for start, row, gap in zip(packed.starts, rows, (5.0, 0.0), strict=True):
        logprobs_T[start : start + len(row.token_ids) - 1] = torch.tensor(row.logprobs()[1:]) - gap
    inputs, current_BT = loss_inputs(shard, packed, logprobs_T[None])
    config = require_valid(load_config(CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"))
    sums = grpo_loss(current_BT, inputs, cfg=config.loss_fn, mismatch_threshold=2.0)
    assert sums.sample_mask_B.tolist() == [0.0, 1.0]
    targets = head_targets_of(shard, packed, sums, num_heads=2)
    first = packed.starts[1]
    assert targets.mask_KT[:, :first].tolist() == [[0.0] * first] * 2
    assert targets.mask_KT[0].sum() > 0
    assert targets.count == rows[1].token_mask()[1:].sum() == sums.count


def test_heads_of_a_model_without_any_are_not_trained() -> None:
    config = require_valid(load_config(CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"))
    trunk: Any = SimpleNamespace(post_process=True)
    assert train_heads(None, trunk, trunk, config.policy) is None
    asked = require_valid(
        load_config(CONFIG_DIR / "tiny" / "stage1_rlvr.yaml", ["policy.megatron_cfg.mtp_num_layers=5"])
    )
    with pytest.raises(ConfigError, match=r"mtp_num_layers: .* has no multi-token heads to train"):
        train_heads(None, trunk, trunk, asked.policy)
    trunk.post_process = False  # another pipeline stage has them
    assert train_heads(None, trunk, trunk, asked.policy) is None
