"""Every object that only a CUDA run builds can be built: wrong arguments show here and not in the first step there.

The tests themselves import vLLM: it takes seconds, which every process that collects this file would pay.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from recipes.config.load import load_config, require_valid
from recipes.config.tree import PolicyConfig
from recipes.generation.generation import nccl_init, nccl_update
from recipes.policy.families.transformer import Qwen3
from recipes.policy.model import transformer_config
from recipes.policy.optimizer import ddp_config, optimizer_config
from recipes.policy.weights import make_layout
from recipes.types import PUSH_BUCKET_BYTES

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHAPES = [("a", torch.bfloat16, (3, 5)), ("b", torch.float32, (2,))]


@pytest.fixture(scope="module")
def cfg() -> PolicyConfig:
    """The published values, but for what Megatron refuses to describe without Transformer Engine."""
    values = {
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "attention_backend": "local",
        "apply_rope_fusion": "false",
        "optimizer.use_precision_aware_optimizer": "false",
    }
    overrides = ["policy.model_name=any", *(f"policy.megatron_cfg.{key}={value}" for key, value in values.items())]
    return require_valid(load_config(CONFIGS / "grpo_base.yaml", overrides)).policy


def test_policy_and_engines_join_one_nccl_group() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    nccl_id = bytes(range(128))
    engines = [
        NCCLWeightTransferInitInfo(**nccl_init(nccl_id, engine=e, num_engines=2, ranks_per_engine=4)) for e in range(2)
    ]
    sender = inspect.signature(packed_nccl_broadcast_producer).parameters
    for engine in engines:
        assert (engine.nccl_unique_id_bytes, engine.world_size, engine.packed) == (nccl_id, 9, True)
        assert engine.packed_buffer_size_bytes == PUSH_BUCKET_BYTES
        assert engine.packed_num_buffers == sender["num_buffers"].default
    assert [engine.rank_offset for engine in engines] == [1, 5]


def test_a_push_can_be_announced() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    update = NCCLWeightTransferUpdateInfo(**nccl_update(make_layout(SHAPES, path="")))
    assert update.dtype_names == ["bfloat16", "float32"]


def test_vllm_takes_the_arguments_that_the_sender_gives() -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary, ncclUniqueId
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    inspect.signature(uid_init_process_group).bind(bytes(128), rank=0, world_size=2, device=0)
    inspect.signature(NCCLLibrary.ncclGetUniqueId).bind(None)
    assert len(bytes(ncclUniqueId().internal)) == NCCL_UNIQUE_ID_BYTES
    inspect.signature(packed_nccl_broadcast_producer).bind(
        iterator=iter(()), group=None, src=0, post_iter_func=lambda item: item[1], buffer_size_bytes=PUSH_BUCKET_BYTES
    )


def test_megatron_takes_a_bfloat16_layout(cfg: PolicyConfig) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    hf = AutoConfig.for_model("qwen3", **sizes, head_dim=16)
    config = transformer_config(Qwen3(), hf, cfg)
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)
    assert config.sequence_parallel and config.recompute_granularity == "full"


def test_megatron_takes_the_gradient_reduction(cfg: PolicyConfig) -> None:
    config: Any = ddp_config(cfg.megatron_cfg)
    assert config.use_distributed_optimizer
    assert not config.average_in_collective


def test_megatron_takes_the_optimizer(cfg: PolicyConfig) -> None:
    config = optimizer_config(cfg)
    assert config.bf16 and config.use_distributed_optimizer
    assert config.params_dtype == torch.bfloat16
    assert config.overlap_param_gather == ddp_config(cfg.megatron_cfg).overlap_param_gather
