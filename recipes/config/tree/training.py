"""How the policy is trained: block `policy.megatron_cfg`.

The model: block `policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from recipes.config.tree.generation import GenerationConfig
from recipes.config.tree.marks import Honours, NoEffect, Text, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and chat template."""

    name: Text
    """directory or hub name of the tokenizer"""
    chat_template: Text | None
    """file with the chat template; null = the tokenizer's own"""
    chat_template_kwargs: Mapping[str, Any] | None
    """arguments of the chat template, e.g. enable_thinking; null = none; exports name them in tokenizer_config.json"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePackingConfig:
    """Several rollouts in one row of a micro-batch."""

    enabled: bool
    """pack rollouts; false = one padded rollout per row"""
    algorithm: Literal["modified_first_fit_decreasing"]
    """bin-packing algorithm"""
    train_mb_tokens: Annotated[int, Ge(1), Unit("tokens")]
    """tokens in one training micro-batch"""
    logprob_mb_tokens: Annotated[int, Ge(1), Unit("tokens")]
    """tokens in one log-probability micro-batch; see logprob_batch_size"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReplayConfig:
    """R3: training sends each token to the experts that the engine has sent it to; for models with experts."""

    enabled: bool
    """replay the engine's choice of experts in training passes; also switches on that engines report it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model, how it is trained and how it generates."""

    model_name: Text
    """Hugging Face directory of the start weights; the launcher sets it from MODEL_PATH"""
    tokenizer: TokenizerConfig
    hf_config_overrides: Annotated[
        Mapping[str, Any], Honours({}, reason="the trainer alone would follow them, not the engines and the export")
    ]
    """values that replace those of the model's config.json"""
    precision: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Honours("bfloat16", "float32", reason="the native policy trains in bfloat16 or float32"),
    ]
    """dtype of weights and activations"""
    max_total_sequence_length: Annotated[int, Ge(1), Unit("tokens")]
    """longest rollout trained on, prompt and all turns, in tokens"""
    train_global_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """rollouts per optimizer step: P*G, or a divisor of it for several steps on one batch (the clip is then live)"""
    train_micro_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """full-length rollouts in one training micro-batch; sets the packing budget"""
    logprob_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """full-length rollouts in one log-probability micro-batch; in the native engine, of the parity gate only"""
    logprob_chunk_size: Annotated[int | None, Ge(1), Unit("tokens")]
    """tokens whose float32 logits exist at once; null = all"""
    offload_optimizer_for_logprob: bool
    """move optimizer state to CPU memory during passes for log-probabilities alone, and back after each"""
    max_grad_norm: Annotated[float, Gt(0), Unit("L2 norm")]
    """global L2 norm to which gradients are clipped"""
    max_skipped_steps: Annotated[int, Ge(0), Unit("steps")]
    """steps in a row that may leave the weights as they are because loss or gradients are not finite; one more ends"""
    make_sequence_length_divisible_by: Annotated[int, Ge(1), Unit("tokens")]
    """pad each rollout to a multiple of this many tokens: 2*CP*TP"""
    determinism: Literal["none", "full"]
    """full: two runs of the same code, rows and seed give the same bits; one answer at a time, and no step ahead"""
    sequence_packing: SequencePackingConfig
    router_replay: RouterReplayConfig
    megatron_cfg: MegatronConfig
    generation: GenerationConfig


EXPERTS = "the native policy computes experts only in this way"
FUSED = "Transformer Engine's fused kernels are not wired in yet"
FP8 = "it needs Transformer Engine's linear layers, and the native policy has Megatron's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Megatron's optimizer."""

    optimizer: Literal["adam", "sgd"]
    """optimizer; sgd needs use_distributed_optimizer: false, since Megatron shards the state of adam only"""
    lr: Annotated[float, Gt(0), Le(1), Unit("per step")]
    """learning rate after warm-up"""
    min_lr: Annotated[float, Ge(0), Le(1), Unit("per step")]
    """learning rate at the end of the decay"""
    weight_decay: Annotated[float, Ge(0), Unit("per step and learning rate")]
    """weight decay: decoupled from the gradient with adam, added to it with sgd"""
    adam_beta1: Annotated[float, Ge(0), Lt(1), Unit("share")]
    """decay of the first moment of adam"""
    adam_beta2: Annotated[float, Ge(0), Lt(1), Unit("share")]
    """decay of the second moment of adam"""
    adam_eps: Annotated[float, Gt(0), Unit("gradient")]
    """added to the root of the second moment of adam"""
    sgd_momentum: Annotated[float, Ge(0), Lt(1), Unit("share")]
    """momentum of sgd: what a step keeps of the direction of the steps before"""
    clip_grad: Annotated[float, Ge(0), Unit("L2 norm")]
    """the same bound as policy.max_grad_norm"""
    bf16: bool
    """train in bfloat16 with float32 master weights"""
    fp16: Annotated[bool, Honours(False, reason="float16 training is not built")]
    """train in float16 with loss scaling"""
    params_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Honours("float32", reason="master weights are always float32")
    ]
    """dtype of the master weights"""
    use_distributed_optimizer: bool
    """shard optimizer state over data-parallel ranks"""
    use_precision_aware_optimizer: bool
    """Transformer Engine's fused Adam with typed state; needs that package, but not with optimizer_cpu_offload"""
    optimizer_cpu_offload: bool
    """keep optimizer state in CPU memory and take its steps there; needs use_distributed_optimizer"""
    optimizer_offload_fraction: Annotated[float, Ge(0), Le(1), Unit("share")]
    """share of the optimizer state that is kept in CPU memory; the rest stays on the GPU"""
    overlap_cpu_optimizer_d2h_h2d: bool
    """overlap the copies between CPU and GPU with the optimizer step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over training steps, each of which is a batch."""

    lr_warmup_iters: Annotated[int, Ge(0), Unit("steps")]
    """steps from lr_warmup_init to lr"""
    lr_warmup_init: Annotated[float, Ge(0), Le(1), Unit("per step")]
    """learning rate of the first step, where lr_warmup_iters is above 0"""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    """shape of the decay after warm-up"""
    lr_decay_iters: Annotated[int | None, Ge(1), Unit("steps")]
    """step at which min_lr is reached; null = no decay"""
    start_weight_decay: Annotated[float, Ge(0), Unit("per step and learning rate")]
    """weight decay at the first step"""
    end_weight_decay: Annotated[float, Ge(0), Unit("per step and learning rate")]
    """weight decay at the last step"""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    """how weight decay changes from the first step to the last"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Gradient reduction over data-parallel ranks."""

    grad_reduce_in_fp32: bool
    """reduce gradients over data-parallel ranks in float32"""
    overlap_grad_reduce: bool
    """overlap the reduction of gradients with the backward pass"""
    overlap_param_gather: bool
    """overlap the gather of sharded weights with the forward pass"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Training in 8-bit floating point. No published stage file asks for it: all train in bfloat16."""

    enabled: Annotated[bool, Honours(False, reason=FP8)]
    """train in fp8"""
    fp8: Annotated[Literal["e4m3", "hybrid"], NoEffect("fp8_cfg.enabled is false")]
    """fp8 format"""
    fp8_recipe: Annotated[Literal["blockwise", "tensorwise", "delayed", "mxfp8"], NoEffect("fp8_cfg.enabled is false")]
    """scaling recipe"""
    fp8_param: Annotated[bool, NoEffect("fp8_cfg.enabled is false")]
    """keep parameters in fp8"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """LoRA: low-rank adapters are trained beside linear layers, and the model itself stays as it is."""

    enabled: bool
    """train adapters in place of weights; checkpoints then hold them, router biases and multi-token heads alone"""
    target_modules: tuple[Literal["linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2"], ...]
    """linear layers with adapters, by Megatron's names; the package peft reads no out_proj of a hybrid model"""
    exclude_modules: tuple[Text, ...]
    """patterns of names within a layer that get none, e.g. mlp.experts.*: routed experts"""
    dim: Annotated[int, Ge(1), Unit("rank")]
    """rank of an adapter"""
    alpha: Annotated[float, Gt(0), Unit("rank")]
    """an adapter's product is multiplied by alpha / dim"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Megatron-core: parallelism, memory, mixture of experts, optimizer."""

    tensor_model_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """TP: GPUs that share each layer"""
    sequence_parallel: bool
    """split activations along the sequence between TP ranks"""
    context_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """CP: GPUs that share one sequence"""
    pipeline_model_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """PP: GPUs that hold successive layers"""
    num_layers_in_first_pipeline_stage: Annotated[int | None, Ge(1), Unit("layers")]
    """layers on the first PP stage; null = even"""
    num_layers_in_last_pipeline_stage: Annotated[int | None, Ge(1), Unit("layers")]
    """layers on the last PP stage; null = even"""
    pipeline_dtype: Literal["bfloat16", "float16", "float32"]
    """dtype of activations sent between PP stages"""
    expert_model_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """EP: GPUs that share a layer's experts"""
    expert_tensor_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """ETP: GPUs that share one expert"""
    activation_checkpointing: bool
    """recompute every layer's activations in the backward pass"""
    empty_unused_memory_level: Annotated[Literal[0, 1, 2], Unit("level")]
    """empty the CUDA cache: 0 never, 1 after the backward pass, 2 also after the step"""
    dist_ckpt_optim_fully_reshardable: bool
    """write optimizer checkpoints that any layout can resume from, not only another DP; slower, more host memory"""
    defer_fp32_logits: Annotated[bool, Honours(True, reason="the native policy never makes float32 logits as a whole")]
    """keep logits in `precision` until the chunked log-softmax"""
    attention_backend: Literal["auto", "flash", "fused", "local"]
    """attention over packed rows: Transformer Engine's choice, its flash or cuDNN kernels, or local: torch's alone"""
    apply_rope_fusion: bool
    """fused rotary embedding kernel; needs Transformer Engine"""
    bias_activation_fusion: Annotated[bool, Honours(False, reason=FUSED)]
    """fused bias and activation kernel"""
    gradient_accumulation_fusion: bool
    """add weight gradients up inside the GEMM kernel; needs CUDA and apex's fused_weight_gradient_mlp_cuda"""
    use_fused_weighted_squared_relu: bool
    """fused squared-ReLU kernel of experts without a gate; needs moe_grouped_gemm"""
    freeze_moe_router: bool
    """do not train router weights"""
    freeze_trunk: bool
    """train the multi-token heads alone (MTP healing): the weights of the model itself stay as they are, bit for bit"""
    peft: PeftConfig
    moe_router_dtype: Literal["fp32", "fp64"]
    """dtype of the router"""
    moe_router_load_balancing_type: Annotated[
        Literal["none", "aux_loss", "seq_aux_loss"], Honours("none", reason=EXPERTS)
    ]
    """auxiliary balancing loss of the router"""
    moe_router_bias_update_rate: Annotated[float, Ge(0), Unit("per step")]
    """step of the expert bias that balances load, per optimizer step; for models with such a bias"""
    moe_grouped_gemm: bool
    """one grouped GEMM for all experts of a rank, not one GEMM after another; needs Transformer Engine"""
    moe_permute_fusion: bool
    """fused token permutation kernel; needs Transformer Engine"""
    moe_enable_deepep: bool
    """DeepEP's kernels for the flex dispatcher; needs the package deep_ep and CUDA"""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"]
    """how tokens reach their experts: an exchange, all tokens to all ranks, or DeepEP's exchange (flex)"""
    moe_shared_expert_overlap: bool
    """run the shared expert beside the all-to-all exchange of tokens; not where experts are latent"""
    moe_per_layer_logging: bool
    """log per layer how many tokens the busiest expert had, over the mean"""
    mtp_num_layers: Annotated[int, Ge(0), Unit("heads")]
    """multi-token-prediction heads trained beside the policy; 0 = carried as they are, if the model has any"""
    mtp_loss_scaling_factor: Annotated[float, Ge(0), Unit("weight")]
    """weight of the loss of the multi-token-prediction heads, shared evenly by them"""
    mtp_use_repeated_layer: Annotated[bool, Honours(True, reason="published models have one layer for all heads")]
    """one layer applied mtp_num_layers times"""
    mtp_detach_heads: Annotated[bool, Honours(True, reason="the heads of the native policy are always detached")]
    """keep the gradient of these heads out of the policy"""
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    distributed_data_parallel_config: DdpConfig
    fp8_cfg: Fp8Config
    env_vars: Mapping[str, Any] | None
    """environment variables of the policy workers; null = none"""
