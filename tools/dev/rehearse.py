"""Rehearse a stage without its machines: build its model, load its push, bring its nodes up, and say what it will take.

    python -m tools.dev.rehearse --stage stage1.1 --scale prod --platform h100 [KEY=VALUE ...]

No GPU is needed, and about a minute on two cores:

    model   one rank of each kind of the policy at full size, on torch's meta device; each tensor held against the files
            of MODEL_PATH or the class of transformers; each tensor given to vLLM's own class, as an engine has it
    memory  the bytes that were built, in place of those that the plan computes
    start   the real barrier with as many nodes as the job has, without and with planted faults
    locks   the pins of both environments against what their packages ask for
    time    how long start, step, push and save will take, each with what it rests on

Other options are those of `make plan`. Exit status: 0, or 2 where something would fail on the cluster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.config.tree import Config, GenerationConfig
from recipes.errors import RunError
from recipes.generation.engine_args import CPU_ENV, ENV, OWN_HEADS
from tools.command_line import exit_status
from tools.dev.lock import conflicts
from tools.draft.findings import Finding, found
from tools.look.report.chart import format_seconds
from tools.sizing import planner
from tools.sizing.architecture import published_config
from tools.sizing.memory import GIB, push_volume

if TYPE_CHECKING:
    from tools.dev.rehearse_start import BringUp

Tensors = list[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """One rank as it was built."""

    rank: int
    stage: int  # of the pipeline
    num_bytes: int  # of weights
    num_tensors: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPolicy:
    """A rank of each kind, and all tensors of the model."""

    ranks: tuple[BuiltRank, ...]
    full: Tensors  # as an export has them
    pushed: Tensors  # as engines get them: experts in blocks
    reference: str  # what the tensors were compared with
    num_compared: int
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """One rank of an engine, and how it took a push."""

    num_bytes: int  # of weights on this rank
    num_loaded: int  # tensors
    has_drafter: bool
    differences: tuple[str, ...]
    seconds: float


T = TypeVar("T")
_KEPT = ("mamba_ssm_cache_dtype", "mamba_cache_mode", "speculative_config", "max_num_seqs", "max_num_batched_tokens")
LOCKS = ("requirements-cpu", "requirements-gpu")
_CONTAINERS = Path(__file__).parents[2] / "containers"
_MOST = 5  # differences of one kind that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was built and tried."""

    plan: planner.StagePlan
    policy: BuiltPolicy
    engine: BuiltEngine
    bring_ups: Sequence[BringUp]
    findings: Sequence[Finding]


def rehearse(args: argparse.Namespace) -> Rehearsal:
    """Rehearse a stage; raises `InputError` or `ConfigError` for what cannot even be planned."""
    plan = planner.make_plan(args)
    few = [one for one in plan.launch.findings if one.code == "ALC001"]
    policy, engine = built(plan)
    from tools.dev.rehearse_start import bring_ups as all_bring_ups  # only now: it loads Ray

    _say("starting engines and nodes, without and with faults")
    limits = plan.config.policy.generation.max_starts, plan.config.policy.generation.min_share_up
    bring_ups = all_bring_ups(plan.sizes.num_nodes, plan.sizes.num_engines, limits)
    return Rehearsal(
        plan=plan,
        policy=policy,
        engine=engine,
        bring_ups=bring_ups,
        findings=[
            *few,
            *model_findings(plan, policy, engine),
            *start_findings(bring_ups),
            *(lock for name in LOCKS for lock in lock_findings(_CONTAINERS / f"{name}.lock")),
        ],
    )


def built(plan: planner.StagePlan) -> tuple[BuiltPolicy, BuiltEngine]:
    """Build the policy and an engine of a stage, each in a process of its own."""
    with _model(plan) as model:
        _say("building a policy rank of each kind on the meta device")
        policy = in_own_process(build_policy, plan.config, model, plan.sizes.train_gpus)
        _say(f"giving {len(policy.full):,} tensors to an engine of {plan.sizes.gpus_per_engine}")
        return policy, in_own_process(load_engine, plan.config.policy.generation, model, policy.full)


@contextmanager
def _model(plan: planner.StagePlan) -> Iterator[Path]:
    """Yield a directory with the config.json of the stage's model: MODEL_PATH, the tiny one, or Super as published."""
    if given := planner.model_directory(os.environ.get("MODEL_PATH", ""), plan.scale == "tiny"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        (Path(directory) / "config.json").write_text(
            json.dumps(dict(published_config(plan.stage.id))), encoding="utf-8"
        )
        yield Path(directory)


def in_own_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a new process, which has its own process groups and environment."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise RunError(f"{work.__name__}: its process has ended without a word; is there enough memory?") from error


def build_policy(config: Config, model: Path, world_size: int) -> BuiltPolicy:
    """Build the policy; for a process of its own."""
    import logging
    import warnings

    logging.disable(logging.WARNING)  # Megatron's, of random states, one for each layer
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # what they lack without a GPU
    from tools.dev.rehearse_policy import build

    found = build(config.policy, model, world_size)
    return BuiltPolicy(**{**found, "ranks": tuple(BuiltRank(**one) for one in found["ranks"])})


def load_engine(cfg: GenerationConfig, model: Path, tensors: Tensors) -> BuiltEngine:
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


def _say(text: str) -> None:
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


def model_findings(plan: planner.StagePlan, policy: BuiltPolicy, engine: BuiltEngine) -> Iterator[Finding]:
    """Yield what differs between policy, reference and engine, and what does not fit into memory."""
    where = os.environ.get("MODEL_PATH") or plan.model.name
    fix = "take weights, config.json and code that belong together"
    for what in _most(policy.differences):
        yield found("MDL011", where=where, wrong=what, fix=fix)
    for what in _most(engine.differences):
        yield found("MDL013", where=where, wrong=what, fix=fix)
    if plan.gpu_bytes is None:
        return
    for name, total in (("policy worker", trainer_bytes(plan, policy)), ("engine", engine_bytes(plan, engine))):
        if total > planner.FULL * plan.gpu_bytes:
            got = f"{total / GIB:.1f} GiB on the GPU of one {name}"
            expected = f"at most {planner.FULL:.0%} of {plan.gpu_bytes / GIB:.1f} GiB"
            fix = "divide the model among more GPUs, or offload the optimizer; `make plan` says what takes the room"
            yield found("MDL014", where=where, got=got, expected=expected, fix=fix)


def _most(differences: Sequence[str]) -> Iterator[str]:
    yield from differences[:_MOST]
    if len(differences) > _MOST:
        yield f"and {len(differences) - _MOST:,} more tensors"


def start_findings(bring_ups: Sequence[BringUp]) -> Iterator[Finding]:
    """Yield each start with a planted fault that did not end as it must."""
    for one in bring_ups:
        if not one.is_right:
            fix = "report it with this page: it is a fault of the recipe"
            yield found("ALC005", where=one.what, got=one.got, expected=one.expected, fix=fix)


def lock_findings(lock: Path) -> Iterator[Finding]:
    """Yield the pins of a lock that contradict what another of its packages asks for."""
    asked = json.loads(lock.with_suffix(".json").read_text(encoding="utf-8"))
    for what in conflicts(lock.read_text(encoding="utf-8"), asked):
        fix = "pin a version that both take, or accept it in the lock with its reason"
        yield found("IMG006", where=f"{lock.parent.name}/{lock.name}", wrong=what, fix=fix)


def trainer_bytes(plan: planner.StagePlan, policy: BuiltPolicy) -> float:
    """Return the memory of the fullest policy worker: the plan's, with the weights that were built."""
    built = max(one.num_bytes for one in policy.ranks)
    return plan.trainer.total + built - plan.trainer.weights


def engine_bytes(plan: planner.StagePlan, engine: BuiltEngine) -> float:
    """Return the memory of one GPU of an engine: more weights leave less for caches, so that only a lack counts."""
    short = engine.num_bytes - plan.engine.weights - plan.engine.cache
    return plan.engine.total + max(0.0, short)


def render(rehearsal: Rehearsal) -> str:
    """Return the page."""
    plan = rehearsal.plan
    on = plan.platform.upper() if plan.gpu_bytes else "this machine's CPU"
    lines = [
        f"rehearsal of {plan.stage.id} ({plan.stage.name}), scale {plan.scale} on {on}: {plan.sizes.num_nodes} nodes, "
        f"{plan.sizes.total_gpus} GPUs"
        + ("" if plan.is_model_given else "; MODEL_PATH is not set: " + plan.model.name),
        "",
        *_model_lines(rehearsal),
        "",
        *_start_lines(rehearsal),
        "",
        *_lock_lines(rehearsal),
        "",
        *_time_lines(plan),
        "",
    ]
    if not rehearsal.findings:
        return "\n".join([*lines, "nothing was found that would fail on the cluster"])
    return "\n".join([*lines, *(f"{one.code} {one.problem}" for one in rehearsal.findings)])


def _model_lines(rehearsal: Rehearsal) -> list[str]:
    plan, policy, engine = rehearsal.plan, rehearsal.policy, rehearsal.engine
    numbers = ", ".join(str(one.rank) for one in policy.ranks)
    built, planned = max(one.num_bytes for one in policy.ranks), plan.trainer.weights
    lines = [
        f"policy    ranks {numbers} of {plan.sizes.train_gpus} built: {len(policy.full):,} tensors, "
        f"{len(policy.pushed):,} in a push; {policy.num_compared:,} compared with {policy.reference}: "
        + _verdict(policy.differences),
        f"engine    rank 0 of {plan.sizes.gpus_per_engine} built{', with its drafter,' if engine.has_drafter else ''} "
        f"and given {engine.num_loaded:,} tensors: " + _verdict(engine.differences),
        f"weights   {built / GIB:.2f} GiB a policy GPU (planned {planned / GIB:.2f}), {engine.num_bytes / GIB:.2f} GiB "
        f"an engine GPU (planned {plan.engine.weights / GIB:.2f})",
    ]
    if plan.gpu_bytes:
        trainer, other = trainer_bytes(plan, policy) / GIB, engine_bytes(plan, engine) / GIB
        lines.append(
            f"memory    {trainer:.1f} GiB a policy GPU, {other:.1f} GiB an engine GPU, of {plan.gpu_bytes / GIB:.1f}; "
            f"a push needs {push_volume(plan.model, plan.config).received / GIB:.1f} GiB of that on the engine"
        )
    return lines


def _verdict(differences: Sequence[str]) -> str:
    return f"{len(differences):,} DIFFER" if differences else "equal"


def _start_lines(rehearsal: Rehearsal) -> list[str]:
    rows = [
        f"          {'ok' if one.is_right else 'WRONG':<6}{one.what}: {one.got} ({one.seconds:.1f} s)"
        for one in rehearsal.bring_ups
    ]
    return ["start     of engines without a model on real Ray, and of nodes before the real barrier:", *rows]


def _lock_lines(rehearsal: Rehearsal) -> list[str]:
    wrong = sum(one.code == "IMG006" for one in rehearsal.findings)
    return [f"locks     {' and '.join(LOCKS)}: {wrong or 'no'} pins contradict what a package asks for"]


def _time_lines(plan: planner.StagePlan) -> list[str]:
    """Say how long each part will take, and what the figure rests on."""
    given, expected = plan.given, plan.expected.forecast
    rows = [("a step", expected.step_seconds, "simulated, with the speeds that `make plan` prints")]
    if plan.gpu_bytes:
        volume = push_volume(plan.model, plan.config)
        read = sum(one.total_bytes for one in plan.start)
        rows = [
            (
                "reads at start",
                read / (FILE_SYSTEM_GB * 1e9),
                f"{read / 1e12:.1f} TB at {FILE_SYSTEM_GB:g} GB/s, assumed",
            ),
            *rows,
            (
                "a push",
                plan.loop.refit_seconds,
                f"{volume.num_bytes / 1e9:,.0f} GB at {given.push_gb_per_second:g} GB/s, assumed; its loader: "
                "`make bench-scale`",
            ),
            (
                "a save",
                plan.save_seconds,
                f"{plan.checkpoint_bytes / 1e12:.2f} TB at {given.save_gb_per_second:g} GB/s, assumed, beside training",
            ),
            (
                "a restart",
                plan.save_seconds,
                "it reads what a save wrote, as fast; the driver's part: `make bench-scale`",
            ),
        ]
    return ["time      nothing of this was measured on a GPU or a cluster"] + [
        f"          {what:<16}{format_seconds(seconds):>12}  {basis}" for what, seconds, basis in rows
    ]


FILE_SYSTEM_GB = 50.0  # a second, for all nodes together, as in `tools.bench.bring_up_cost`


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse, and print the page."""
    rehearsal = rehearse(planner.parse(argv))
    print(render(rehearsal))
    return 2 if rehearsal.findings else 0


if __name__ == "__main__":
    sys.exit(main())
