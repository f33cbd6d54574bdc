"""The driver's handle on all policy ranks: batches in, metrics and log-probabilities out. Blocking; no Megatron here.

A batch has one value per row. Its tokens lie in the object store, and every rank fetches those of its own rows.

Every call has a deadline. When a rank dies, raises or is late, the call ends with a `PolicyError` that names it, at
once for the first two: the other ranks may be waiting for it in a collective and are not waited for. While they come
up it is a `BringUpError` where ranks fail on some of their nodes only, so that the next start leaves these out.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from recipes.cluster.token_store import room_for
from recipes.errors import BringUpError, PolicyError, RecipeError, RunError
from recipes.files import FileSum
from recipes.policy import shards
from recipes.policy.layout import Coordinates, check_layout
from recipes.policy.worker import PolicyWorker, WorkerIdentity, WorkerSpec
from recipes.types import LossFunction, ReferenceUse, TrainBatch, WeightLayout

if TYPE_CHECKING:
    from recipes.config.tree import DeadlinesConfig, PolicyConfig

logger = logging.getLogger(__name__)

# Idle OpenMP threads sleep: the engines and verifiers beside a CPU policy need the cores between its steps. Large pages
# make the copy for a checkpoint, in new memory, four times as fast. On GPUs before Blackwell, Megatron's layers overlap
# communication with matrix products only where kernels run in the order in which they are queued.
_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# With `determinism: full`. cuBLAS, NCCL and Transformer Engine read them at their start.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
_POLL_SECONDS = 0.02  # between two looks at a save that is waited for
_BEGIN_SECONDS = 2.0  # for a call to begin: one that is cancelled before would not be made, and the others wait for it
_ANSWER_SECONDS = 10.0  # for a worker to say that the deadline it was given is over
_SETTLE_SECONDS = 10.0  # after the first failure of a start, in which ranks fail that fail for the same reason
_MOST_THREADS = 4  # of one rank: the operations of a model that trains on a CPU are too small for more


class Policy:
    """All ranks as one."""

    def __init__(self, workers: Sequence[Any], cfg: PolicyConfig, deadlines: DeadlinesConfig) -> None:
        self._workers = workers
        self._cfg = cfg
        self._deadlines = deadlines
        self._identities: Sequence[WorkerIdentity] = ()
        self._is_up = False
        self._coordinates: Sequence[Coordinates] = ()
        self._layout: WeightLayout | None = None
        self._pushing: list[Any] = []  # the ranks' calls of the last push
        self._fetched: TrainBatch | None = None  # that the ranks hold
        self.num_sent = 0  # tensors, by all calls of `send_weights`

    @classmethod
    def start(
        cls,
        policy_cfg: PolicyConfig,
        *,
        loss: LossFunction,
        placement: Sequence[dict[str, Any]],
        deadlines: DeadlinesConfig,
        seed: int,
        reference: ReferenceUse | None = None,
    ) -> Policy:
        """Start one worker per entry of `placement` (options of a Ray actor) and wait until all hold the model.

        `loss` is sent to every worker, so it must be picklable. With `reference`, every worker keeps the weights of
        `policy.model_name` in its host memory, and their log-probabilities enter the loss or the advantages.
        """
        check_layout(policy_cfg, world_size=len(placement))
        remote = ray.remote(PolicyWorker)
        env = worker_variables(policy_cfg)
        extra = {"runtime_env": {"env_vars": env}}
        workers = [remote.options(**options, **extra).remote(rank) for rank, options in enumerate(placement)]
        policy = cls(workers, policy_cfg, deadlines)
        try:
            policy._identities = policy._call("identity", deadline=deadlines.placement)
            spec = WorkerSpec(
                policy_cfg=policy_cfg,
                loss=loss,
                reference=reference,
                world_size=len(workers),
                seed=seed,
                collective_timeout_s=max(
                    deadlines.engine_start, deadlines.train, deadlines.refit, deadlines.checkpoint
                ),
                driver_pid=os.getpid(),
                is_one_node=len({identity.node_id for identity in policy._identities}) == 1,
                num_threads=int(env.get("OMP_NUM_THREADS", threads_per_rank(policy._identities))),
            )
            policy._join(spec)
            policy._is_up = True
        except BaseException:
            policy._kill()
            raise
        return policy

    def fetch(self, batch: TrainBatch) -> None:
        """Share a batch among the ranks and have each fetch its tokens; nothing is trained.

        Raises `TokensLostError` when tokens of the batch are lost.
        """
        steps = []
        for part in shards.optimizer_batches(batch, self._cfg.train_global_batch_size, num_shards=self._num_shards):
            plan = shards.divide(part, self._cfg, num_shards=self._num_shards, training=True)
            steps.append(self._per_rank(part, plan))
        per_rank = [tuple(own) for own in zip(*steps, strict=True)]
        self._call("fetch", per_rank=per_rank, deadline=self._deadlines.train)
        self._fetched = batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take the optimizer steps of a batch; returns the loss metrics, `grad_norm` and `lr`.

        One step has `policy.train_global_batch_size` rollouts. Several steps share the log-probabilities from before
        the first one. A batch that was not the last one to be fetched is fetched first.
        """
        if self._fetched is not batch:
            self.fetch(batch)
        self._fetched = None
        metrics = self._call("train", deadline=self._deadlines.train)
        return shards.merge_step_metrics(self._outputs(metrics))

    def logprobs(self, batch: TrainBatch) -> list[torch.Tensor]:
        """Return one row of log-probabilities under the current weights per row of the batch.

        Entry t belongs to token t of the row; the first is 0. For few rows: they pass through the driver.
        """
        plan = shards.divide(batch, self._cfg, num_shards=self._num_shards, training=False)
        parts = self._call("logprobs", per_rank=self._per_rank(batch, plan), deadline=self._deadlines.train)
        return shards.scatter_rows(self._outputs(parts), plan, batch.lengths_B.tolist())

    def weight_layout(self) -> WeightLayout:
        """Return where `send_weights` puts each tensor; the path is empty on CUDA, where they are broadcast."""
        if self._layout is None:
            self._layout = self._call("weight_layout", deadline=self._deadlines.refit)[0]
            assert self._layout is not None
        return self._layout

    def make_nccl_id(self) -> bytes:
        """Return a new NCCL id, by which engines join the group of `connect_engines`."""
        nccl_id: bytes = self._call("make_nccl_id", deadline=self._deadlines.refit)[0]
        return nccl_id

    def connect_engines(self, nccl_id: bytes, *, num_engine_ranks: int) -> None:
        """Form the NCCL group that `send_weights` broadcasts in on CUDA; blocks until all engine ranks have joined."""
        self._push("connect_engines", nccl_id, num_engine_ranks)

    def send_weights(self) -> None:
        """Write all full tensors to where `weight_layout` says, or broadcast them to the connected engines."""
        num_before, self.num_sent = self.num_sent, self.num_sent + len(self.weight_layout().names)
        self._push("send_weights", num_before)

    def give_up_push(self) -> None:
        """End a `connect_engines` or `send_weights` that waits for an engine that has failed; then ranks can save."""
        time.sleep(_BEGIN_SECONDS)
        for call in self._pushing[:1]:  # of rank 0; one that has ended stays as it is
            ray.cancel(call)

    def _push(self, method: str, *args: Any) -> None:
        """Call a method, which is given its deadline, on all ranks."""
        deadline = self._deadlines.refit
        self._pushing = [getattr(worker, method).remote(*args, deadline) for worker in self._workers]
        self._gather(self._pushing, deadline=deadline + _ANSWER_SECONDS, what=method)

    def sent_checksums(self) -> dict[str, int]:
        """Return the checksum of each tensor that `send_weights` has sent, by name."""
        call, deadline = self._workers[0].sent_checksums.remote(), self._deadlines.refit
        sums: dict[str, int] = self._gather([call], deadline=deadline, what="sent_checksums")[0]
        return sums

    def weight_content(self) -> Any:
        """Return a Ray reference to what `send_weights` has written, for engines that do not see the file."""
        return self._workers[0].weight_content.remote()

    def save(self, path: Path, *, with_optimizer: bool = True) -> None:
        """Write model, optimizer, schedule and random generators into `path`, which is made.

        What is saved without the optimizer is much smaller and loads under any layout, but training does not go on
        exactly from it.

        Any number of data-parallel ranks can load it; see `policy/checkpoint.py` for other layouts.
        """
        self.begin_save(path, with_optimizer=with_optimizer)
        end = time.monotonic() + self._deadlines.checkpoint
        while not self.is_save_written():
            if time.monotonic() > end:
                raise PolicyError(f"policy: {path} not written within {self._deadlines.checkpoint:g} s")
            time.sleep(_POLL_SECONDS)
        self.finish_save()

    def begin_save(self, path: Path, export_path: Path | None = None, *, with_optimizer: bool = True) -> None:
        """Begin what `save` does, and what `export_hf` does, and return once the state is copied into memory.

        Training may go on. Only one save may be in progress.
        """
        path.mkdir(parents=True, exist_ok=True)
        args = path, export_path, with_optimizer, self._export_writers
        self._call("begin_save", *args, deadline=self._deadlines.checkpoint)

    def expected_save_seconds(self, directory: Path, *, with_optimizer: bool = True) -> float:
        """Return how long the slowest rank will write in a save, export included, from bytes and a try in `directory`.

        Raises `RunError` when a rank cannot write there.
        """
        args = directory, with_optimizer, self._export_writers
        return float(max(self._call("expected_save_seconds", *args, deadline=self._deadlines.checkpoint)))

    def is_save_written(self) -> bool:
        """Whether all ranks have written their copies; raises `RunError` when one could not."""
        return all(self._call("is_save_written", deadline=self._deadlines.checkpoint))

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        """Complete the checkpoint, once all ranks have written: rank 0 writes a few small files.

        Returns the seconds for which the slowest rank has written, and the sums of the large files of all.
        """
        found = self._call("finish_save", deadline=self._deadlines.checkpoint)
        sums = {path: one for _, own in found for path, one in own.items()}
        return max(seconds for seconds, _ in found), sums

    def sha256s(self, files: Sequence[Path]) -> list[str | None]:
        """Return the hex digest of each file, None where it cannot be read: all ranks read at once, a part each."""
        num_ranks = len(self._workers)
        parts = [files[rank::num_ranks] for rank in range(num_ranks)]
        found = self._call("sha256s", per_rank=parts, deadline=self._deadlines.checkpoint)
        return [found[number % num_ranks][number // num_ranks] for number in range(len(files))]

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; raises `CheckpointError` when this layout cannot read it."""
        self._call("load", path, deadline=self._deadlines.checkpoint)

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face directory with configuration, tokenizer and weights."""
        self._call("export_hf", path, self._export_writers, deadline=self._deadlines.checkpoint)

    def pids(self) -> list[int]:
        """Return the process id of every rank."""
        return [identity.pid for identity in self._identities]

    def shutdown(self) -> None:
        """Stop all workers and remove the shared-memory file, also when some are dead already."""
        calls = [worker.close.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        self._kill()
        if self._layout is not None and self._layout.path:
            Path(self._layout.path).unlink(missing_ok=True)  # left when rank 0 could not

    @property
    def _export_writers(self) -> list[int]:
        """The ranks of one replica, which gather the full weights."""
        return [rank for rank, coordinates in enumerate(self._coordinates) if coordinates.exports]

    @property
    def _num_shards(self) -> int:
        return 1 + max(coordinates.data for coordinates in self._coordinates)

    def _join(self, spec: WorkerSpec) -> None:
        """Bring the ranks together and build the model on each."""
        host = self._identities[0].node_ip
        started = time.monotonic()
        store = self._workers[0].open_store.remote(host, spec.collective_timeout_s)
        port = self._gather([store], deadline=self._deadlines.engine_start)[0]
        self._coordinates = self._call("start", spec, host, port, deadline=self._deadlines.engine_start)
        logger.info("policy: %d ranks ready after %.1f s", len(self._workers), time.monotonic() - started)

    def _per_rank(self, batch: TrainBatch, plan: Sequence[Any]) -> list[Any]:
        """Put each data-parallel shard into the object store once, and give every rank its own."""
        with room_for("the shards of a batch"):
            stored = [ray.put(shard) for shard in shards.split(batch, plan)]
        return [stored[coordinates.data] for coordinates in self._coordinates]

    def _outputs(self, results: Sequence[Any]) -> list[Any]:
        """Pick one result per data-parallel rank, in the order of these ranks."""
        pairs = zip(self._coordinates, results, strict=True)
        owners = {coordinates.data: result for coordinates, result in pairs if coordinates.is_output}
        return [owners[data] for data in range(self._num_shards)]

    def _call(self, method: str, *args: Any, per_rank: Sequence[Any] | None = None, deadline: float) -> list[Any]:
        """Call a method on all ranks, with the same arguments or with one of `per_rank` each."""
        calls = []
        for rank, worker in enumerate(self._workers):
            own = args if per_rank is None else (per_rank[rank],)
            calls.append(getattr(worker, method).remote(*own))
        return self._gather(calls, deadline=deadline, what=method)

    def _gather(self, calls: Sequence[Any], *, deadline: float, what: str = "open_store") -> list[Any]:
        """Wait for all ranks; the first failure, or the deadline, ends the wait."""
        rank_of = {call: rank for rank, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        pending = list(calls)
        end = time.monotonic() + deadline
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                late = [rank_of[call] for call in pending]
                names = ", ".join(map(self._name, late))
                raise self._failure(f"policy {what}: no answer within {deadline:g} s from {names}", late)
            rank = rank_of[done[0]]
            try:
                with room_for(f"policy {what}: what {self._name(rank)} reads or answers"):
                    results[rank] = ray.get(done[0])
            except (RayTaskError, RayActorError) as error:
                if isinstance(cause := getattr(error, "cause", None), RecipeError):
                    raise cause from error  # a wrong input keeps its own message and exit status
                why = f"failed: {cause!r}" if isinstance(error, RayTaskError) else f"died: {_first_line(error)}"
                failed = [rank, *([] if self._is_up else self._ranks_that_fail_too(pending, rank_of))]
                raise self._failure(f"policy {what}: {self._name(rank)} {why}", failed) from error
        return results

    def _ranks_that_fail_too(self, pending: Sequence[Any], rank_of: Mapping[Any, int]) -> list[int]:
        """Return which other ranks fail within a few seconds of the first."""
        done = ray.wait(pending, num_returns=len(pending), timeout=_SETTLE_SECONDS)[0] if pending else []
        failed = []
        for call in done:
            try:
                ray.get(call)
            except (RayTaskError, RayActorError):
                failed.append(rank_of[call])
        return failed

    def _failure(self, message: str, ranks: Sequence[int]) -> RunError:
        """Return the error of ranks that failed or are late; while they come up, of which nodes that is."""
        if self._is_up or not self._identities:
            return PolicyError(message)
        nodes = {self._identities[rank].node_ip for rank in ranks}
        if nodes == {identity.node_ip for identity in self._identities}:
            return PolicyError(message)
        return BringUpError(f"{message}\n  on {', '.join(f'node {node}' for node in sorted(nodes))}")

    def _name(self, rank: int) -> str:
        if not self._identities:
            return f"rank {rank} (not placed yet)"
        identity = self._identities[rank]
        return f"rank {rank} (pid {identity.pid} on node {identity.node_id}, {identity.node_ip})"

    def _kill(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


def worker_variables(cfg: PolicyConfig) -> dict[str, str]:
    """Return what a worker's environment has from its start, when CUDA reads it; `env_vars` wins over our values."""
    exact = _DETERMINISTIC if cfg.determinism == "full" else {}
    return _ENV | exact | {name: str(value) for name, value in (cfg.megatron_cfg.env_vars or {}).items()}


def threads_per_rank(identities: Sequence[WorkerIdentity]) -> int:
    """Return how many threads each rank computes with: the cores of its node, divided among the node's ranks."""
    ranks = Counter(identity.node_id for identity in identities)
    cores = min(identity.num_cores // ranks[identity.node_id] for identity in identities)
    return min(max(cores, 1), _MOST_THREADS)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
