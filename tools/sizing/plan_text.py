"""The plan of a stage as text, for a person who decides whether to submit it."""

from __future__ import annotations

from dataclasses import fields

from tools.report.axis import format_seconds
from tools.sizing.memory import GIB
from tools.sizing.speed import Assumptions
from tools.sizing.stage_plan import StagePlan, WhatIf

_FULL = 0.95  # share of a GPU's memory above which a plan does not fit


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
    length = plan.given.prompt_tokens + plan.given.generated_tokens
    longest = plan.config.policy.max_total_sequence_length
    lines = [
        f"model     {model.name}: {_tokens(model.parameters)} parameters, {_tokens(model.active_parameters)} "
        "active per token",
        f"{f'memory per GPU, {unit}':<24}{'trainer':>8}{'engine':>9}",
        row("weights", trainer.weights, engine.weights),
        row("gradients", trainer.gradients, None),
        row("optimizer state", trainer.optimizer, None),
        row("activations", trainer.activations, None, f"of a micro-batch of {tokens:,} tokens"),
        row("backward pass", trainer.backward, None),
        row("caches", None, engine.cache, _cache_note(plan, length, longest)),
        row("other", trainer.other, engine.other, "CUDA, NCCL, allocator, graphs"),
        row("total", trainer.total, engine.total, "" if plan.gpu_bytes is None else _fits(plan, plan.gpu_bytes)),
    ]
    return lines


def _cache_note(plan: StagePlan, length: float, longest: int) -> str:
    mean, worst = plan.engine.sequences(length), plan.engine.sequences(longest)
    return f"{mean:,} sequences of {length:,.0f} tokens (expected mean), or {worst:,} of {longest:,} (the longest)"


def _fits(plan: StagePlan, gpu_bytes: float) -> str:
    share = max(plan.trainer.total, plan.engine.total) / gpu_bytes
    verdict = "fits" if share <= _FULL else "DOES NOT FIT"
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
    if plan.gpu_bytes:
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
