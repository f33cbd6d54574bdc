"""Seconds of training and generation from the sizes of a model and a GPU: rooflines with assumed efficiencies.

Nothing here was measured on a large cluster. With the defaults a step of stage 1.1 on 183 nodes takes 11 minutes and a
step of stage 2.2 on 64 nodes 25 minutes; NVIDIA's case study reports 20 minutes for its SWE steps and 7 minutes for the
steps of other environments. `make plan` prints every assumption, and ARGS overrides it. The speeds of the tiny scale
were measured with `make bench` on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import exp, log
from pathlib import Path
from random import Random
from statistics import NormalDist

from recipes.config.keys.derive import DISTILLATION, PREFERENCE, Derived, keeps_start, max_age, started_judges
from recipes.config.tree import Config
from tools.sizing.architecture import Architecture, read_architecture
from tools.sizing.memory import EngineMemory, PushVolume, push_volume
from tools.sizing.simulator import Loop

_MAX_TURNS = 12  # simulated; more turns are merged into longer ones, to limit the number of events
VLLM_MAX_NUM_SEQS = 128  # of an engine that is given none, from Python: a server has another default


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The numbers of a platform's GPU in its data sheet."""

    memory_gib: float
    tflops: float  # dense, 16 bits
    bandwidth_tb: float  # per second


GPUS = {
    "h100": Gpu(memory_gib=79.6, tflops=989.0, bandwidth_tb=3.35),
    "b200": Gpu(memory_gib=179.0, tflops=2250.0, bandwidth_tb=8.0),
}


def _assume(default: float, meaning: str) -> float:
    value: float = field(default=default, metadata={"meaning": meaning})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The assumptions of a plan; each field is an option of the command."""

    prompt_tokens: float = _assume(1000.0, "tokens of a prompt, mean")
    generated_tokens: float = _assume(12000.0, "tokens that a rollout generates, mean over all its turns")
    length_sigma: float = _assume(0.8, "spread of that length: sigma of a log-normal distribution")
    turns: float = _assume(1.0, "turns of a rollout")
    environment_seconds: float = _assume(2.0, "seconds of environment or judge after each turn, mean (exponential)")
    train_mfu: float = _assume(0.2, "share of the peak FLOP/s that training reaches")
    prefill_mfu: float = _assume(0.4, "share of the peak FLOP/s that prefill reaches")
    bandwidth_share: float = _assume(0.5, "share of the memory bandwidth that decoding reaches")
    iteration_ms: float = _assume(10.0, "milliseconds of one decoding iteration besides reading memory")
    push_gb_per_second: float = _assume(
        50.0, "GB/s of a weight push, from one GPU to all engines: one link of 400 Gbit/s"
    )
    push_tensor_ms: float = _assume(0.2, "milliseconds of vLLM's reload for one tensor of a push (make bench-scale)")
    save_gb_per_second: float = _assume(20.0, "GB/s that all ranks write to the checkpoint file system")
    image_gb: float = _assume(3.0, "GB of its container image that a node reads, where CONTAINER is no file")
    trainer_other_gib: float = _assume(6.0, "GiB per training GPU for CUDA, NCCL and the allocator")
    engine_other_gib: float = _assume(5.0, "GiB per generating GPU for activations, graphs and NCCL")

    def rollout_tokens(self, longest: int) -> float:
        """Return the tokens of a whole rollout, mean, where none may have more than `longest`."""
        room, mean, sigma = longest - self.prompt_tokens, self.generated_tokens, self.length_sigma
        cut = (log(room / mean) + sigma**2 / 2) / sigma  # in standard deviations of the logarithm
        normal = NormalDist()
        return self.prompt_tokens + mean * normal.cdf(cut - sigma) + room * (1.0 - normal.cdf(cut))


# Typical values of a stage, when they differ from the defaults. The 31,600 tokens of a swe2 rollout are published for
# Nemotron 3 Nano; the other lengths are guesses, which `--from-run` replaces.
OF_STAGE: dict[str, dict[str, float]] = {
    "swe1": {"prompt_tokens": 20000.0, "generated_tokens": 2000.0, "environment_seconds": 0.1},
    "swe2": {"prompt_tokens": 4000.0, "generated_tokens": 27600.0, "turns": 60.0, "environment_seconds": 5.0},
    "rlhf": {"prompt_tokens": 1500.0, "generated_tokens": 4000.0, "environment_seconds": 20.0},
}
OF_TINY: dict[str, float] = {
    "prompt_tokens": 28.0,
    "generated_tokens": 11.5,
    "length_sigma": 0.25,
    "environment_seconds": 0.005,
    "save_gb_per_second": 0.1,
    "trainer_other_gib": 0.0,
    "engine_other_gib": 0.0,
}
# Measured with `make bench` on two CPU cores, in seconds: an iteration takes the first plus n times the second.
_TINY_ITERATION, _TINY_PER_SEQUENCE, _TINY_TRAIN_PER_ROLLOUT, _TINY_PUSH = 0.0010, 0.000106, 0.0044, 0.022


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The durations that the simulator needs, in seconds."""

    decode_seconds: Callable[[int], float]  # one iteration with n sequences
    prefill_seconds: float  # one prompt
    train_seconds: Callable[[float], float]  # a step with so many generated tokens
    push_seconds: float
    teacher_seconds: float = 0.0  # a rollout, once it is complete


def roofline(
    model: Architecture, config: Config, sizes: Derived, gpu: Gpu, engine: EngineMemory, given: Assumptions
) -> Speeds:
    """Return the speeds that follow from a GPU's peak numbers and the assumed efficiencies."""
    vllm, megatron = config.policy.generation.vllm_cfg, config.policy.megatron_cfg
    gpus = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    bandwidth = gpu.bandwidth_tb * 1e12 * given.bandwidth_share
    expert_share = model.all_expert_parameters / model.parameters
    length = given.rollout_tokens(config.policy.max_total_sequence_length)
    context = (given.prompt_tokens + length) / 2  # of a sequence half-way
    per_sequence = engine.cache_per_token * context + 2 * engine.state_per_sequence  # a state is read and written

    @cache
    def decode_seconds(n: int) -> float:
        # The expected share of experts that receive at least one of n tokens.
        used = 1.0 - (1.0 - model.experts_per_token / model.experts) ** n if model.experts else 1.0
        read = engine.weights * (1.0 - expert_share + expert_share * used) + n * per_sequence
        return read / bandwidth + given.iteration_ms / 1000

    # In forward passes: training 3, or 2 of adapters, since weights get no gradients; recomputation 1, the reference
    # policy 1, log-probabilities before the step 1. A frozen policy has no backward pass, but its heads have.
    trained = 3 - megatron.peft.enabled + megatron.activation_checkpointing
    passes = (1 if megatron.freeze_trunk else trained) + keeps_start(config)
    passes += needs_logprobs(config, sizes)
    attention = 2 * model.query_heads * model.head_size * length  # of one layer, half of 4: causal
    per_token = (2 * model.active_parameters + model.attention_layers * attention) * passes
    per_token += megatron.mtp_num_layers * (2 * model.active_head_parameters + attention) * trained
    trainer = sizes.train_gpus * gpu.tflops * 1e12 * given.train_mfu
    prompts = given.prompt_tokens * sizes.samples_per_step
    return Speeds(
        decode_seconds=decode_seconds,
        prefill_seconds=2
        * model.active_parameters
        * given.prompt_tokens
        / (gpus * gpu.tflops * 1e12 * given.prefill_mfu),
        train_seconds=lambda tokens: per_token * (tokens + prompts) / trainer,
        push_seconds=push_seconds(push_volume(model, config), given),
        teacher_seconds=max((one.rollout_seconds for one in teachers(model, config, sizes, gpu, given)), default=0.0),
    )


def push_seconds(volume: PushVolume, given: Assumptions) -> float:
    """Return the time of a push: the wire's, then that of the loader, which runs between the receives."""
    return volume.num_bytes / (given.push_gb_per_second * 1e9) + volume.num_tensors * given.push_tensor_ms / 1000


def needs_logprobs(config: Config, sizes: Derived) -> bool:
    """Whether a step has a pass for log-probabilities: of ratios over several steps, or of advantages by token."""
    if config.policy.megatron_cfg.freeze_trunk:
        return False
    has_steps = sizes.samples_per_step > config.policy.train_global_batch_size
    return has_steps or config.loss_fn.use_kl_in_reward or config.grpo.adv_estimator.name in (DISTILLATION, PREFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLoad:
    """One teacher on engines of the run. Rows are taken to be shared evenly by all teachers."""

    name: str
    weights: float  # bytes on one of its GPUs
    rollout_seconds: float  # of one rollout, mean, that no other waits for
    step_seconds: float  # of all rollouts of a step


def teachers(
    policy: Architecture, config: Config, sizes: Derived, gpu: Gpu, given: Assumptions
) -> tuple[TeacherLoad, ...]:
    """Return what teachers cost that the run starts; one whose files are not here is taken to be of the policy's sizes.

    A teacher reads every rollout once, whole: it is a prompt.
    """
    named = set(config.grpo.adv_estimator.teachers.values())
    length = given.rollout_tokens(config.policy.max_total_sequence_length)
    found = []
    for judge in (one for one in started_judges(config) if one.name in named):
        is_here = (Path(judge.model) / "config.json").is_file()
        model = read_architecture(Path(judge.model)) if is_here else policy
        speed = judge.gpus_per_copy * gpu.tflops * 1e12 * given.prefill_mfu
        seconds = 2 * model.active_parameters * length / speed
        found.append(
            TeacherLoad(
                name=judge.name,
                weights=2 * model.parameters / judge.gpus_per_copy,
                rollout_seconds=seconds,
                step_seconds=seconds * sizes.samples_per_step / len(named) / judge.num_copies,
            )
        )
    return tuple(found)


def tiny_speeds(sizes: Derived) -> Speeds:
    """Return the speeds of the tiny model, measured on two CPU cores."""
    return Speeds(
        decode_seconds=lambda n: _TINY_ITERATION + _TINY_PER_SEQUENCE * n,
        prefill_seconds=0.0,
        train_seconds=lambda tokens: _TINY_TRAIN_PER_ROLLOUT * sizes.samples_per_step,
        push_seconds=_TINY_PUSH,
    )


def loop(config: Config, sizes: Derived, engine: EngineMemory, speeds: Speeds, given: Assumptions) -> Loop:
    """Return the loop to simulate."""
    longest = config.policy.max_total_sequence_length
    mean = log(given.generated_tokens) - given.length_sigma**2 / 2
    turns = min(max(1, round(given.turns)), _MAX_TURNS)
    environment = given.environment_seconds * max(1.0, given.turns) / turns
    taught = speeds.teacher_seconds / turns

    def draw_tokens(random: Random) -> float:
        return min(exp(random.gauss(mean, given.length_sigma)), longest - given.prompt_tokens)

    limit = config.policy.generation.vllm_kwargs.get("max_num_seqs", VLLM_MAX_NUM_SEQS)
    return Loop(
        num_prompts=config.grpo.num_prompts_per_step,
        num_generations=config.grpo.num_generations_per_prompt,
        max_age=max_age(config.grpo.async_grpo),
        num_engines=sizes.num_engines,
        max_num_seqs=max(1, min(limit, engine.sequences(given.rollout_tokens(longest)))),
        decode_seconds=speeds.decode_seconds,
        prefill_seconds=speeds.prefill_seconds,
        draw_tokens=draw_tokens,
        turns=turns,
        draw_environment_seconds=lambda random: taught + (random.expovariate(1 / environment) if environment else 0.0),
        train_seconds=speeds.train_seconds,
        refit_seconds=speeds.push_seconds,
    )
