"""How an engine of a stage takes a push at full size: vLLM's own class on torch's meta device, without memory.

One rank of an engine is built with the stage's arguments in a world of its tensor-parallel size whose groups send
nothing, and the drafter where the stage guesses tokens by the model's own heads. Every tensor of a push is given to
vLLM's loaders, which refuse a wrong name or shape. What only a CPU build refuses of the arguments is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.config.tree import GenerationConfig
from recipes.generation.engine_args import CPU_ENV, ENV, OWN_HEADS
from tools.sizing.built import BuiltEngine, Tensors

_KEPT = ("mamba_ssm_cache_dtype", "mamba_cache_mode", "speculative_config", "max_num_seqs", "max_num_batched_tokens")


def load(cfg: GenerationConfig, model: Path, tensors: Tensors) -> BuiltEngine:
    """Build a rank, and give it every tensor; for a process of its own, in which vLLM is not imported yet."""
    os.environ.update({**ENV, **CPU_ENV})
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from recipes.generation import cpu_hybrid

    cpu_hybrid.install()
    began, vllm_cfg, speculation = time.monotonic(), cfg.vllm_cfg, cfg.vllm_kwargs.get("speculative_config")
    config: Any = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=vllm_cfg.precision,
        enforce_eager=True,
        load_format="dummy",
        max_model_len=vllm_cfg.max_model_len,
        kv_cache_memory_bytes=64 << 20,
        **{key: value for key, value in cfg.vllm_kwargs.items() if key in _KEPT},
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = vllm_cfg.tensor_parallel_size
    config.parallel_config.enable_expert_parallel = vllm_cfg.expert_parallel_size > 1
    weights = [(name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")) for name, dtype, shape in tensors]
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with _one_rank(vllm_cfg.tensor_parallel_size, config), torch.device("meta"), dtype:
        models = [initialize_model(config)]
        if speculation and speculation.get("method") in OWN_HEADS:
            draft = config.speculative_config.draft_model_config
            models.append(initialize_model(replace(config, model_config=draft), model_config=draft, prefix="drafter"))
        differences = [one for model in models for one in _refused(model, weights)]
    return BuiltEngine(
        num_bytes=sum(param.numel() * param.element_size() for param in models[0].parameters()),
        num_loaded=len(weights),
        has_drafter=len(models) > 1,
        differences=tuple(differences),
        seconds=time.monotonic() - began,
    )


@contextmanager
def _one_rank(world_size: int, config: Any) -> Iterator[None]:
    """Be the first rank of an engine of that many; its groups send nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    make_group = dist.new_group
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    parallel_state.in_the_same_node_as = lambda *args, **given: [True] * world_size
    MessageQueue.create_from_process_group = lambda *args, **given: None
    dist.new_group = lambda *args, **given: make_group(*args, **{**given, "backend": "fake"})
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with set_current_vllm_config(config):
        init_distributed_environment(world_size, 0, "env://", 0, "fake")
        initialize_model_parallel(world_size, 1, backend="fake")
        yield


def _refused(model: Any, weights: Sequence[tuple[str, Any]]) -> list[str]:
    """Load all tensors, and return what vLLM refuses and what stays without a value."""
    try:
        loaded = model.load_weights(iter(weights))
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        return [f"{type(model).__name__} refuses the push: {error!r}"]
    own = {name for name, _ in model.named_parameters()}
    return [f"{name}: no tensor of the push is for this parameter of the engine" for name in sorted(own - loaded)]
