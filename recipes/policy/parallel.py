"""Process groups: rendezvous over a store whose port is bound and held, gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from recipes.cluster.ports import PORT_TABLE, hold_in_range
from recipes.policy.families import gather
from recipes.policy.layout import Coordinates

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig

(_PORTS,) = [ports for ports in PORT_TABLE if ports.name.startswith("torch rendezvous")]


def device() -> torch.device:
    """Return the device this process computes on; without CUDA torch's default, which may be its meta device."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.get_default_device()
    )


def finish_queued_work() -> None:
    """Wait until the device has run everything that this process has queued, on all streams."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_unused_memory() -> None:
    """Give device memory that torch keeps for later back to the device; on a CPU there is none to give."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def hold_port(host: str) -> socket.socket:
    """Hold a free port of the range that policy ranks meet in, on this address of the machine alone."""
    return hold_in_range(_PORTS.low, _PORTS.high, host=host)


def open_store(host: str, *, timeout_s: float) -> TCPStore:
    """Open a store on a port of the run's own range, bound and kept: nobody can take it before it is used."""
    held = hold_port(host)
    port = held.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=held.detach(),
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the store that rank 0 holds."""
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def gather_parts(own: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Return the rows of all ranks one after the other, `sizes[r]` of rank r; gloo itself gathers equal parts only."""
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def scatter_parts(rows: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Return this rank's rows of the sum over all ranks; the inverse of `gather_parts` for gradients."""
    total = rows.contiguous().clone()
    dist.all_reduce(total, group=group)
    first = sum(sizes[: group.rank()])
    return total[first : first + sizes[group.rank()]].clone()


def let_gloo_take_unequal_parts() -> None:
    """Replace Megatron's two collectives of parts of given sizes, which it uses where ranks share an expert."""
    gather_equal, scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if getattr(gather_equal, "takes_unequal_parts", False):
        return

    def gather(own: Tensor, group: dist.ProcessGroup, sizes: Any = None, use_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather_equal(own, group, sizes, use_buffer)  # type: ignore[no-any-return]
        return gather_parts(own, group, [int(size) for size in sizes])

    def scatter(rows: Tensor, group: dist.ProcessGroup, sizes: Any = None, use_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return scatter_equal(rows, group, sizes, use_buffer)  # type: ignore[no-any-return]
        return scatter_parts(rows, group, [int(size) for size in sizes])

    gather.takes_unequal_parts = True  # type: ignore[attr-defined]
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def divide_world(cfg: MegatronConfig, *, seed: int, **options: Any) -> None:
    """Make the model-parallel groups of the ranks that have met, and seed the generators; `options` are Megatron's."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        context_parallel_size=cfg.context_parallel_size,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        expert_tensor_parallel_size=cfg.expert_tensor_parallel_size,
        **options,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def join_groups(
    store: Store, *, rank: int, world_size: int, cfg: MegatronConfig, seed: int, timeout_s: float
) -> Coordinates:
    """Join the world and the model-parallel groups, and seed the generators.

    In each group a rank waits `timeout_s` for the others at most.
    """
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(0)  # Ray shows each worker only its own device
    dist.init_process_group(
        "nccl" if use_cuda else "gloo",
        store=PrefixStore("policy", store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    # A group's own limit is else 30 minutes, after which NCCL ends each process that still waits.
    divide_world(cfg, seed=seed, distributed_timeout_minutes=timeout_s / 60)
    if not use_cuda:
        let_gloo_take_unequal_parts()
    return Coordinates(
        data=parallel_state.get_data_parallel_rank(),
        is_output=parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
        exports=gather.takes_part(),
    )
