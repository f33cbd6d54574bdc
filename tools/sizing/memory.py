"""Memory per GPU of a policy worker and of an engine, part by part, in bytes.

Trainer: weights, gradients and optimizer state as Megatron's distributed optimizer keeps them, and the activations of
one packed micro-batch. Engine: weights, and the rest of `gpu_memory_utilization` for KV cache and Mamba states.
These are estimates; buffers of libraries are one assumed number. Activations and logits of tiny models of each family
are within 10 % of what a step allocates on a CPU (tests/functional/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.config.keys.derive import Derived
from recipes.config.tree import Config, MegatronConfig
from tools.sizing.activations import activations
from tools.sizing.architecture import Architecture

GIB = 2**30
_OFFLOADED = 16  # bytes of a parameter whose optimizer is a CPU's: weight, gradient and two moments in float32
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one policy worker's GPU, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # that are kept for the backward pass
    backward: float  # what its worst moment adds: the logits, or one layer
    other: float  # assumed: CUDA context, NCCL and allocator

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.backward + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What the policy workers of one node keep in the node's own memory at most, beside what training on a CPU needs.

    In bytes. A save in the background holds its copy until it is written, so all parts can be there at once.
    """

    reference: float  # the weights that the stage started from
    reference_pass: float  # the trained weights, while the reference policy has their place
    offloaded: float  # the optimizer's share of the CPU: its state, weights and gradients, all in float32
    aside: float  # the state of the GPU's share, while log-probabilities are computed
    save: float  # weights and optimizer state of a checkpoint
    export: float  # the whole model, on the node of the first rank

    @property
    def total(self) -> float:
        return self.reference + self.reference_pass + self.offloaded + self.aside + self.save + self.export


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one GPU of an engine, in bytes, and how many sequences its caches hold."""

    weights: float
    other: float  # assumed: activations, graphs, communication
    cache: float
    cache_per_token: float
    state_per_sequence: float

    @property
    def total(self) -> float:
        return self.weights + self.other + self.cache

    def sequences(self, tokens: float) -> int:
        """Return how many sequences of `tokens` tokens fit at once."""
        each = self.cache_per_token * tokens + self.state_per_sequence
        return max(0, int(self.cache / each)) if each else 0


def trainer_memory(model: Architecture, config: Config, sizes: Derived, *, other: float) -> TrainerMemory:
    """Return the memory of one policy worker while it trains a full micro-batch."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    width = _BYTES[policy.precision]
    dense, experts, dense_copies, expert_copies = _local_parameters(model, megatron, sizes.train_gpus)
    is_carried = model.has_heads and not megatron.mtp_num_layers  # heads that are not trained are weights alone
    carried = sum(_head_parameters(model, megatron)) if is_carried else 0.0
    optimizer = megatron.optimizer
    each = _state_bytes(config)
    shards = (dense_copies, expert_copies) if optimizer.use_distributed_optimizer else (1, 1)
    in_fp32 = megatron.distributed_data_parallel_config.grad_reduce_in_fp32
    tokens = policy.sequence_packing.train_mb_tokens / megatron.context_parallel_size
    layers = activations(model, megatron, tokens, width)
    return TrainerMemory(
        weights=(dense + experts + carried) * width,
        gradients=(dense + experts) * (4 if in_fp32 or width == 4 else 2),
        optimizer=(1.0 - _offloaded_share(megatron)) * each * (dense / shards[0] + experts / shards[1]),
        activations=layers.kept,
        backward=max(layers.working, _logits(model, config, tokens, width)),
        other=other,
    )


def _state_bytes(config: Config) -> int:
    """Return the bytes of one parameter's optimizer state: two float32 moments of Adam, or the momentum of SGD.

    Weights in 16 bits have a float32 copy as well.
    """
    moments = 8 if config.policy.megatron_cfg.optimizer.optimizer == "adam" else 4
    return moments + (4 if _BYTES[config.policy.precision] < 4 else 0)


def _offloaded_share(megatron: MegatronConfig) -> float:
    return megatron.optimizer.optimizer_offload_fraction if megatron.optimizer.optimizer_cpu_offload else 0.0


def _logits(model: Architecture, config: Config, tokens: float, width: int) -> float:
    """Return the bytes of logits and of what is computed from them at once, in float32, for one chunk of tokens.

    A copy in float32 is made of logits in 16 bits, and of those that the temperature divides.
    """
    policy = config.policy
    chunk = min(policy.logprob_chunk_size or tokens, tokens)
    is_copied = width < 4 or policy.generation.temperature != 1.0
    vocabulary = model.vocab / policy.megatron_cfg.tensor_model_parallel_size
    return vocabulary * chunk * (width + 4 + (4 if is_copied else 0))


def host_memory(model: Architecture, config: Config, sizes: Derived) -> HostMemory:
    """Return the host memory of the node with the first rank: what recipes/policy copies for reference and saves."""
    megatron, checkpointing = config.policy.megatron_cfg, config.checkpointing
    width = _BYTES[config.policy.precision]
    dense, experts, dense_copies, expert_copies = _local_parameters(model, megatron, sizes.train_gpus)
    workers = sizes.train_workers_per_node
    reference = (dense + experts) * width * workers if config.loss_fn.reference_policy_kl_penalty > 0 else 0.0
    # The ranks that hold a tensor share the work of saving it.
    copies = (dense_copies, expert_copies) if megatron.optimizer.use_distributed_optimizer else (1, 1)
    aside = (1.0 - _offloaded_share(megatron)) * _state_bytes(config) * (dense / copies[0] + experts / copies[1])
    each = width + (_state_bytes(config) if checkpointing.save_optimizer else 0)
    return HostMemory(
        reference=reference,
        reference_pass=reference,
        offloaded=_offloaded_share(megatron) * _OFFLOADED * (dense / dense_copies + experts / expert_copies) * workers,
        aside=aside * workers if config.policy.offload_optimizer_for_logprob else 0.0,
        save=each * (dense / dense_copies + experts / expert_copies) * workers if checkpointing.enabled else 0.0,
        export=float(model.parameters * width) if checkpointing.enabled else 0.0,
    )


def _local_parameters(model: Architecture, megatron: MegatronConfig, gpus: int) -> tuple[float, float, int, int]:
    """Return (dense parameters, expert parameters) of one GPU, and how many GPUs hold a copy of each."""
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert_ways = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    of_heads = _head_parameters(model, megatron) if megatron.mtp_num_layers else (0.0, 0.0)
    return (
        model.dense_parameters / (tensor * pipeline) + of_heads[0],
        model.all_expert_parameters / (expert_ways * pipeline) + of_heads[1],
        max(gpus // (tensor * pipeline), 1),
        max(gpus // (expert_ways * pipeline), 1),
    )


def _head_parameters(model: Architecture, megatron: MegatronConfig) -> tuple[float, float]:
    """Return (dense parameters, expert parameters) of the multi-token heads, on each GPU of the last stage."""
    dense = model.attention_parameters + model.moe_shared_parameters + 2 * model.hidden**2
    ways = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return dense / megatron.tensor_model_parallel_size, model.experts * model.expert_parameters / ways


def engine_memory(model: Architecture, config: Config, *, gpu: float, other: float) -> EngineMemory:
    """Return the memory of one GPU of an engine; `gpu` is the size of its memory in bytes."""
    vllm, extra = config.policy.generation.vllm_cfg, config.policy.generation.vllm_kwargs
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    width = _BYTES[vllm.precision]
    weights = model.parameters * width / (tensor * pipeline)
    fixed = extra.get("kv_cache_memory_bytes")
    cache = float(fixed) if fixed else max(0.0, gpu * vllm.gpu_memory_utilization - weights - other)
    kv_width = _BYTES.get(vllm.kv_cache_dtype, width)
    kv_heads = max(model.kv_heads / tensor, 1) if model.kv_heads else 0  # with fewer heads than GPUs: copies
    state_width = _BYTES.get(str(extra.get("mamba_ssm_cache_dtype")), width)
    mixed = model.mamba_inner + 2 * model.mamba_groups * model.mamba_state
    state = model.mamba_inner * model.mamba_state * state_width + mixed * max(model.mamba_kernel - 1, 0) * width
    return EngineMemory(
        weights=weights,
        other=0.0 if fixed else other,
        cache=cache,
        cache_per_token=2 * model.attention_layers * kv_heads * model.head_size * kv_width / pipeline,
        state_per_sequence=model.mamba_layers * state / (tensor * pipeline),
    )
