"""Memory per GPU of a policy worker and of an engine, part by part, in bytes.

Trainer: weights, gradients and optimizer state as Megatron's distributed optimizer keeps them, and the activations of
one packed micro-batch. Engine: weights, and the rest of `gpu_memory_utilization` for KV cache and Mamba states.
These are estimates; buffers of libraries are one assumed number. Activations and logits of tiny models of each family
are within 10 % of what a step allocates on a CPU (tests/functional/test_memory.py).

Activations are what the layers keep for the backward pass, and what that pass adds, counted from the code of
recipes/policy, on CUDA and on a CPU. One kind of layer differs: the kernels of
`mamba_ssm` compute most of a Mamba-2 layer again in the backward pass, which their stand-in on a CPU does not.

Also what the nodes of a job read from shared file systems before the first step, in bytes. The engines are not in it:
they start without weights and get them from the policy, over the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.config.keys.derive import Derived, is_adapted, keeps_start
from recipes.config.tree import Config, MegatronConfig
from recipes.types import PUSH_BUCKET_BYTES
from tools.job.compile_cache import seed_path
from tools.sizing.architecture import Architecture

_CODE = ("recipes", "tools", "configs")  # of the snapshot, what nodes read
_BYTES_PER_WEIGHT = 2  # start weights are stored in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartVolume:
    """One thing that several nodes read."""

    what: str
    node_bytes: float
    num_nodes: int
    note: str

    @property
    def total_bytes(self) -> float:
        """Bytes that the file system serves for all nodes together."""
        return self.node_bytes * self.num_nodes


def start_volumes(
    model: Architecture, sizes: Derived, contract: Mapping[str, str], *, root: Path, image_bytes: float
) -> tuple[StartVolume, ...]:
    """Return what is read, largest first. `image_bytes` is assumed where CONTAINER is no file."""
    image, cache = Path(contract["CONTAINER"] or "-"), contract["PERSISTENT_CACHE"]
    seed = seed_path(Path(cache)) if cache else None
    files = (file for top in _CODE for file in (root / top).rglob("*") if file.suffix != ".pyc" and file.is_file())
    code = sum(file.stat().st_size for file in files)
    found = (
        StartVolume(
            what="start weights",
            node_bytes=float(model.parameters * _BYTES_PER_WEIGHT),
            num_nodes=sizes.num_train_nodes,
            note="at most; the engines get theirs from the policy",
        ),
        StartVolume(
            what="container image",
            node_bytes=float(image.stat().st_size) if image.is_file() else image_bytes,
            num_nodes=sizes.num_nodes,
            note="the file CONTAINER" if image.is_file() else "assumed",
        ),
        StartVolume(
            what="compiled kernels",
            node_bytes=float(seed.stat().st_size) if seed is not None and seed.is_file() else 0.0,
            num_nodes=sizes.num_nodes,
            note="one file in PERSISTENT_CACHE, unpacked on each node's own disk",
        ),
        StartVolume(what="code", node_bytes=float(code), num_nodes=sizes.num_nodes, note="the snapshot of the run"),
    )
    return tuple(sorted(found, key=lambda one: -one.total_bytes))


_MAMBA_CHUNK = 128  # tokens; training keeps one state per chunk of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """One layer's activations in bytes."""

    kept: float  # from its forward to its backward pass; its own input and the output of its norm included
    working: float  # gradients that its backward pass holds at once


def activations(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> LayerActivations:
    """Return what all layers of a pipeline stage keep for `tokens` tokens per GPU, and what the worst of them adds.

    With recomputation a layer keeps its input, and the backward pass holds all activations of one layer.
    """
    stage, stream = megatron.pipeline_model_parallel_size, _stream(model, megatron, tokens, width)
    own, counts = layer_activations(model, megatron, tokens, width), _counts(model)
    if model.has_pairs:
        (other,) = [kind for kind, count in counts.items() if count and kind != "attention"]
        both = (own["attention"], own[other])
        own = {"pair": LayerActivations(kept=sum(x.kept for x in both), working=max(x.working for x in both))}
        counts = {"pair": model.attention_layers}
    built = [(own[kind], count) for kind, count in counts.items() if count]
    if megatron.activation_checkpointing:
        return LayerActivations(
            kept=sum(counts.values()) / stage * stream, working=max(layer.kept + layer.working for layer, _ in built)
        )
    return LayerActivations(
        kept=sum(layer.kept * count for layer, count in built) / stage, working=max(layer.working for layer, _ in built)
    )


def head_activations(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> LayerActivations:
    """Return what the multi-token heads keep, each of which is one layer of attention and one of experts.

    With recomputation a head keeps the state and the embedding that it starts from. The states before the first head
    and after the last one are kept as well.
    """
    count, stream = megatron.mtp_num_layers, _stream(model, megatron, tokens, width)
    if not count:
        return LayerActivations(kept=0.0, working=0.0)
    own = layer_activations(model, megatron, tokens, width)
    parts = (own["attention"], own["moe"])
    # Both inputs of a head, their norms side by side, and the state before the last norm.
    head = 5 * stream + sum(part.kept for part in parts)
    working = 2 * stream + max(part.working for part in parts)  # with the gradients of two states
    if megatron.activation_checkpointing:
        return LayerActivations(kept=2 * (count + 1) * stream, working=head + working)
    return LayerActivations(kept=count * head + 2 * stream, working=working)


def layer_activations(
    model: Architecture, megatron: MegatronConfig, tokens: float, width: int
) -> Mapping[str, LayerActivations]:
    """Return the activations of one layer of each kind on one GPU."""
    tensor, stream = megatron.tensor_model_parallel_size, _stream(model, megatron, tokens, width)
    of_parts = {
        "attention": _attention(model, tokens, width, tensor, has_fused_rotation=megatron.apply_rope_fusion),
        "mamba": _mamba(model, tokens, width, tensor),
        "mlp": _mlp(model, tokens * model.mlp_size * width / tensor),
        "moe": _moe(model, megatron, tokens, width),
    }
    return {
        kind: LayerActivations(kept=2 * stream + kept, working=working) for kind, (kept, working) in of_parts.items()
    }


def _stream(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> float:
    """Return the bytes of the state between two layers."""
    return tokens * model.hidden * width / (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def _counts(model: Architecture) -> dict[str, int]:
    return {
        "attention": model.attention_layers,
        "mamba": model.mamba_layers,
        "mlp": model.mlp_layers,
        "moe": model.moe_layers,
    }


def _attention(
    model: Architecture, tokens: float, width: int, tensor: int, *, has_fused_rotation: bool
) -> tuple[float, float]:
    """Return what is kept: queries, keys, values and the output twice; before their norms; sines, sums of scores."""
    queries, all_heads = model.query_heads, model.query_heads + 2 * model.kv_heads
    heads = 2 * queries + all_heads + (all_heads if model.norms_heads else 0)
    rotation = model.head_size * width if model.rotates_heads and not has_fused_rotation else 0
    kept = tokens * (heads * model.head_size * width / tensor + rotation + 4 * queries / tensor)
    return kept, tokens * (queries + all_heads) * model.head_size * width / tensor


def _mamba(model: Architecture, tokens: float, width: int, tensor: int) -> tuple[float, float]:
    """Return what the kernels keep; the backward pass needs as much again."""
    mixed = model.mamba_inner + 2 * model.mamba_groups * model.mamba_state
    states = tokens / _MAMBA_CHUNK * model.mamba_inner * model.mamba_state * 4
    kept = (tokens * (2 * mixed + 3 * model.mamba_inner) * width + states) / tensor
    return kept, kept


def _mlp(model: Architecture, inner: float) -> tuple[float, float]:
    """Return what an MLP keeps of `inner` bytes per matrix, and the gradients of them that are there at once.

    With a gate: both parts of the first product, and what they become. Without one: the activation before and after
    its square.
    """
    return (3 if model.is_gated else 2) * inner, 3 * inner


def _gathered(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> float:
    """Return the bytes of the tokens of all ranks that share the experts, where each rank gathers them.

    In the backward pass these are gradients of outputs, in float32 as they are added up, and of inputs.
    """
    if megatron.moe_token_dispatcher_type != "allgather":
        return 0.0
    ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return tokens / megatron.tensor_model_parallel_size * ranks * model.expert_hidden * (4 + 2 * width)


def _moe(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> tuple[float, float]:
    """Return the activations of experts, shared expert and router.

    Tokens are split over the tensor ranks before routing; with even routing each rank receives as many as it sends.
    """
    tensor = megatron.tensor_model_parallel_size
    routed = tokens / tensor * model.experts_per_token
    inner = routed * model.expert_size * width
    kept, _ = _mlp(model, inner)
    working = (3 if model.is_gated else 2) * inner
    kept += routed * (model.expert_hidden + model.expert_size) * width  # input, and the product with the router's share
    shared_kept, shared_working = _mlp(model, tokens * model.shared_size * width / tensor)
    latent = tokens / tensor * model.expert_hidden * width if model.expert_hidden != model.hidden else 0.0
    scores = 3 * tokens / tensor * model.experts * 4
    working += _gathered(model, megatron, tokens, width)
    working += 2 * routed * model.expert_hidden * width  # the gradients of inputs and outputs, each in its two orders
    both = working + shared_working if megatron.moe_shared_expert_overlap else max(working, shared_working)
    return kept + shared_kept + latent + scores, both


GIB = 2**30
_OFFLOADED = 16  # bytes of a parameter whose optimizer is a CPU's: weight, gradient and two moments in float32
_PACKED = 0.8  # bytes of a choice of an expert on its way, of two: measured with 22 of 512
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one policy worker's GPU, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # that are kept for the backward pass
    backward: float  # what its worst moment adds: the logits, or one layer
    routes: float  # that are replayed in the micro-batch
    other: float  # assumed: CUDA context, NCCL and allocator

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.backward + self.routes + self.other


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
class PushVolume:
    """What one weight push sends to every rank of every engine, and what it needs there."""

    num_tensors: int  # a block of experts is one
    num_bytes: float
    received: float  # bytes on one GPU of an engine, at most, beside the weights


def push_volume(model: Architecture, config: Config) -> PushVolume:
    """Return what a push sends: all tensors, the experts of a layer in blocks (recipes/policy/families/gather.py).

    An engine holds two buckets and one whose tensors wait for others of their layer; the largest tensor is one bucket's
    end. A layer of experts is made anew beside the one in use, and perhaps once more in the form of its kernel.
    """
    policy, vllm = config.policy, config.policy.generation.vllm_cfg
    width = _BYTES[policy.precision]
    heads = int(model.has_heads)
    matrix = model.experts * model.expert_hidden * model.expert_size * width  # of all experts of one layer
    layer_blocks = max(policy.megatron_cfg.expert_model_parallel_size, -(-matrix // PUSH_BUCKET_BYTES))
    num_tensors = (
        (2 if model.is_tied else 3)
        + (model.attention_layers + heads) * (7 if model.norms_heads else 5)
        + model.mamba_layers * 9
        + model.mlp_layers * (model.matrices + 1)
        + (model.moe_layers + heads) * (3 + model.matrices * bool(model.shared_size))
        + (model.moe_layers + heads) * (2 if model.expert_hidden != model.hidden else 0)
        + (model.moe_layers + heads) * model.matrices * layer_blocks * bool(model.experts)
    )
    of_heads = heads * (model.attention_parameters + model.moe_shared_parameters + 2 * model.hidden**2)
    of_heads += heads * model.experts * model.expert_parameters
    ranks = vllm.tensor_parallel_size
    return PushVolume(
        num_tensors=num_tensors,
        num_bytes=float((model.parameters + of_heads) * width),
        received=3.0 * PUSH_BUCKET_BYTES
        + max(PUSH_BUCKET_BYTES, model.vocab * model.hidden * width)
        + 2 * model.experts * model.expert_parameters * width / ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one GPU of an engine, in bytes, and how many sequences its caches hold."""

    weights: float
    other: float  # assumed: activations, graphs, communication
    cache: float
    push: float  # received tensors of a weight push: outside of gpu_memory_utilization
    cache_per_token: float
    state_per_sequence: float
    routes: float  # in the memory of its node: the routes of all tokens that the caches hold, at most

    @property
    def total(self) -> float:
        return self.weights + self.other + self.cache + self.push

    def sequences(self, tokens: float) -> int:
        """Return how many sequences of `tokens` tokens fit at once."""
        each = self.cache_per_token * tokens + self.state_per_sequence
        return max(0, int(self.cache / each)) if each else 0


def trainer_memory(model: Architecture, config: Config, sizes: Derived, *, other: float) -> TrainerMemory:
    """Return the memory of one policy worker while it trains a full micro-batch."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    width = _BYTES[policy.precision]
    dense, experts, dense_copies, expert_copies = _local_parameters(model, megatron, sizes.train_gpus)
    trained, added = _trained_parameters(model, megatron, sizes.train_gpus), sum(_adapter_parameters(model, megatron))
    is_carried = model.has_heads and not megatron.mtp_num_layers  # heads that are not trained are weights alone
    carried = sum(_head_parameters(model, megatron)) if is_carried else 0.0
    optimizer = megatron.optimizer
    each = _state_bytes(config)
    shards = (dense_copies, expert_copies) if optimizer.use_distributed_optimizer else (1, 1)
    in_fp32 = megatron.distributed_data_parallel_config.grad_reduce_in_fp32
    tokens = policy.sequence_packing.train_mb_tokens / megatron.context_parallel_size
    layers, heads = activations(model, megatron, tokens, width), head_activations(model, megatron, tokens, width)
    if megatron.freeze_trunk:  # nothing of it is kept: one layer after another is there while it runs
        built = [kind for kind, count in _counts(model).items() if count]
        own = layer_activations(model, megatron, tokens, width)
        layers = LayerActivations(kept=0.0, working=max(own[kind].kept for kind in built))
    return TrainerMemory(
        weights=(dense + experts + carried + added) * width,
        gradients=sum(trained) * (4 if in_fp32 or width == 4 else 2),
        optimizer=(1.0 - _offloaded_share(megatron)) * each * (trained[0] / shards[0] + trained[1] / shards[1]),
        activations=layers.kept + heads.kept,
        backward=max(layers.working, heads.working, _logits(model, config, tokens, width)),
        routes=_choices(model, config) * tokens * 2 / megatron.pipeline_model_parallel_size,
        other=other,
    )


def packed_routes(model: Architecture, config: Config) -> float:
    """Return the bytes of the routes of one token beside its id, in the object store and in checkpoints."""
    return _choices(model, config) * _PACKED


def _choices(model: Architecture, config: Config) -> int:
    """Return how many experts of one token are replayed."""
    return model.moe_layers * model.experts_per_token if config.policy.router_replay.enabled else 0


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
    changing = sum(_trained_parameters(model, megatron, sizes.train_gpus)) if megatron.peft.enabled else dense + experts
    reference = changing * width * workers if keeps_start(config) else 0.0
    # The ranks that hold a tensor share the work of saving it.
    copies = (dense_copies, expert_copies) if megatron.optimizer.use_distributed_optimizer else (1, 1)
    trained = _trained_parameters(model, megatron, sizes.train_gpus)
    kept = trained if megatron.peft.enabled else (dense, experts)  # of the weights, in a checkpoint
    owned = (trained[0] / dense_copies, trained[1] / expert_copies)
    state = _state_bytes(config) * (trained[0] / copies[0] + trained[1] / copies[1])
    aside = (1.0 - _offloaded_share(megatron)) * state
    saved = _state_bytes(config) * sum(owned) if checkpointing.save_optimizer else 0.0
    return HostMemory(
        reference=reference,
        reference_pass=reference,
        offloaded=_offloaded_share(megatron) * _OFFLOADED * sum(owned) * workers,
        aside=aside * workers if config.policy.offload_optimizer_for_logprob else 0.0,
        save=(width * (kept[0] / dense_copies + kept[1] / expert_copies) + saved) * workers
        if checkpointing.enabled
        else 0.0,
        export=float(model.parameters * width) if checkpointing.enabled else 0.0,
    )


def _local_parameters(model: Architecture, megatron: MegatronConfig, gpus: int) -> tuple[float, float, int, int]:
    """Return (dense parameters, expert parameters) of one GPU, and how many GPUs hold a copy of each."""
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert_ways = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    of_heads = _head_parameters(model, megatron) if megatron.mtp_num_layers else (0.0, 0.0)
    whole = model.moe_layers * model.whole_moe_parameters
    return (
        ((model.dense_parameters - whole) / tensor + whole) / pipeline + of_heads[0],
        model.all_expert_parameters / (expert_ways * pipeline) + of_heads[1],
        max(gpus // (tensor * pipeline), 1),
        max(gpus // (expert_ways * pipeline), 1),
    )


def _trained_parameters(model: Architecture, megatron: MegatronConfig, gpus: int) -> tuple[float, float]:
    """Return (dense parameters, expert parameters) of one GPU that have gradients and optimizer state."""
    heads = _head_parameters(model, megatron) if megatron.mtp_num_layers else (0.0, 0.0)
    if megatron.freeze_trunk:
        return heads
    if megatron.peft.enabled:
        dense, experts = _adapter_parameters(model, megatron)
        return dense + heads[0], experts + heads[1]
    return _local_parameters(model, megatron, gpus)[:2]


def _adapter_parameters(model: Architecture, megatron: MegatronConfig) -> tuple[float, float]:
    """Return the parameters of the adapters of dense layers and of routed experts, on one GPU: recipes/policy/lora.py.

    Tensor ranks share the outputs of the first layer of a pair, and the inputs of the second.
    """
    peft, tensor, hidden, fused = megatron.peft, megatron.tensor_model_parallel_size, model.hidden, model.matrices - 1
    if not peft.enabled:
        return 0.0, 0.0
    mixed = 2 * model.mamba_inner + 2 * model.mamba_groups * model.mamba_state + model.mamba_heads
    heads = model.head_size * (model.query_heads + 2 * model.kv_heads)
    pairs = {  # of each kind: its layers, the names of two, and what tensor ranks share of each
        "self_attention": (
            model.attention_layers,
            "linear_qkv linear_proj",
            heads,
            model.query_heads * model.head_size,
        ),
        "mixer": (model.mamba_layers, "in_proj out_proj", mixed, model.mamba_inner),
        "mlp": (model.mlp_layers, "linear_fc1 linear_fc2", fused * model.mlp_size, model.mlp_size),
        "mlp.shared_experts": (
            model.moe_layers * bool(model.shared_size),
            "linear_fc1 linear_fc2",
            fused * model.shared_size,
            model.shared_size,
        ),
    }
    dense = sum(
        layers * peft.dim * (hidden + shared / tensor)
        for parent, (layers, names, *sizes) in pairs.items()
        for name, shared in zip(names.split(), sizes, strict=True)
        if is_adapted(f"{parent}.{name}", peft)
    )
    experts = sum(
        model.moe_layers * model.experts / megatron.expert_model_parallel_size * peft.dim * (model.expert_hidden + size)
        for name, size in (("linear_fc1", fused * model.expert_size), ("linear_fc2", model.expert_size))
        if is_adapted(f"mlp.experts.{name}", peft)
    )
    stages = megatron.pipeline_model_parallel_size
    return dense / stages, experts / stages


def _head_parameters(model: Architecture, megatron: MegatronConfig) -> tuple[float, float]:
    """Return (dense parameters, expert parameters) of the multi-token heads, on each GPU of the last stage."""
    whole = model.whole_moe_parameters + 2 * model.hidden**2
    split = model.attention_parameters + model.moe_shared_parameters - model.whole_moe_parameters
    ways = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return split / megatron.tensor_model_parallel_size + whole, model.experts * model.expert_parameters / ways


def engine_memory(model: Architecture, config: Config, *, gpu: float, other: float) -> EngineMemory:
    """Return the memory of one GPU of an engine; `gpu` is the size of its memory in bytes."""
    vllm, extra = config.policy.generation.vllm_cfg, config.policy.generation.vllm_kwargs
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    width = _BYTES[vllm.precision]
    whole = model.moe_layers * model.whole_moe_parameters
    weights = ((model.parameters - whole) / tensor + whole) * width / pipeline
    fixed = extra.get("kv_cache_memory_bytes")
    cache = float(fixed) if fixed else max(0.0, gpu * vllm.gpu_memory_utilization - weights - other)
    kv_width = _BYTES.get(vllm.kv_cache_dtype, width)
    kv_heads = max(model.kv_heads / tensor, 1) if model.kv_heads else 0  # with fewer heads than GPUs: copies
    state_width = _BYTES.get(str(extra.get("mamba_ssm_cache_dtype")), width)
    mixed = model.mamba_inner + 2 * model.mamba_groups * model.mamba_state
    per_token = 2 * model.attention_layers * kv_heads * model.head_size * kv_width / pipeline
    # vLLM reports all layers, also those without experts, in one byte each where that is enough.
    choices = model.num_layers * model.experts_per_token * (1 if model.experts <= 256 else 2)
    is_reported = vllm.enable_return_routed_experts and model.experts > 0 and per_token > 0
    state = model.mamba_inner * model.mamba_state * state_width + mixed * max(model.mamba_kernel - 1, 0) * width
    return EngineMemory(
        weights=weights,
        other=0.0 if fixed else other,
        cache=cache,
        push=0.0 if fixed else push_volume(model, config).received,
        cache_per_token=per_token,
        state_per_sequence=model.mamba_layers * state / (tensor * pipeline),
        routes=cache / per_token * choices if is_reported else 0.0,
    )
