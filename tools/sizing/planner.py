"""Plan a stage before anything is queued: nodes and GPUs, memory per GPU, tokens and seconds of a step, GPU-hours.

    python -m tools.sizing.planner --stage stage1.1 --scale prod [--json] [--generated-tokens 20000 ...] [KEY=VALUE ...]

The sizes come from the configuration that a launch with the same variables would have, so that CONFIG_PATH and the
profile of CLUSTER count; those of the model from MODEL_PATH/config.json, or as published. The times come from a
simulation of the loop with assumed speeds, which the plan prints; `--from-run` takes lengths and environment times from
a finished run. Exit status: 0, or 2 when an input is wrong.

The known and expected numbers of a stage before it runs, as `make plan` prints them.

The plan of a stage as text, for a person who decides whether to submit it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import Derived
from recipes.config.load import PLATFORMS, SCALES, Stage
from recipes.config.tree import Config
from recipes.errors import InputError, Problem
from tools.command_line import amount, exit_status
from tools.draft.launch import ROOT, TINY_MODEL, Launch, read_launch
from tools.hub import hub_name, model_path, taken_for
from tools.look.report.chart import format_seconds
from tools.look.report.load import load_run
from tools.sizing.architecture import Architecture, published, read_architecture
from tools.sizing.memory import (
    GIB,
    EngineMemory,
    HostMemory,
    StartVolume,
    TrainerMemory,
    engine_memory,
    host_memory,
    packed_routes,
    push_volume,
    start_volumes,
    trainer_memory,
)
from tools.sizing.simulator import Forecast, Loop, forecast
from tools.sizing.speed import (
    GPUS,
    OF_STAGE,
    OF_TINY,
    Assumptions,
    TeacherLoad,
    loop,
    roofline,
    teachers,
    tiny_speeds,
)

FULL = 0.95  # share of a GPU's memory above which a plan does not fit


def render(plan: StagePlan) -> str:
    """Return the whole plan."""
    sections = [
        [f"{plan.stage.id} ({plan.stage.name}), scale {plan.scale}" + _on(plan)],
        _machines(plan),
        _memory(plan),
        _host_memory(plan),
        *([_start(plan)] if plan.sizes.num_nodes > 1 else []),
        _step(plan),
        _alternatives(plan),
        _assumed(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _on(plan: StagePlan) -> str:
    return f" on {plan.platform.upper()}" if plan.gpu_bytes else " on this machine's CPU"


def _machines(plan: StagePlan) -> list[str]:
    sizes, megatron = plan.sizes, plan.config.policy.megatron_cfg
    num_workers = plan.config.grpo.async_grpo.num_rollout_workers or sizes.num_nodes
    on_node = -(-num_workers // sizes.num_nodes)
    each = plan.sizes.total_gpus // plan.sizes.num_nodes
    gpu = "GPUs" if plan.gpu_bytes else "workers"
    if sizes.is_one_node:
        nodes = f"1 node, {sizes.train_gpus} of its {each} {gpu} train, {sizes.generation_gpus} generate"
        if sizes.num_judge_nodes and plan.gpu_bytes:
            nodes += f"; {sizes.num_judge_nodes} x {each} more {gpu} for judges, which take {sizes.judge_units}"
        elif sizes.judge_units:
            nodes += f"; {sizes.judge_units} more of this machine judge"
    else:
        nodes = (
            f"{sizes.num_nodes} x {each} = {sizes.total_gpus} {gpu}: {sizes.num_train_nodes} nodes train, "
            f"{sizes.num_generation_nodes} generate, {sizes.num_judge_nodes} hold judges"
        )
    return [
        f"nodes     {nodes}",
        f"trainer   TP {megatron.tensor_model_parallel_size} x CP {megatron.context_parallel_size} x "
        f"PP {megatron.pipeline_model_parallel_size} = {sizes.model_parallel_size} {gpu} per copy, "
        f"{sizes.data_parallel_size} copies, experts over {megatron.expert_model_parallel_size}",
        f"engines   {sizes.num_engines} of {sizes.gpus_per_engine} {gpu}; each generates "
        f"{sizes.samples_per_step / sizes.num_engines:.1f} rollouts per step, with at most "
        f"{sizes.max_requests_in_flight / sizes.num_engines:.1f} in flight",
        f"rollouts  {num_workers} workers, at most {on_node} on a node; half of its cores score answers",
    ]


def _unit(plan: StagePlan) -> tuple[str, float]:
    return ("GiB", GIB) if plan.gpu_bytes else ("MiB", GIB / 1024)


def _host_memory(plan: StagePlan) -> list[str]:
    host, (unit, size) = plan.host, _unit(plan)
    rows = (
        ("reference policy", host.reference, "the weights that the stage started from"),
        ("its pass", host.reference_pass, "the trained weights, while the reference policy has their place"),
        ("offloaded optimizer", host.offloaded, "its share of the CPU: state, weights and gradients"),
        ("optimizer set aside", host.aside, "the state on GPUs, while log-probabilities are computed"),
        ("a save in progress", host.save, "weights and optimizer state, until they are written"),
        ("an export in progress", host.export, "the whole model, on the first node only"),
        ("total", host.total, ""),
    )
    return [
        f"host memory of a node's policy workers, {unit}",
        *(f"  {label:<22}{value / size:>8.1f}           {note}".rstrip() for label, value, note in rows),
    ]


def _start(plan: StagePlan) -> list[str]:
    rows = (
        f"  {one.what:<22}{one.node_bytes / 1e9:>9.3f} x {one.num_nodes:<4}= {one.total_bytes / 1e9:>9,.1f}  {one.note}"
        for one in plan.start
    )
    return ["read at start from shared file systems, GB a node x nodes", *rows]


def _memory(plan: StagePlan) -> list[str]:
    trainer, engine, model = plan.trainer, plan.engine, plan.model
    unit, size = _unit(plan)

    def row(label: str, of_trainer: float | None, of_engine: float | None, note: str = "") -> str:
        cells = ("" if value is None else f"{value / size:.1f}" for value in (of_trainer, of_engine))
        return f"  {label:<22}{next(cells):>8}{next(cells):>9}  {note}".rstrip()

    tokens = plan.config.policy.sequence_packing.train_mb_tokens
    longest = plan.config.policy.max_total_sequence_length
    length = plan.given.rollout_tokens(longest)
    lines = [
        f"model     {model.name}: {_tokens(model.parameters)} parameters, {_tokens(model.active_parameters)} "
        "active per token",
        *(
            []
            if plan.is_model_given
            else ["          as published, since MODEL_PATH is not set; set it to plan your own"]
        ),
        f"{f'memory per GPU, {unit}':<24}{'trainer':>8}{'engine':>9}",
        row("weights", trainer.weights, engine.weights),
        row("gradients", trainer.gradients, None),
        row("optimizer state", trainer.optimizer, None),
        row("activations", trainer.activations, None, f"of a micro-batch of {tokens:,} tokens"),
        row("backward pass", trainer.backward, None),
        *([row("replayed routes", trainer.routes, None)] if trainer.routes else []),
        row("caches", None, engine.cache, _cache_note(plan, length, longest)),
        row("other", trainer.other, engine.other, "CUDA, NCCL, allocator, graphs"),
        *([row("a weight push", None, engine.push, "beside gpu_memory_utilization")] if engine.push else []),
        row("total", trainer.total, engine.total, "" if plan.gpu_bytes is None else _fits(plan, plan.gpu_bytes)),
    ]
    return lines


def _cache_note(plan: StagePlan, length: float, longest: int) -> str:
    mean, worst = plan.engine.sequences(length), plan.engine.sequences(longest)
    return f"{mean:,} sequences of {length:,.0f} tokens (expected mean), or {worst:,} of {longest:,} (the longest)"


def _fits(plan: StagePlan, gpu_bytes: float) -> str:
    share = max(plan.trainer.total, plan.engine.total) / gpu_bytes
    verdict = "fits" if share <= FULL else "DOES NOT FIT"
    return f"of {gpu_bytes / GIB:.1f}: {verdict}"


def _step(plan: StagePlan) -> list[str]:
    expected, config = plan.expected, plan.config
    found, period = expected.forecast, config.checkpointing.save_period
    samples = plan.sizes.samples_per_step
    prompts = samples * plan.given.prompt_tokens
    lines = [
        f"a step    {config.grpo.num_prompts_per_step} prompts x {config.grpo.num_generations_per_prompt} = "
        f"{samples:,} rollouts, {_tokens(found.tokens_per_step)} tokens generated and {_tokens(prompts)} of prompts "
        f"(at most {_tokens(plan.sizes.max_tokens_per_step)})",
        f"expected  {format_seconds(found.step_seconds)}: the policy trains {found.policy_busy:.0%} of it and waits "
        f"{found.policy_waits:.0%}, the engines generate {found.engines_busy:.0%}; rollouts are "
        f"{found.age:.1f} steps old",
    ]
    for one in plan.teachers:
        busy = format_seconds(one.step_seconds)
        weights = f"{one.weights / GIB:.1f} GiB of weights on each of its GPUs"
        lines.append(f"teacher   {one.name} reads the rollouts of a step in {busy}; {weights}")
    if each := packed_routes(plan.model, config):
        unit, size = _unit(plan)
        lines.append(
            f"routes    {each:,.0f} bytes a token: {each * (found.tokens_per_step + prompts) / size:,.1f} {unit} a "
            f"step in the object store, and at most {plan.engine.routes / size:,.1f} {unit} in an engine's host memory"
        )
    if plan.gpu_bytes:
        push = push_volume(plan.model, config)
        lines.append(
            f"push      {format_seconds(plan.loop.refit_seconds)}: {push.num_bytes / 1e9:,.0f} GB from one GPU to all "
            f"engines, in {push.num_tensors:,} tensors"
        )
        hours = f"cost      {expected.gpu_hours:,.1f} GPU-hours a step"
        if period > 0:
            hours += (
                f", {expected.gpu_hours * period:,.0f} between saves (every {period} steps, "
                f"{plan.checkpoint_bytes / 1e12:.1f} TB in {format_seconds(plan.save_seconds)})"
            )
        lines.append(hours)
    return lines


def _alternatives(plan: StagePlan) -> list[str]:
    lines = [
        "what if   generation  oldest   seconds  policy  policy  engines" + ("  GPU-hours" if plan.gpu_bytes else ""),
        "               nodes  steps     a step  trains   waits     busy" + ("     a step" if plan.gpu_bytes else ""),
    ]
    for row in (*plan.what_if, *plan.other_ages):
        lines.append(_line(plan, row))
    return [*lines, *(f"          {line}" for line in _conclusion(plan))]


def _line(plan: StagePlan, row: WhatIf) -> str:
    found = row.forecast
    is_configured = (row.generation_nodes, row.max_age) == (plan.expected.generation_nodes, plan.expected.max_age)
    mark = "as configured" if is_configured else "synchronous" if row.max_age == 0 else ""
    cost = f"{row.gpu_hours:>11,.1f}" if plan.gpu_bytes else ""
    return (
        f"{row.generation_nodes:>20}{row.max_age:>8}{found.step_seconds:>10,.4g}{found.policy_busy:>8.0%}"
        f"{found.policy_waits:>8.0%}{found.engines_busy:>9.0%}{cost}  {mark}"
    ).rstrip()


def _conclusion(plan: StagePlan) -> list[str]:
    if len(plan.what_if) == 1:
        return []
    if plan.enough is not None:
        return [
            f"{plan.enough.generation_nodes} generation nodes keep the trainer busy: it waits 10 % of the time or less"
        ]
    alone = format_seconds(plan.longest_rollout_seconds)
    return [
        "no number of generation nodes tried keeps the trainer busy: a step lasts as long as its slowest group,",
        f"and the longest possible rollout takes {alone} on an engine of its own",
    ]


def _assumed(plan: StagePlan) -> list[str]:
    lines = ['assumed, not measured on a cluster; change a number with ARGS="--NAME VALUE" or --from-run RUN_DIR:']
    for field in fields(Assumptions):
        name = "--" + field.name.replace("_", "-")
        lines.append(f"  {name:<22}{getattr(plan.given, field.name):>10g}  {field.metadata['meaning']}")
    return lines


def _tokens(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


BUSY = 0.1  # a trainer that waits for less than this share of the time counts as busy


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A forecast with one number of generation nodes (on one node: of engines) and one limit of the trajectory age."""

    generation_nodes: int
    num_engines: int
    max_age: int
    total_gpus: int
    forecast: Forecast

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one step."""
        return self.total_gpus * self.forecast.step_seconds / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """All known and expected numbers of a stage."""

    launch: Launch
    stage: Stage
    scale: str
    platform: str
    config: Config
    sizes: Derived
    model: Architecture
    is_model_given: bool  # else it is the published one
    trainer: TrainerMemory
    host: HostMemory
    engine: EngineMemory
    teachers: tuple[TeacherLoad, ...]  # on engines of the run
    gpu_bytes: float | None  # of one GPU; None on a CPU
    given: Assumptions
    loop: Loop
    expected: WhatIf  # as configured
    what_if: tuple[WhatIf, ...]  # other numbers of generation nodes, ascending
    other_ages: tuple[WhatIf, ...]  # the configured nodes with other limits of the trajectory age
    checkpoint_bytes: float
    save_seconds: float
    start: tuple[StartVolume, ...]  # what the nodes read before the first step, largest first

    @property
    def enough(self) -> WhatIf | None:
        """The row with the fewest generation nodes that keep the trainer busy; None when no simulated number does."""
        return next((row for row in self.what_if if row.forecast.policy_waits <= BUSY), None)

    @property
    def longest_rollout_seconds(self) -> float:
        """How long the longest possible rollout takes on an engine without other sequences."""
        longest = self.config.policy.max_total_sequence_length - self.given.prompt_tokens
        return longest * self.loop.decode_seconds(1) + self.given.turns * self.given.environment_seconds


_WRONG = ("ENV002", "ENV003", "ENV005", "CFG001")  # findings of a launch that leave nothing to plan
_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the generation nodes, of the what-if table; 1: as configured
_SIMULATED_STEPS, _SEED = 10, 0
_MAY_BE_0 = (
    "environment_seconds",
    "push_tensor_ms",
    "iteration_ms",
    "trainer_other_gib",
    "engine_other_gib",
    "image_gb",
)


def make_plan(args: argparse.Namespace) -> StagePlan:
    """Return the plan of a stage; raises `InputError` for wrong inputs."""
    launch = read_launch(args.stage, args.overrides, {**os.environ, "SCALE": args.scale, "PLATFORM": args.platform})
    if problems := [finding.problem for finding in launch.findings if finding.code in _WRONG]:
        raise InputError(problems)
    stage, config, sizes = launch.stage, launch.config, launch.sizes
    assert stage is not None and config is not None and sizes is not None  # what is wrong with them was raised
    is_tiny = args.scale == "tiny"
    given_model = os.environ.get("MODEL_PATH", "")
    model = architecture(given_model, stage, is_tiny)
    given = assumptions(args, stage, is_tiny)
    if given.prompt_tokens >= (longest := config.policy.max_total_sequence_length):
        expected = f"less than policy.max_total_sequence_length = {longest}"
        fix = "lower it: nothing could be generated after such prompts"
        raise InputError(Problem(where="--prompt-tokens", got=f"{given.prompt_tokens:g}", expected=expected, fix=fix))
    gpu = GPUS[args.platform]
    gpu = replace(gpu, memory_gib=args.gpu_memory_gib or gpu.memory_gib)
    trainer = trainer_memory(model, config, sizes, other=given.trainer_other_gib * GIB)
    engine = engine_memory(model, config, gpu=gpu.memory_gib * GIB, other=given.engine_other_gib * GIB)
    if not engine.sequences(given.rollout_tokens(longest)):
        room = f"{engine.cache / GIB:.1f} GiB for caches beside {engine.weights / GIB:.1f} GiB of weights"
        wrong = f"no sequence of the expected length fits on an engine: one GPU has {room}"
        fix = "raise tensor_parallel_size of the engines or gpu_memory_utilization"
        raise InputError(Problem(where="policy.generation.vllm_cfg", wrong=wrong, fix=fix))
    speeds = tiny_speeds(sizes) if is_tiny else roofline(model, config, sizes, gpu, engine, given)
    host = host_memory(model, config, sizes)
    checkpoint = host.save * sizes.num_train_nodes + host.export
    save_seconds = checkpoint / (given.save_gb_per_second * 1e9)
    period = config.checkpointing.save_period if config.checkpointing.enabled else 0
    configured = replace(
        loop(config, sizes, engine, speeds, given), save_seconds=save_seconds, save_period=max(period, 0)
    )
    table = what_if(configured, sizes)
    return StagePlan(
        launch=launch,
        stage=stage,
        scale=args.scale,
        platform=args.platform,
        config=config,
        sizes=sizes,
        model=model,
        is_model_given=is_tiny or bool(given_model),
        trainer=trainer,
        host=host,
        engine=engine,
        teachers=() if is_tiny else teachers(model, config, sizes, gpu, given),
        gpu_bytes=None if is_tiny else gpu.memory_gib * GIB,
        given=given,
        loop=configured,
        expected=next(row for row in table if row.generation_nodes == sizes.num_generation_nodes),
        what_if=tuple(table),
        other_ages=tuple(
            _simulate(configured, sizes, sizes.num_generation_nodes, age)
            for age in (0, 1, 2)
            if age != configured.max_age
        ),
        checkpoint_bytes=checkpoint,
        save_seconds=save_seconds,
        start=start_volumes(model, sizes, launch.contract.values, root=ROOT, image_bytes=given.image_gb * 1e9),
    )


def what_if(configured: Loop, sizes: Derived) -> list[WhatIf]:
    """Simulate the configured and other numbers of generation nodes with the same trainer."""
    if sizes.is_one_node:  # the node trains as well, so its engines are fixed
        return [_simulate(configured, sizes, 1, configured.max_age)]
    counts = sorted({max(1, round(share * sizes.num_generation_nodes)) for share in _SHARES})
    return [_simulate(configured, sizes, count, configured.max_age) for count in counts]


def _simulate(configured: Loop, sizes: Derived, nodes: int, max_age: int) -> WhatIf:
    engines = max(1, sizes.num_engines * nodes // sizes.num_generation_nodes)
    gpus_per_node = sizes.total_gpus // sizes.num_nodes
    changed = replace(configured, num_engines=engines, max_age=max_age)
    return WhatIf(
        generation_nodes=nodes,
        num_engines=engines,
        max_age=max_age,
        total_gpus=sizes.total_gpus + (nodes - sizes.num_generation_nodes) * gpus_per_node,
        forecast=forecast(changed, seed=_SEED, num_steps=_SIMULATED_STEPS),
    )


def architecture(given: str, stage: Stage, is_tiny: bool) -> Architecture:
    """Return the sizes of the model in the directory that is given, else of the scale's or the stage's own model."""
    directory = model_directory(given, is_tiny)
    return read_architecture(directory) if directory else published(stage.id)


def model_directory(given: str, is_tiny: bool) -> Path | None:
    """Return the directory that is given, else the tiny scale's own; None for a published model."""
    if given:
        path = Path(model_path(given))
        if hub_name(given) and not path.is_dir():
            wrong, fix = taken_for(given, "MODEL_PATH")
            raise InputError(Problem(where=given, wrong=wrong, fix=fix))
        return path
    if is_tiny and not (ROOT / TINY_MODEL).is_dir():
        fix = "run `make tiny`, which makes it, or set MODEL_PATH"
        raise InputError(Problem(where=TINY_MODEL, wrong="there is no such directory", fix=fix))
    return ROOT / TINY_MODEL if is_tiny else None


def assumptions(args: argparse.Namespace, stage: Stage, is_tiny: bool) -> Assumptions:
    """Return the assumptions: defaults, then those of the stage, a run and the command line; the last one wins."""
    values = OF_TINY if is_tiny else OF_STAGE.get(stage.name, {})
    if args.from_run:
        values = values | lengths_of_run(args.from_run)
    named = {field.name: getattr(args, field.name) for field in fields(Assumptions)}
    return replace(Assumptions(), **(values | {name: value for name, value in named.items() if value is not None}))


def lengths_of_run(run_dir: Path) -> dict[str, float]:
    """Return lengths, turns and environment seconds of a run, averaged over its last ten steps."""
    run = load_run(run_dir)
    keys = {
        "generated_tokens": "train/gen_tokens_per_sample/mean",
        "turns": "train/turns_per_sample/mean",
        "environment_seconds": "train/env_duration_s",
    }
    newest = {name: run.column(key).values[-10:] for name, key in keys.items()}
    found = {name: sum(values) / len(values) for name, values in newest.items() if values}
    total = run.column("train/total_tokens_per_sample/mean").values[-10:]
    if total and "generated_tokens" in found:
        found["prompt_tokens"] = sum(total) / len(total) - found["generated_tokens"]
    if "turns" in found and "environment_seconds" in found:
        found["environment_seconds"] /= max(found["turns"], 1.0)  # the metric is the sum over the turns of a rollout
    return found


def as_json(plan: StagePlan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "stage": plan.stage.id,
        "scale": plan.scale,
        "platform": plan.platform,
        "sizes": asdict(plan.sizes),
        "model": {**asdict(plan.model), "parameters": plan.model.parameters, "active": plan.model.active_parameters},
        "trainer_bytes_per_gpu": {**asdict(plan.trainer), "total": plan.trainer.total},
        "host_bytes_per_node": {**asdict(plan.host), "total": plan.host.total},
        "engine_bytes_per_gpu": {**asdict(plan.engine), "total": plan.engine.total},
        "teachers": [asdict(one) for one in plan.teachers],
        "gpu_bytes": plan.gpu_bytes,
        "expected": _row(plan.expected),
        "gpu_hours_per_save": plan.expected.gpu_hours * max(plan.config.checkpointing.save_period, 1),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "routes_bytes_per_token": packed_routes(plan.model, plan.config),
        "save_seconds": plan.save_seconds,
        "read_at_start": [{**asdict(one), "total_bytes": one.total_bytes} for one in plan.start],
        "what_if": [_row(row) for row in plan.what_if],
        "other_ages": [_row(row) for row in plan.other_ages],
        "enough_generation_nodes": plan.enough.generation_nodes if plan.enough else None,
        "longest_rollout_seconds": plan.longest_rollout_seconds,
        "assumptions": asdict(plan.given),
    }


def _row(row: WhatIf) -> dict[str, Any]:
    return {**asdict(row), "gpu_hours_per_step": row.gpu_hours}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", required=True, help="id or name of a stage")
    parser.add_argument("--scale", choices=SCALES, default="prod")
    parser.add_argument("--platform", choices=PLATFORMS, default="h100")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="take lengths and environment times of a run")
    parser.add_argument("--gpu-memory-gib", type=amount, help="memory of one GPU; default: the platform's")
    group = parser.add_argument_group("assumptions")
    for field in fields(Assumptions):
        text = f"{field.metadata['meaning']} (default {field.default:g}, or the stage's)"
        kind = _amount_or_none if field.name in _MAY_BE_0 else amount
        group.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    return parser.parse_intermixed_args(argv)


def _amount_or_none(text: str) -> float:
    return 0.0 if text.strip("0") in ("", ".") else amount(text)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan."""
    args = parse(argv)
    plan = make_plan(args)
    print(json.dumps(as_json(plan), indent=1) if args.json else render(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
