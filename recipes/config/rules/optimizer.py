"""Number formats, clipping, learning-rate schedule and offloading of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.derive import DISTILLATION, PREFERENCE
from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.validation import MEGATRON, OPTIMIZER, SCHEDULER
from recipes.config.tree import Config

# What each optimizer does not read, with the values of configs/grpo_base.yaml, which every file inherits.
UNREAD: dict[str, dict[str, float]] = {
    "adam": {"sgd_momentum": 0.9},
    "sgd": {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
}


def dtypes_agree(config: Config) -> Iterator[KeyProblem]:
    """Require the optimizer's and the pipeline's dtype to be the policy's."""
    precision, megatron = config.policy.precision, config.policy.megatron_cfg
    also = ("policy.precision",)
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        value = getattr(megatron.optimizer, name)
        if value != (precision == dtype):
            expected, fix = str(precision == dtype).lower(), f"delete this key: policy.precision is {precision}"
            key, got = f"{OPTIMIZER}.{name}", str(value).lower()
            yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=also)
    if megatron.pipeline_dtype != precision:
        key, got = f"{MEGATRON}.pipeline_dtype", megatron.pipeline_dtype
        yield KeyProblem(key=key, got=got, expected=precision, fix="delete this key", also=also)


def fused_attention_has_16_bits(config: Config) -> Iterator[KeyProblem]:
    """Require bfloat16 where Transformer Engine attends: its kernels for packed rows have no other format here."""
    backend, precision = config.policy.megatron_cfg.attention_backend, config.policy.precision
    if backend != "local" and precision == "float32":
        key, fix = (
            f"{MEGATRON}.attention_backend",
            "Transformer Engine attends over packed rows in 16 bits; set it to local",
        )
        yield KeyProblem(key=key, got=backend, expected="local", fix=fix, also=("policy.precision",))


def clip_norm_is_stated_once(config: Config) -> Iterator[KeyProblem]:
    """Require the optimizer's clip norm to be the policy's."""
    own, norm = config.policy.megatron_cfg.optimizer.clip_grad, config.policy.max_grad_norm
    if own != norm:
        key, expected, also = f"{OPTIMIZER}.clip_grad", f"policy.max_grad_norm = {norm}", ("policy.max_grad_norm",)
        yield KeyProblem(key=key, got=str(own), expected=expected, fix="delete this key", also=also)


def schedule_is_ordered(config: Config) -> Iterator[KeyProblem]:
    """Require learning rates that do not exceed the peak, and a decay that ends after the warm-up."""
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    peak = f"{OPTIMIZER}.lr"
    rates = {f"{OPTIMIZER}.min_lr": optimizer.min_lr, f"{SCHEDULER}.lr_warmup_init": scheduler.lr_warmup_init}
    for key, value in rates.items():
        if value > optimizer.lr:
            expected = f"at most {peak} = {optimizer.lr}"
            yield KeyProblem(key=key, got=str(value), expected=expected, fix="lower it", also=(peak,))
    decay, warmup = scheduler.lr_decay_iters, scheduler.lr_warmup_iters
    key, style = f"{SCHEDULER}.lr_decay_iters", scheduler.lr_decay_style
    if decay is None and style != "constant":
        also, fix = (
            (f"{SCHEDULER}.lr_decay_style",),
            f"lr_decay_style is {style}; give the number of steps of the decay",
        )
        yield KeyProblem(key=key, got="null", expected="a number of steps", fix=fix, also=also)
    if decay is not None and decay <= warmup:
        also = (f"{SCHEDULER}.lr_warmup_iters",)
        expected, fix = f"more than {also[0]} = {warmup}", "raise it, or set it to null for no decay"
        yield KeyProblem(key=key, got=str(decay), expected=expected, fix=fix, also=also)


def weight_decay_does_not_fall(config: Config) -> Iterator[KeyProblem]:
    """Require one weight decay where it is constant; else one that rises, and the number of steps in which it does."""
    scheduler = config.policy.megatron_cfg.scheduler
    start, end, style = scheduler.start_weight_decay, scheduler.end_weight_decay, scheduler.weight_decay_incr_style
    key, first = f"{SCHEDULER}.end_weight_decay", f"{SCHEDULER}.start_weight_decay"
    how = f"{SCHEDULER}.weight_decay_incr_style"
    if style == "constant" and end != start:
        fix = f"{how} is constant; set both to one value, or {how} to linear"
        yield KeyProblem(key=key, got=f"{end:g}", expected=f"{first} = {start:g}", fix=fix, also=(first, how))
    elif end < start:
        fix = "weight decay can only rise; raise it, or lower the first value"
        yield KeyProblem(key=key, got=f"{end:g}", expected=f"at least {first} = {start:g}", fix=fix, also=(first,))
    if style != "constant" and scheduler.lr_decay_iters is None:
        key, fix = f"{SCHEDULER}.lr_decay_iters", f"{how} is {style}; give the number of steps of the rise"
        yield KeyProblem(key=key, got="null", expected="a number of steps", fix=fix, also=(how,))


def weight_decay_is_that_of_the_schedule(config: Config) -> Iterator[KeyProblem]:
    """Require the optimizer's weight decay to be one that its schedule has: the schedule alone is what a step takes."""
    own, scheduler = config.policy.megatron_cfg.optimizer.weight_decay, config.policy.megatron_cfg.scheduler
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if own not in (start, end):
        key, first, last = (
            f"{OPTIMIZER}.weight_decay",
            f"{SCHEDULER}.start_weight_decay",
            f"{SCHEDULER}.end_weight_decay",
        )
        expected = f"{first} = {start:g}" if start == end else f"{first} = {start:g} or {last} = {end:g}"
        fix = "only the schedule's values are used; set one of them to the other"
        yield KeyProblem(key=key, got=f"{own:g}", expected=expected, fix=fix, also=(first, last))


def values_belong_to_the_optimizer(config: Config) -> Iterator[KeyProblem]:
    """Require the values that only the other optimizer reads to be those of the base: a change would do nothing."""
    optimizer, key = config.policy.megatron_cfg.optimizer, f"{OPTIMIZER}.optimizer"
    for name, value in UNREAD[optimizer.optimizer].items():
        if (own := getattr(optimizer, name)) != value:
            fix = f"{optimizer.optimizer} does not read it; delete this key, or change {key}"
            yield KeyProblem(key=f"{OPTIMIZER}.{name}", got=f"{own:g}", expected=f"{value:g}", fix=fix, also=(key,))


def sgd_is_not_distributed(config: Config) -> Iterator[KeyProblem]:
    """Require the plain optimizer of sgd: Megatron's distributed optimizer keeps and saves the state of Adam only."""
    optimizer = config.policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        key, also = f"{OPTIMIZER}.use_distributed_optimizer", (f"{OPTIMIZER}.optimizer",)
        fix = f"{also[0]} is sgd, whose state Megatron does not shard; set it to false"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=also)


def distributed_optimizer_is_there(config: Config) -> Iterator[KeyProblem]:
    """Require the distributed optimizer where other settings build on it."""
    megatron = config.policy.megatron_cfg
    needed = f"{OPTIMIZER}.use_distributed_optimizer"
    if megatron.optimizer.use_distributed_optimizer:
        return
    ddp = megatron.distributed_data_parallel_config
    dependants = {
        f"{OPTIMIZER}.use_precision_aware_optimizer": megatron.optimizer.use_precision_aware_optimizer,
        f"{OPTIMIZER}.optimizer_cpu_offload": megatron.optimizer.optimizer_cpu_offload,
        f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": ddp.overlap_param_gather,
    }
    for key in (key for key, is_on in dependants.items() if is_on):
        fix = f"set it to false, or {needed} to true"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(needed,))


def chunked_logprobs_defer_logits(config: Config) -> Iterator[KeyProblem]:
    """Require deferred float32 logits for the chunked log-softmax."""
    chunk, key = config.policy.logprob_chunk_size, f"{MEGATRON}.defer_fp32_logits"
    if chunk is not None and not config.policy.megatron_cfg.defer_fp32_logits:
        fix = f"policy.logprob_chunk_size is {chunk}: float32 logits are made per chunk; set one of them"
        yield KeyProblem(key=key, got="false", expected="true", fix=fix, also=("policy.logprob_chunk_size",))


def offloaded_weights_have_16_bits(config: Config) -> Iterator[KeyProblem]:
    """Refuse to offload from weights in float32: the optimizer takes no views of a model's own parameters."""
    if config.policy.megatron_cfg.optimizer.optimizer_cpu_offload and config.policy.precision == "float32":
        key, also = f"{OPTIMIZER}.optimizer_cpu_offload", ("policy.precision",)
        fix = "Megatron offloads only from weights in 16 bits; set it to false, or policy.precision to bfloat16"
        yield KeyProblem(key=key, got="true", expected="false with policy.precision float32", fix=fix, also=also)


def offloaded_share_is_offloaded(config: Config) -> Iterator[KeyProblem]:
    """Require optimizer offloading to have a share, and a share or overlapped copies to have offloading."""
    optimizer = config.policy.megatron_cfg.optimizer
    share, is_on = optimizer.optimizer_offload_fraction, optimizer.optimizer_cpu_offload
    if is_on != (share > 0):
        expected = "more than 0" if is_on else "0"
        switch = f"{OPTIMIZER}.optimizer_cpu_offload"
        fix = f"{switch} is {str(is_on).lower()}; set both or neither"
        key = f"{OPTIMIZER}.optimizer_offload_fraction"
        yield KeyProblem(key=key, got=f"{share:g}", expected=expected, fix=fix, also=(switch,))
    if optimizer.overlap_cpu_optimizer_d2h_h2d and not is_on:
        key, switch = f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d", f"{OPTIMIZER}.optimizer_cpu_offload"
        fix = f"{switch} is false, so nothing is copied; set both or neither"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(switch,))


def frozen_trunk_has_heads(config: Config) -> Iterator[KeyProblem]:
    """Require heads that learn where the rest of the model is frozen, and no term of the loss for the rest."""
    megatron, penalty = config.policy.megatron_cfg, "loss_fn.reference_policy_kl_penalty"
    key, heads = f"{MEGATRON}.freeze_trunk", f"{MEGATRON}.mtp_num_layers"
    if megatron.freeze_trunk and megatron.mtp_num_layers == 0:
        fix = f"{heads} is 0, so that nothing would be trained; set it to the number of heads"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(heads,))
    if megatron.freeze_trunk and megatron.peft.enabled:
        adapters, fix = f"{MEGATRON}.peft.enabled", f"{key} is true, so adapters would not be trained; set one to false"
        yield KeyProblem(key=adapters, got="true", expected="false", fix=fix, also=(key,))
    if megatron.freeze_trunk and megatron.mtp_loss_scaling_factor == 0:
        weight, fix = f"{MEGATRON}.mtp_loss_scaling_factor", f"{key} is true, so nothing would be trained; raise it"
        yield KeyProblem(key=weight, got="0", expected="more than 0", fix=fix, also=(key,))
    if megatron.freeze_trunk and (own := config.grpo.adv_estimator.name) in (DISTILLATION, PREFERENCE):
        what = "no teacher is" if own == DISTILLATION else "no pairs are"
        name, fix = "grpo.adv_estimator.name", f"{key} is true, so {what} learned from; write grpo"
        yield KeyProblem(key=name, got=own, expected="grpo", fix=fix, also=(key,))
    if megatron.freeze_trunk and config.loss_fn.reference_policy_kl_penalty > 0:
        fix = f"a model that stays as it is keeps its distance to the reference; set {penalty} to 0"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(penalty,))
