"""Experts that come in blocks reach the same bits as one by one, by vLLM's layerwise reload: what a push does on GPUs.

Every rank of a real engine of two loads both ways: where each has whole experts, and where each has a part of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_engine
from nccl_push import BLOCK, MARK
from speed import patiently

from recipes.generation.engine_args import CPU_ENV, ENV

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

HERE = Path(__file__).resolve().parent
MATRICES, EXPERTS, VECTORS = 4, 8, 6  # of the hybrid model: up and down in two layers; A_log, D, dt_bias in two


@pytest.mark.parametrize("is_expert_parallel", [True, False], ids=["whole experts", "parts of all experts"])
def test_blocks_of_experts_reach_the_same_bits_as_experts_one_by_one(is_expert_parallel: bool, tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_engine.build_latent(tmp_path / str(seed), seed=seed)
    argv = [str(HERE / "block_ranks.py"), str(tmp_path / "0"), str(tmp_path / "1"), str(is_expert_parallel)]
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **ENV, **CPU_ENV, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=patiently(180))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    num_blocks = MATRICES * EXPERTS // BLOCK
    num_kept = num_blocks // 2 if is_expert_parallel else num_blocks
    for rank in found:
        assert rank["wrong"] == [], "the reload of blocks differs from that of single experts"
        assert rank["changed"] == rank["experts"] == MATRICES, "the second model must show"
        assert rank["exact"] == rank["vectors"] == VECTORS
        counts = rank["blocks"], rank["stacks"], rank["dropped"]
        assert counts == (num_blocks, num_kept, num_blocks - num_kept), "no block is loaded one by one"
    assert len(found) == 2
