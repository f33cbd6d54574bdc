"""What vLLM makes of our engine arguments on a GPU node, as far as that can be asked without a GPU.

`resolve` runs vLLM's own argument resolution with its CUDA platform, of which only the questions to the driver are
answered here: the answers are those of a node of eight H100 GPUs.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

GPUS_PER_NODE = 8


def write_model(path: Path) -> None:
    """Write the configuration and tokenizer of a small model of the family that the stages train."""
    from transformers import NemotronHConfig

    from tools.tiny.model import build_tokenizer

    build_tokenizer().save_pretrained(path)

    config = NemotronHConfig(
        vocab_size=512,
        hidden_size=256,
        layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba"],
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=8,
        ssm_state_size=32,
        n_routed_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128,
        intermediate_size=256,
        max_position_embeddings=262144,
    )
    config.architectures = ["NemotronHForCausalLM"]
    config.save_pretrained(path)


def resolve(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM decides for these engine arguments; raises what vLLM raises."""
    _use_cuda_platform()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.abstract import Executor

    config = AsyncEngineArgs(**arguments).create_engine_config()
    parallel = config.parallel_config
    return {
        "executor": Executor.get_class(config).__name__,
        "world_size": parallel.world_size,
        "worker": parallel.worker_cls,
        "expert_parallel": parallel.enable_expert_parallel,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "logprobs_mode": config.model_config.logprobs_mode,
        "weight_transfer": config.weight_transfer_config.backend,
        "dtype": str(config.model_config.dtype),
    }


def _use_cuda_platform() -> None:
    if "vllm.platforms.cuda" in sys.modules:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # the GPU build's kernels
    # While the platform is the CPU's: a CUDA build has more to import.
    import vllm.model_executor.models.nemotron_h  # noqa: F401
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Node(NonNvmlCudaPlatform):  # type: ignore[misc]
        """A node of eight H100 GPUs."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major=9, minor=0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return GPUS_PER_NODE

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def import_kernels(cls) -> None:
            pass

    vllm.platforms._current_platform = Node()
