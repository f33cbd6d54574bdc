"""What multi-token heads read and predict: later tokens of the same row, and only those that stay in the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import load_config, require_valid
from recipes.errors import ConfigError
from recipes.policy.heads import head_targets, train_heads
from recipes.policy.microbatch import pack_microbatch


def test_heads_look_ahead_within_a_row() -> None:
    ids = [np.array([1, 2, 3, 4], np.int32), np.array([5, 6], np.int32)]
    masks = [np.array([0, 0, 1, 1], np.float32), np.array([0, 1], np.float32)]
    packed = pack_microbatch(ids, [0, 1], multiple=1, row_multiple=4, where=torch.device("cpu"))
    targets = head_targets(packed, ids, masks, num_heads=4)
    assert targets.tokens_KT.tolist() == [
        [2, 3, 4, 0, 6, 0, 0, 0],
        [3, 4, 0, 0, 0, 0, 0, 0],
        [4, 0, 0, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert targets.labels_KT[0].tolist() == targets.tokens_KT[1].tolist()
    assert targets.mask_KT.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert targets.count.item() == 3


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
