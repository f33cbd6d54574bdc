"""The Ray actor of one policy rank: unpacks a call, runs the trainer, packs the answer.

torch and Megatron are imported in `start`: the driver imports this module without them, and an actor that dies while
importing them can already be named, because it has told its node and pid.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipes.cluster.ports import interface_of
from recipes.cluster.token_store import RayTokenStore
from recipes.errors import RunError
from recipes.files import FileSum, readable_sha256
from recipes.imports import without_gc
from recipes.types import LossFunction, ReferenceUse, WeightLayout

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch._C._distributed_c10d import TCPStore

    from recipes.config.tree import PolicyConfig
    from recipes.policy.layout import Coordinates
    from recipes.policy.saving import BackgroundSave
    from recipes.policy.shards import BatchShard, Measured
    from recipes.policy.weights import NcclSender, SharedMemoryWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What names a worker in an error."""

    node_id: str
    node_ip: str
    pid: int
    num_cores: int  # that the process may run on


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every rank is started with."""

    policy_cfg: PolicyConfig
    loss: LossFunction
    reference: ReferenceUse | None  # keep the start weights, as those of the reference policy
    world_size: int
    seed: int
    collective_timeout_s: float  # how long one rank waits for the others
    driver_pid: int
    is_one_node: bool
    num_threads: int  # of torch on the CPU


class PolicyWorker:
    """One rank of the policy."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # what they lack without a GPU
        logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # not used
        self._store: TCPStore | None = None
        self._sink: SharedMemoryWriter | NcclSender | None = None
        self._saving: BackgroundSave | None = None
        self._fetched: list[BatchShard] = []
        self._is_verified = False  # whether a push computes checksums
        self._sent: dict[str, torch.Tensor] = {}  # those of the last push

    def identity(self) -> WorkerIdentity:
        """Tell where this process runs."""
        context = ray.get_runtime_context()
        return WorkerIdentity(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            num_cores=len(os.sched_getaffinity(0)),
        )

    def open_store(self, host: str, timeout_s: float) -> int:
        """Open the store that all ranks meet at (rank 0 only); returns its port."""
        with without_gc():
            from recipes.policy import parallel

        self._store = parallel.open_store(host, timeout_s=timeout_s)
        return int(self._store.port)

    def start(self, spec: WorkerSpec, host: str, port: int) -> Coordinates:
        """Join the other ranks, build the model and load its weights."""
        with without_gc():
            import torch

            from recipes.policy import hf, parallel, step
            from recipes.policy.host_copies import HostCopies

        torch.set_num_threads(spec.num_threads)
        # A checkpoint also holds memory that nothing writes, between the optimizer's buffers: torch then fills it.
        torch.use_deterministic_algorithms(spec.policy_cfg.determinism == "full")
        # Else gloo offers the other ranks what the host's name means here, which may be a loopback address.
        if spec.is_one_node:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        elif (interface := interface_of(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self._store is None:
            self._store = parallel.connect_store(host, port, timeout_s=spec.collective_timeout_s)
        coordinates = parallel.join_groups(
            self._store,
            rank=self._rank,
            world_size=spec.world_size,
            cfg=spec.policy_cfg.megatron_cfg,
            seed=spec.seed,
            timeout_s=spec.collective_timeout_s,
        )
        self._spec = spec
        self._coordinates = coordinates
        self._trainer = step.build_trainer(spec.policy_cfg, spec.loss, reference=spec.reference)
        self._side_files = hf.side_files(spec.policy_cfg) if self._rank == 0 else {}  # of all exports, which it writes
        self._copies = HostCopies()  # the memory of all saves
        return coordinates

    def fetch(self, parts: Sequence[ray.ObjectRef[BatchShard]]) -> None:
        """Bring the parts of a batch here, before any rank trains; raises `TokensLostError` when tokens are lost."""
        shards: list[BatchShard] = ray.get(list(parts))
        self._fetched = [shard.fetched(RayTokenStore()) for shard in shards]

    def train(self) -> dict[str, Measured]:
        """Take one optimizer step per part of the batch that was fetched; returns this rank's share of the metrics."""
        from recipes.policy.step import train_steps

        shards, self._fetched = self._fetched, []
        return train_steps(self._trainer, shards)

    def logprobs(self, shard: BatchShard) -> torch.Tensor | None:
        """Return the log-probabilities of the shard's rows end to end; None where another rank answers."""
        import torch

        from recipes.policy import step

        result = step.logprobs(self._trainer, shard.fetched(RayTokenStore()))
        return torch.cat(result) if self._coordinates.is_output else None

    def weight_layout(self) -> WeightLayout | None:
        """Lay out the full weights (rank 0 only); without CUDA, also make the shared-memory file for them."""
        import torch

        from recipes.policy import weights

        if self._rank != 0:
            return None
        shapes = self._trainer.pushed_shapes()
        if torch.cuda.is_available():
            self._layout = weights.make_layout(shapes, path="")
        else:
            self._sink = weights.SharedMemoryWriter(shapes, driver_pid=self._spec.driver_pid)
            self._layout = self._sink.layout
        self._is_verified = self._spec.policy_cfg.generation.verify_weight_pushes
        self._layout = replace(self._layout, is_verified=self._is_verified)
        return self._layout

    def make_nccl_id(self) -> bytes | None:
        """Return a new NCCL id, by which the engines find this process (rank 0 only)."""
        from recipes.policy import weights

        return weights.make_nccl_id() if self._rank == 0 else None

    def connect_engines(self, nccl_id: bytes, num_engine_ranks: int, timeout_s: float) -> None:
        """Join the engines' NCCL group as its rank 0 (rank 0 only); returns when all engine ranks have joined.

        Ends with an `EngineError` after `timeout_s`, or when this call is cancelled.
        """
        from recipes.policy import weights

        if self._rank == 0:
            if self._sink is not None:  # else each engine that is started again leaves a communicator behind
                self._sink.close()
            self._sink = weights.NcclSender(
                self._layout,
                nccl_id=nccl_id,
                world_size=1 + num_engine_ranks,
                timeout_s=timeout_s,
                is_cancelled=ray.get_runtime_context().is_canceled,
            )

    def send_weights(self, num_before: int, timeout_s: float) -> None:
        """Gather each full tensor; rank 0 writes it to the shared-memory file, or broadcasts it.

        Earlier pushes have sent `num_before` tensors. A broadcast ends with an `EngineError` after `timeout_s`, or when
        this call is cancelled.
        """
        from recipes.policy.weights import SharedMemoryWriter

        if not self._coordinates.exports:
            return  # other ranks have the same weights
        exported = self._trainer.pushed()
        if self._rank == 0:
            assert self._sink is not None, "weight_layout or connect_engines comes first"
            if self._is_verified:
                exported = self._noted(exported)
            if isinstance(self._sink, SharedMemoryWriter):
                self._sink.write(exported, num_before=num_before)
            else:
                is_cancelled = ray.get_runtime_context().is_canceled
                self._sink.write(exported, timeout_s=timeout_s, is_cancelled=is_cancelled)
        else:
            for _ in exported:
                pass

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on and keep their checksums."""
        from recipes.checksums import checksum

        self._sent = {}
        for name, tensor in weights:
            self._sent[name] = checksum(tensor)
            yield name, tensor

    def sent_checksums(self) -> dict[str, int]:
        """Return the checksum of each tensor of the last push (rank 0 only)."""
        return {name: int(value) for name, value in self._sent.items()}

    def weight_content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return what `send_weights` has written to the shared-memory file (rank 0 only)."""
        from recipes.policy import weights

        assert isinstance(self._sink, weights.SharedMemoryWriter), "with CUDA there is no file"
        return self._sink.content()

    def begin_save(self, path: Path, export_path: Path | None, with_optimizer: bool, writers: Sequence[int]) -> None:
        """Copy the state into memory and begin to write it as a distributed checkpoint, and as an export if asked.

        `writers` are the ranks that write an export.
        """
        from recipes.policy import saving

        if self._saving is not None:
            self._saving.wait()  # of a save that was given up, since another rank could not write
        export, copies = None, self._copies
        if export_path is not None and self._coordinates.exports:
            export = saving.export_copy(self._trainer, export_path, copies, self._side_files, writers)
        self._saving = saving.BackgroundSave(self._trainer, path, export, copies, with_optimizer=with_optimizer)

    def expected_save_seconds(self, directory: Path, with_optimizer: bool, writers: Sequence[int]) -> float:
        """Try how fast `directory` takes what this rank saves; raises `RunError` when it takes nothing."""
        from recipes.policy import saving

        try:
            return saving.expected_seconds(self._trainer, directory, writers, with_optimizer=with_optimizer)
        except OSError as error:
            raise RunError(f"policy rank {self._rank} cannot write to {directory}: {error!r}") from error

    def is_save_written(self) -> bool:
        """Whether this rank has written all of the save in progress; raises `RunError` when it could not.

        The policy itself is as good as before then, so that is no `PolicyError`: the run may save again.
        """
        assert self._saving is not None, "begin_save comes first"
        try:
            return self._saving.is_written()
        except Exception as error:
            raise RunError(f"policy rank {self._rank} could not write its part of a checkpoint: {error!r}") from error

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        """Complete the save that all ranks have written.

        Returns the seconds for which this one has written, and the sums of its large files.
        """
        assert self._saving is not None, "begin_save comes first"
        saving, self._saving = self._saving, None
        saving.finish()
        return saving.seconds, saving.sums

    def sha256s(self, files: Sequence[Path]) -> list[str | None]:
        """Read files and return their hex digests, None for one that cannot be read."""
        return [readable_sha256(file) for file in files]

    def load(self, path: Path) -> None:
        """Restore a distributed checkpoint."""
        from recipes.policy import checkpoint

        checkpoint.load(self._trainer, path)

    def export_hf(self, path: Path, writers: Sequence[int]) -> None:
        """Write this rank's part of a Hugging Face directory, where it is one of `writers`."""
        from recipes.policy import saving
        from recipes.policy.host_copies import HostCopies

        if self._coordinates.exports:
            saving.export_copy(self._trainer, path, HostCopies(), self._side_files, writers)()

    def close(self) -> None:
        """Remove the shared-memory file, or leave the engines' group."""
        if self._sink is not None:
            self._sink.close()
