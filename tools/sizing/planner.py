"""Plan a stage before anything is queued: nodes and GPUs, memory per GPU, tokens and seconds of a step, GPU-hours.

    python -m tools.sizing.planner --stage stage1.1 --scale prod [--json] [--generated-tokens 20000 ...] [KEY=VALUE ...]

The sizes come from the stage's configuration, or from the file in CONFIG_PATH; those of the model from
MODEL_PATH/config.json, or as published. The times come from a simulation of the loop with assumed speeds, which the
plan prints; `--from-run` takes lengths and environment times from a finished run. Exit status: 0, or 2 when an input is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import Derived, derive
from recipes.config.load import load_config, require_valid
from recipes.config.stages import PLATFORMS, SCALES, Stage, config_path, find_stage
from recipes.errors import InputError, Problem
from tools.command_line import amount, exit_status
from tools.planning.stage_env import TINY_MODEL
from tools.report.load import load_run
from tools.sizing.architecture import SUPER, Architecture, read_architecture
from tools.sizing.memory import GIB, engine_memory, host_memory, trainer_memory
from tools.sizing.plan_text import render
from tools.sizing.simulator import Loop, forecast
from tools.sizing.speed import GPUS, OF_STAGE, OF_TINY, Assumptions, loop, roofline, tiny_speeds
from tools.sizing.stage_plan import StagePlan, WhatIf
from tools.sizing.start_volume import start_volumes

ROOT = Path(__file__).resolve().parents[2]
_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the generation nodes, of the what-if table; 1: as configured
_CHECKPOINT_BYTES = 16  # per parameter: weights in 16 bits, Adam's state in 32, and the export
_SIMULATED_STEPS, _SEED = 10, 0
_MAY_BE_0 = (
    "environment_seconds",
    "refit_seconds",
    "iteration_ms",
    "trainer_other_gib",
    "engine_other_gib",
    "image_gb",
)


def make_plan(args: argparse.Namespace) -> StagePlan:
    """Return the plan of a stage; raises `InputError` for wrong inputs."""
    stage = find_stage(args.stage)
    path = os.environ.get("CONFIG_PATH") or config_path(stage, args.scale, args.platform)
    config = require_valid(load_config(path, args.overrides))
    sizes = derive(config)
    is_tiny = args.scale == "tiny"
    model = architecture(is_tiny)
    given = assumptions(args, stage, is_tiny)
    if given.prompt_tokens >= (longest := config.policy.max_total_sequence_length):
        expected = f"less than policy.max_total_sequence_length = {longest}"
        fix = "lower it: nothing could be generated after such prompts"
        raise InputError(Problem(where="--prompt-tokens", got=f"{given.prompt_tokens:g}", expected=expected, fix=fix))
    gpu = GPUS[args.platform]
    gpu = replace(gpu, memory_gib=args.gpu_memory_gib or gpu.memory_gib)
    trainer = trainer_memory(model, config, sizes, other=given.trainer_other_gib * GIB)
    engine = engine_memory(model, config, gpu=gpu.memory_gib * GIB, other=given.engine_other_gib * GIB)
    if not engine.sequences(given.prompt_tokens + given.generated_tokens):
        room = f"{engine.cache / GIB:.1f} GiB for caches beside {engine.weights / GIB:.1f} GiB of weights"
        wrong = f"no sequence of the expected length fits on an engine: one GPU has {room}"
        fix = "raise tensor_parallel_size of the engines or gpu_memory_utilization"
        raise InputError(Problem(where="policy.generation.vllm_cfg", wrong=wrong, fix=fix))
    speeds = tiny_speeds(sizes) if is_tiny else roofline(model, config, sizes, gpu, engine, given)
    checkpoint = float(model.parameters * _CHECKPOINT_BYTES)
    save_seconds = checkpoint / (given.save_gb_per_second * 1e9)
    period = config.checkpointing.save_period if config.checkpointing.enabled else 0
    configured = replace(
        loop(config, sizes, engine, speeds, given), save_seconds=save_seconds, save_period=max(period, 0)
    )
    table = what_if(configured, sizes)
    return StagePlan(
        stage=stage,
        scale=args.scale,
        platform=args.platform,
        config=config,
        sizes=sizes,
        model=model,
        trainer=trainer,
        host=host_memory(model, config, sizes),
        engine=engine,
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
        start=start_volumes(model, sizes, root=ROOT, image_bytes=given.image_gb * 1e9),
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


def architecture(is_tiny: bool) -> Architecture:
    """Return the sizes of the model in MODEL_PATH, else of the scale's own model."""
    given = os.environ.get("MODEL_PATH", "")
    if given:
        return read_architecture(Path(given))
    if is_tiny and not (ROOT / TINY_MODEL).is_dir():
        fix = "run `make tiny`, which makes it, or set MODEL_PATH"
        raise InputError(Problem(where=TINY_MODEL, wrong="there is no such directory", fix=fix))
    return read_architecture(ROOT / TINY_MODEL) if is_tiny else SUPER


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
        "gpu_bytes": plan.gpu_bytes,
        "expected": _row(plan.expected),
        "gpu_hours_per_save": plan.expected.gpu_hours * max(plan.config.checkpointing.save_period, 1),
        "checkpoint_bytes": plan.checkpoint_bytes,
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
