"""What must hold between keys. Each rule is one function that yields a `Finding` with the formula and its values.

RULES hold for every engine. REFUSALS are combinations that the native engine does not honour; refusals that concern
one key alone stand in configs/schema.json under `x-native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recipes.config.rules.cluster import CLUSTER_RULES
from recipes.config.rules.stage import STAGE_RULES, environments_to_come, models_to_come
from recipes.config.schema import Finding
from recipes.config.tree import Config

Rule = Callable[[Config], Iterator[Finding]]
P, G = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
TIS = "loss_fn.truncated_importance_sampling"
AGE = "grpo.async_grpo.max_trajectory_age_steps"
GENERATION = "policy.generation"
OPTIMIZER = "policy.megatron_cfg.optimizer"
VALIDATION_PATH = "data.validation.data_path"


def batch_is_prompts_times_generations(config: Config) -> Iterator[Finding]:
    """Require the global batch to be one step's samples, or to divide them when the ratio may move."""
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    batch, samples = config.policy.train_global_batch_size, prompts * generations
    formula = f"{P} * {G} = {prompts} * {generations} = {samples}"
    key, also = "policy.train_global_batch_size", (P, G, "loss_fn.force_on_policy_ratio")
    if config.loss_fn.force_on_policy_ratio and batch != samples:
        fix = "force_on_policy_ratio needs exactly one optimizer step per batch; delete this key"
        yield Finding(key=key, got=str(batch), expected=formula, fix=fix, also=also)
    elif samples % batch:
        yield Finding(key=key, got=str(batch), expected=f"a divisor of {formula}", fix="delete this key", also=also)


def group_has_a_baseline(config: Config) -> Iterator[Finding]:
    """Require groups of two or more: alone, a rollout is its own baseline and carries no signal."""
    if config.grpo.num_generations_per_prompt < 2:
        baseline = "leave-one-out" if config.grpo.adv_estimator.use_leave_one_out_baseline else "group"
        fix = f"the {baseline} baseline of a group of 1 leaves no advantage; set it to 2 or more"
        yield Finding(key=G, got=str(config.grpo.num_generations_per_prompt), expected="2 or more", fix=fix)


def lag_needs_importance_correction(config: Config) -> Iterator[Finding]:
    """Require the importance correction when trajectories may be older than the weights they train."""
    age = config.grpo.async_grpo.max_trajectory_age_steps
    if age > 0 and not config.loss_fn.use_importance_sampling_correction:
        fix = f"{AGE} is {age}, so weights lag behind; set this to true, or {AGE} to 0"
        key = "loss_fn.use_importance_sampling_correction"
        yield Finding(key=key, got="false", expected="true", fix=fix, also=(AGE,))


def truncation_is_complete(config: Config) -> Iterator[Finding]:
    """Require type, upper bound and lower bound of the importance weight to fit together."""
    loss = config.loss_fn
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    if high is not None and kind is None:
        fix = f"{TIS}_ratio is {high}; name a type, or set {TIS}_ratio to null"
        yield Finding(key=f"{TIS}_type", got="null", expected="a type", fix=fix, also=(f"{TIS}_ratio",))
    if kind is not None and not loss.use_importance_sampling_correction:
        fix = "there is no weight to truncate without loss_fn.use_importance_sampling_correction; set this to null"
        also = ("loss_fn.use_importance_sampling_correction",)
        yield Finding(key=f"{TIS}_type", got=kind, expected="null", fix=fix, also=also)
    if kind is not None and high is None:
        fix = f"{TIS}_type is {kind}; give a bound (5 in the recipe), or set the type to null"
        yield Finding(key=f"{TIS}_ratio", got="null", expected="a number > 0", fix=fix, also=(f"{TIS}_type",))
    if kind in ("icepop", "seq-mask-tis") and low is None:
        fix = f"{kind} drops what lies below it; give a bound (0.5 is common)"
        yield Finding(key=f"{TIS}_ratio_min", got="null", expected="a number", fix=fix, also=(f"{TIS}_type",))
    if high is not None and low is not None and low > high:
        fix = "no weight could pass; lower it"
        expected = f"at most {TIS}_ratio = {high}"
        yield Finding(key=f"{TIS}_ratio_min", got=str(low), expected=expected, fix=fix, also=(f"{TIS}_ratio",))
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        fix = "a per-rollout ratio cannot be masked per rollout again; use tis or icepop"
        also = ("loss_fn.sequence_level_importance_ratios",)
        yield Finding(key=f"{TIS}_type", got=kind, expected="tis or icepop", fix=fix, also=also)


def ratio_is_one_kind(config: Config) -> Iterator[Finding]:
    """Refuse combinations of loss variants of which one would silently win."""
    loss = config.loss_fn
    switched = {
        "force_on_policy_ratio": loss.force_on_policy_ratio,
        "disable_ppo_ratio": loss.disable_ppo_ratio,
        "sequence_level_importance_ratios": loss.sequence_level_importance_ratios,
        "ratio_clip_c": loss.ratio_clip_c is not None,
    }
    if loss.use_cispo:
        for name in (name for name, is_on in switched.items() if is_on):
            fix = f"use_cispo replaces it; set loss_fn.{name} to {'null' if name == 'ratio_clip_c' else 'false'}"
            yield Finding(
                key="loss_fn.use_cispo",
                got=f"true with loss_fn.{name}",
                expected="one of them",
                fix=fix,
                also=(f"loss_fn.{name}",),
            )
    if loss.force_on_policy_ratio and loss.disable_ppo_ratio:
        yield Finding(
            key="loss_fn.disable_ppo_ratio",
            got="true with loss_fn.force_on_policy_ratio",
            expected="one of them",
            fix="force_on_policy_ratio would win; set one to false",
            also=("loss_fn.force_on_policy_ratio",),
        )
    if loss.use_cispo and not loss.token_level_loss:
        fix = "use_cispo weights single tokens; set this to true"
        key, also = "loss_fn.token_level_loss", ("loss_fn.use_cispo",)
        yield Finding(key=key, got="false", expected="true", fix=fix, also=also)
    if loss.token_level_loss and loss.sequence_level_importance_ratios:
        fix = "one weight per rollout needs the mean per rollout; set this to false"
        also = ("loss_fn.sequence_level_importance_ratios",)
        yield Finding(key="loss_fn.token_level_loss", got="true", expected="false", fix=fix, also=also)


def kl_in_reward_has_an_estimator(config: Config) -> Iterator[Finding]:
    """Require Reinforce++ and a weight for the KL that is subtracted from the advantages."""
    key = "loss_fn.use_kl_in_reward"
    if config.loss_fn.use_kl_in_reward:
        if config.grpo.adv_estimator.name == "grpo":
            fix = "the group baseline has no per-token reward; set it to false"
            yield Finding(key=key, got="true", expected="false", fix=fix, also=("grpo.adv_estimator.name",))
        if config.loss_fn.reference_policy_kl_penalty == 0:
            also = ("loss_fn.reference_policy_kl_penalty",)
            fix = "loss_fn.reference_policy_kl_penalty is 0, so nothing would be subtracted; set one of them"
            yield Finding(key=key, got="true", expected="false", fix=fix, also=also)


def penalties_survive_the_clip(config: Config) -> Iterator[Finding]:
    """Require the fixed advantages to lie inside the bounds that are applied after them."""
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    for name in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        value = getattr(config.grpo, name)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            expected = f"a number in [{low}, {high}] = grpo.advantage_clip_low..high"
            also = ("grpo.advantage_clip_low", "grpo.advantage_clip_high")
            fix = "the clip comes last and would change it; move one of them"
            yield Finding(key=f"grpo.{name}", got=str(value), expected=expected, fix=fix, also=also)


def scaling_has_a_range(config: Config) -> Iterator[Finding]:
    """Require a non-empty source range of the reward map."""
    scaling = config.grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield Finding(
            key="grpo.reward_scaling.source_min",
            got=str(scaling.source_min),
            expected=f"less than grpo.reward_scaling.source_max = {scaling.source_max}",
            fix="the map divides by their difference",
            also=("grpo.reward_scaling.source_max", "grpo.reward_scaling.enabled"),
        )


def effort_shaping_is_on_or_off(config: Config) -> Iterator[Finding]:
    """Refuse the half-set effort levels that look on and do nothing."""
    effort = config.env.nemo_gym.effort_levels
    if (effort.low_weight > 0) != (effort.low_string != ""):
        name, other = ("low_string", "low_weight") if effort.low_weight > 0 else ("low_weight", "low_string")
        prefix = "env.nemo_gym.effort_levels"
        yield Finding(
            key=f"{prefix}.{name}",
            got="its off value" if name == "low_weight" else '""',
            expected=f"a value, since {prefix}.{other} is set",
            fix="shaping needs both and is off without one; set both or neither",
            also=(f"{prefix}.{other}",),
        )


def sampling_is_whole_distribution(config: Config) -> Iterator[Finding]:
    """Refuse top-k: the engine's log-probabilities would not be the trainer's."""
    for name in ("top_k", "val_top_k"):
        value = getattr(config.policy.generation, name)
        if value is not None:
            key = f"{GENERATION}.{name}"
            fix = "NeMo Gym requests carry temperature and top_p only; delete this key"
            also = (f"{GENERATION}.top_k",) if name == "val_top_k" else ()
            yield Finding(key=key, got=str(value), expected="null", fix=fix, also=also)
            return  # val_top_k follows top_k


def validation_can_run(config: Config) -> Iterator[Finding]:
    """Require rows for a validation that is asked for, and a validation for what depends on one."""
    grpo, path = config.grpo, config.data.validation.data_path
    asked = {"val_period": grpo.val_period > 0, "val_at_start": grpo.val_at_start, "val_at_end": grpo.val_at_end}
    for name in (name for name, is_on in asked.items() if is_on and path is None):
        fix = f"{VALIDATION_PATH} is null; give the rows or switch validation off"
        value = getattr(grpo, name)
        yield Finding(key=f"grpo.{name}", got=str(value).lower(), expected="off", fix=fix, also=(VALIDATION_PATH,))
    keys = tuple(f"grpo.{name}" for name in asked)
    metric = config.checkpointing.metric_name
    if metric is not None and metric.startswith("val:") and not any(asked.values()):
        fix = "no validation would ever run; set grpo.val_period or grpo.val_at_end, or use null or a train: metric"
        key = "checkpointing.metric_name"
        yield Finding(key=key, got=metric, expected="null or train:NAME", fix=fix, also=keys)
    stop, threshold = grpo.stop_at_validation_metric, grpo.stop_at_validation_threshold
    if (stop is None) != (threshold is None):
        key, other = "grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold"
        key, other = (key, other) if stop is None else (other, key)
        fix = "set both or neither"
        yield Finding(key=key, got="null", expected=f"a value, since {other} is set", fix=fix, also=(other,))
    if stop is not None and not any(asked.values()):
        fix = "no validation would ever run; set grpo.val_period"
        yield Finding(key="grpo.stop_at_validation_metric", got=stop, expected="null", fix=fix, also=keys)
    if stop == "pass_k" and grpo.val_num_generations_per_prompt < 2:
        also = ("grpo.val_num_generations_per_prompt",)
        fix = "pass_k exists only for more than one rollout per row; set grpo.val_num_generations_per_prompt"
        yield Finding(key="grpo.stop_at_validation_metric", got=stop, expected="another metric", fix=fix, also=also)


def several_optimizer_steps(config: Config) -> Iterator[Finding]:
    """Refuse more than one optimizer step per batch of rollouts."""
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if batch != samples:
        key = "policy.train_global_batch_size"
        fix = "several optimizer steps on one batch are not built yet"
        yield Finding(key=key, got=str(batch), expected=f"{P} * {G} = {samples} (native engine)", fix=fix)


def effort_shaping(config: Config) -> Iterator[Finding]:
    """Refuse effort shaping."""
    effort = config.env.nemo_gym.effort_levels
    if effort.low_weight > 0 and effort.low_string:
        key, fix = "env.nemo_gym.effort_levels.low_weight", "effort shaping is not built yet"
        yield Finding(key=key, got=str(effort.low_weight), expected="0 (native engine)", fix=fix)


RULES: tuple[Rule, ...] = (
    batch_is_prompts_times_generations,
    group_has_a_baseline,
    lag_needs_importance_correction,
    truncation_is_complete,
    ratio_is_one_kind,
    kl_in_reward_has_an_estimator,
    penalties_survive_the_clip,
    scaling_has_a_range,
    effort_shaping_is_on_or_off,
    sampling_is_whole_distribution,
    validation_can_run,
    *CLUSTER_RULES,
    *STAGE_RULES,
)

REFUSALS: tuple[Rule, ...] = (several_optimizer_steps, effort_shaping, environments_to_come, models_to_come)
