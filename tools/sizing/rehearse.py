"""Rehearse a stage without its machines: build its model, load its push, bring its nodes up, and say what it will take.

    python -m tools.sizing.rehearse --stage stage1.1 --scale prod --platform h100 [KEY=VALUE ...]

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.config.tree import Config
from recipes.errors import RunError
from tools.command_line import exit_status
from tools.dev.lock import conflicts
from tools.draft.findings import Finding, found
from tools.draft.launch import ROOT, TINY_MODEL, read_launch
from tools.hub import model_path
from tools.look.report.chart import format_seconds
from tools.sizing import planner
from tools.sizing.architecture import published_config
from tools.sizing.built import BuiltEngine, BuiltPolicy, Tensors
from tools.sizing.memory import GIB, push_volume
from tools.sizing.planner import StagePlan

if TYPE_CHECKING:
    from tools.sizing.rehearse_start import BringUp

T = TypeVar("T")
LOCKS = ("requirements-cpu", "requirements-gpu")
_MOST = 5  # differences of one kind that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was built and tried."""

    plan: StagePlan
    policy: BuiltPolicy
    engine: BuiltEngine
    bring_ups: Sequence[BringUp]
    findings: Sequence[Finding]


def rehearse(args: argparse.Namespace) -> Rehearsal:
    """Rehearse a stage; raises `InputError` or `ConfigError` for what cannot even be planned."""
    plan = planner.make_plan(args)
    environ = {**os.environ, "SCALE": args.scale, "PLATFORM": args.platform}
    few = [one for one in read_launch(args.stage, args.overrides, environ).findings if one.code == "ALC001"]
    policy, engine = built(plan)
    from tools.sizing.rehearse_start import bring_ups as all_bring_ups  # only now: it loads Ray

    _say("starting engines and nodes, without and with faults")
    bring_ups = all_bring_ups(plan.sizes.num_nodes, plan.sizes.num_engines, plan.config.policy.generation)
    return Rehearsal(
        plan=plan,
        policy=policy,
        engine=engine,
        bring_ups=bring_ups,
        findings=[
            *few,
            *model_findings(plan, policy, engine),
            *_start_findings(bring_ups),
            *(lock for name in LOCKS for lock in lock_findings(ROOT / "containers" / f"{name}.lock")),
        ],
    )


def built(plan: StagePlan) -> tuple[BuiltPolicy, BuiltEngine]:
    """Build the policy and an engine of a stage, each in a process of its own."""
    with _model(plan) as model:
        _say("building a policy rank of each kind on the meta device")
        policy = in_own_process(build_policy, plan.config, model, plan.sizes.train_gpus)
        _say(f"giving {len(policy.full):,} tensors to an engine of {plan.sizes.gpus_per_engine}")
        return policy, in_own_process(load_engine, plan.config, model, policy.full)


@contextmanager
def _model(plan: StagePlan) -> Iterator[Path]:
    """Yield a directory with the config.json of the stage's model: MODEL_PATH, the tiny one, or Super as published."""
    given = os.environ.get("MODEL_PATH", "")
    if given or plan.scale == "tiny":
        yield Path(model_path(given)) if given else ROOT / TINY_MODEL
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
    from tools.sizing.rehearse_policy import build

    return build(config.policy, model, world_size)


def load_engine(config: Config, model: Path, tensors: Tensors) -> BuiltEngine:
    """Build an engine and give it the tensors; for a process of its own."""
    from tools.sizing.rehearse_engine import load

    return load(config.policy.generation, model, tensors)


def _say(text: str) -> None:
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


def model_findings(plan: StagePlan, policy: BuiltPolicy, engine: BuiltEngine) -> Iterator[Finding]:
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


def _start_findings(bring_ups: Sequence[BringUp]) -> Iterator[Finding]:
    for one in bring_ups:
        if not one.is_right:
            fix = "report it with this page: it is a fault of the recipe"
            yield found("ALC005", where=one.what, got=one.got, expected=one.expected, fix=fix)


def lock_findings(lock: Path) -> Iterator[Finding]:
    """Yield the pins of a lock that contradict what another of its packages asks for."""
    asked = json.loads(lock.with_suffix(".json").read_text(encoding="utf-8"))
    for what in conflicts(lock.read_text(encoding="utf-8"), asked):
        fix = "pin a version that both take, or accept it in the lock with its reason"
        yield found("IMG006", where=str(lock), wrong=what, fix=fix)


def trainer_bytes(plan: StagePlan, policy: BuiltPolicy) -> float:
    """Return the memory of the fullest policy worker: the plan's, with the weights that were built."""
    built = max(one.num_bytes for one in policy.ranks)
    return plan.trainer.total + built - plan.trainer.weights


def engine_bytes(plan: StagePlan, engine: BuiltEngine) -> float:
    """Return the memory of one GPU of an engine: more weights leave less for caches, so that only a lack counts."""
    short = engine.num_bytes - plan.engine.weights - plan.engine.cache
    return plan.engine.total + max(0.0, short)


def render(rehearsal: Rehearsal) -> str:
    """Return the page."""
    plan = rehearsal.plan
    on = plan.platform.upper() if plan.gpu_bytes else "this machine's CPU"
    lines = [
        f"rehearsal of {plan.stage.id} ({plan.stage.name}), scale {plan.scale} on {on}: {plan.sizes.num_nodes} node(s), "
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


def _time_lines(plan: StagePlan) -> list[str]:
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
