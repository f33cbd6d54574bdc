"""One rank of the layout tests: for each case of a job, take one step under its layout and write what it did.

The ranks of a job import Megatron once and form new groups for every case; a rank that a case does not need waits for
the next. `outcomes` starts them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_deep_ep
import torch
import torch.distributed as dist
from policy_case import GRADIENT_SCALE, load_case, showing_gradients
from random_batch import batch_of, random_rollouts, with_random_routes
from torch import Tensor

from recipes.grpo.loss import grpo_loss
from recipes.policy import shards
from recipes.types import TrainBatch, experts_of
from recipes.weight_files import INDEX
from tests.grouped_linear import stand_in
from tests.groups import LocalStore

_BUCKET_SIZE = 2000  # parameters: an overlapped reduction has many buckets, and the output layer one of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """One layout of one model."""

    name: str
    model: Path
    num_ranks: int
    overrides: dict[str, Any]
    saves: bool = False  # a first step is taken and saved before the one that is looked at
    resumes: str = ""  # the case whose checkpoint is loaded first
    is_flex: bool = False  # tokens are sent by the stand-in of DeepEP, which in truth carries no float32
    trains: bool = True  # else the weights are loaded and exported, and nothing more
    replays: bool = False  # the rollouts say to which experts of a hybrid their tokens went: to any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """What all ranks read."""

    cases: tuple[LayoutCase, ...]
    num_ranks: int
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOutcome:
    """What rank 0 saw of one step; only `before` and `shapes` where a case does not train."""

    before: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))  # of all rows, end to end
    leak: float = 0.0  # how far the other rows' log-probabilities move when the first row's tokens change
    shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=list)


def run_case(case: LayoutCase, rank: int, store: dist.Store, directory: Path) -> LayoutOutcome | None:
    """Take one step; returns None on the ranks other than 0."""
    from megatron.core import parallel_state

    from recipes.policy import checkpoint, optimizer, parallel, step

    optimizer._BUCKET_SIZE = _BUCKET_SIZE
    config = load_case(case.model, **case.overrides)
    if not case.saves and not case.resumes:
        config = showing_gradients(config)
    if config.policy.megatron_cfg.moe_grouped_gemm:
        stand_in()
    if case.is_flex:
        fake_deep_ep.stand_in()
        flex = replace(config.policy.megatron_cfg, moe_token_dispatcher_type="flex", moe_enable_deepep=True)
        config = replace(config, policy=replace(config.policy, megatron_cfg=flex))
    where = parallel.join_groups(
        dist.PrefixStore(case.name, store),
        rank=rank,
        world_size=case.num_ranks,
        cfg=config.policy.megatron_cfg,
        seed=1,
        timeout_s=120.0,
    )
    try:
        loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
        trainer = step.build_trainer(config.policy, loss)
        if not case.trains:
            return LayoutOutcome(before=_full_weights(trainer), shapes=trainer.full_shapes())
        rollouts = random_rollouts(10)
        batch = batch_of(with_random_routes(rollouts) if case.replays else rollouts, LocalStore())
        num_shards = parallel_state.get_data_parallel_world_size()
        plans = [shards.divide(batch, config.policy, num_shards=num_shards, training=flag) for flag in (False, True)]
        own = [shards.split(batch, plan)[where.data] for plan in plans]
        if case.saves:
            step.train_steps(trainer, [own[1]])
            (directory / f"{case.name}.checkpoint").mkdir(exist_ok=True)
            checkpoint.save(trainer, directory / f"{case.name}.checkpoint")
            _export_together(trainer, where.exports, directory / f"{case.name}.hf")
        if case.resumes:
            checkpoint.load(trainer, directory / f"{case.resumes}.checkpoint")
        logprobs = torch.cat(step.logprobs(trainer, own[0]))
        other = shards.split(_with_another_first_row(batch), plans[0])[where.data]
        changed = torch.cat(step.logprobs(trainer, other))
        before = _full_weights(trainer) if where.exports else {}
        metrics = step.train_steps(trainer, [own[1]])
        after = _full_weights(trainer) if where.exports else {}
        answers: list[Any] = [None] * case.num_ranks
        dist.all_gather_object(answers, (where, (logprobs, changed), metrics))
        shapes = trainer.full_shapes()
    finally:
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
    if rank != 0:
        return None
    outputs = {place.data: (parts, measured) for place, parts, measured in answers if place.is_output}
    parts = [outputs[data] for data in range(num_shards)]
    lengths = batch.lengths_B.tolist()
    rows, changed_rows = (
        shards.scatter_rows([both[which] for both, _ in parts], plans[0], lengths) for which in (0, 1)
    )
    assert not torch.equal(rows[0], changed_rows[0]), "the first row's own log-probabilities must change"
    return LayoutOutcome(
        metrics=shards.merge_step_metrics([measured for _, measured in parts]),
        before=before,
        gradients={name: (before[name] - after[name]) / GRADIENT_SCALE for name in before},
        logprobs=torch.cat(rows),
        leak=(torch.cat(rows[1:]) - torch.cat(changed_rows[1:])).abs().max().item(),
        shapes=shapes,
    )


def _with_another_first_row(batch: TrainBatch) -> TrainBatch:
    first = batch.tokens[0]
    ids = first.token_ids.copy()
    own = slice(0, first.token_ids_offsets[1])
    ids[own] = (ids[own] + 7) % 96
    return replace(batch, tokens=(replace(first, token_ids=ids), *batch.tokens[1:]))


def _export_together(trainer: Any, exports: bool, path: Path) -> None:
    """Write an export of several files: each rank that gathers the weights writes some, and together they have all."""
    from recipes.policy import hf, saving
    from recipes.policy.host_copies import HostCopies

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, exports)
    writers = [rank for rank, flag in enumerate(told) if flag]
    size, hf.SHARD_BYTES = hf.SHARD_BYTES, 20_000
    sums: list[Any] = [None] * len(told)
    side_files = {"config.json": b"{}"} if dist.get_rank() == 0 else {}
    own = saving.export_copy(trainer, path, HostCopies(), side_files, writers)() if exports else {}
    dist.all_gather_object(sums, own)
    hf.SHARD_BYTES = size
    if not exports:
        return
    weights = _full_weights(trainer)
    assert all(sums[rank] for rank in writers), "a rank has written nothing"
    files = {file for one in sums for file in one}
    assert files == set(path.glob("*.safetensors")) and len(files) == sum(map(len, sums)) > len(writers)
    assert {file.name for file in path.iterdir()} - {file.name for file in files} == {"config.json", INDEX}
    read = hf.WeightReader(path)
    assert all(torch.equal(read(name), tensor) for name, tensor in weights.items())
    read.check_all_used(set(weights))


def _full_weights(trainer: Any) -> dict[str, Tensor]:
    """Return the exported weights; those of a push, with experts in blocks, must be the same."""
    full = {name: tensor.clone() for name, tensor in trainer.export()}
    pushed: dict[str, Tensor] = {}
    for (name, tensor), announced in zip(trainer.pushed(), trainer.pushed_shapes(), strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == announced
        experts = experts_of(name)
        pushed |= zip(experts, tensor.unbind(), strict=True) if experts else {name: tensor}
    assert pushed.keys() == full.keys() and all(torch.equal(pushed[name], tensor) for name, tensor in full.items())
    return full


def main() -> None:
    """Run all cases of the job in argument 1 as the rank in argument 2; each outcome goes into a file of its own."""
    job: LayoutJob = pickle.loads(Path(sys.argv[1]).read_bytes())
    rank = int(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(job.directory / "store"), job.num_ranks)
    for case in job.cases:
        if rank < case.num_ranks:
            outcome = run_case(case, rank, store, job.directory)
            if outcome is not None:
                torch.save(outcome, job.directory / f"{case.name}.pt")


def outcomes(cases: tuple[LayoutCase, ...], directory: Path, *, timeout_s: float) -> dict[str, LayoutOutcome]:
    """Run the cases on as many processes as the largest needs; return what each case's rank 0 saw."""
    directory.mkdir(parents=True, exist_ok=True)
    job = LayoutJob(cases=cases, num_ranks=max(case.num_ranks for case in cases), directory=directory)
    path = directory / "job.pickle"
    path.write_bytes(pickle.dumps(job))
    command = [sys.executable, "-c", "import layout_ranks; layout_ranks.main()", str(path)]
    folder = Path(__file__).resolve().parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{folder.parents[1]}"}
    with ExitStack() as stack:
        logs = [
            stack.enter_context((directory / f"{rank}.log").open("w", encoding="utf-8"))
            for rank in range(job.num_ranks)
        ]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    said = "\n".join(
        f"rank {rank}: {Path(log.name).read_text(encoding='utf-8')[-3000:]}" for rank, log in enumerate(logs)
    )
    assert [process.returncode for process in ranks] == [0] * job.num_ranks, said
    return {case.name: torch.load(directory / f"{case.name}.pt", weights_only=False) for case in cases}


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Return when all ranks have ended, when one has failed (the others would wait for it), or when time is up."""
    end = time.monotonic() + timeout_s
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        if any(process.poll() for process in ranks):
            return
        time.sleep(0.1)
