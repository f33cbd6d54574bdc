"""Variants of the loss that need or exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.derive import max_age
from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import AGE, TIS
from recipes.config.tree import Config

CORRECTION = "loss_fn.use_importance_sampling_correction"


def lag_needs_importance_correction(config: Config) -> Iterator[KeyProblem]:
    """Require the importance correction when trajectories may be older than the weights they train."""
    age = max_age(config.grpo.async_grpo)
    if age > 0 and not config.loss_fn.use_importance_sampling_correction:
        fix = f"{AGE} is {age}, so weights lag behind; set this to true, or {AGE} to 0"
        yield KeyProblem(key=CORRECTION, got="false", expected="true", fix=fix, also=(AGE,))


def truncation_is_complete(config: Config) -> Iterator[KeyProblem]:
    """Require type, upper bound and lower bound of the importance weight to fit together."""
    loss = config.loss_fn
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    if high is not None and kind is None:
        fix = f"name a type, or set {TIS}_ratio to null"
        wrong = f"is null although {TIS}_ratio is {high}"
        yield KeyProblem(key=f"{TIS}_type", wrong=wrong, fix=fix, also=(f"{TIS}_ratio",))
    if kind is not None and not loss.use_importance_sampling_correction:
        fix = f"there is no weight to truncate without {CORRECTION}; set this to null"
        yield KeyProblem(key=f"{TIS}_type", got=kind, expected="null", fix=fix, also=(CORRECTION,))
    if kind is not None and high is None:
        fix = f"{TIS}_type is {kind}; give a bound (5 in the recipe), or set the type to null"
        yield KeyProblem(key=f"{TIS}_ratio", got="null", expected="a number > 0", fix=fix, also=(f"{TIS}_type",))
    if kind in ("icepop", "seq-mask-tis") and low is None:
        fix = f"{kind} drops what lies below it; give a bound (0.5 is common)"
        yield KeyProblem(key=f"{TIS}_ratio_min", got="null", expected="a number", fix=fix, also=(f"{TIS}_type",))
    if low is not None and high is None and kind is None:
        fix = f"{TIS}_ratio is null, so no weight is bounded; set both bounds and {TIS}_type, or this to null"
        yield KeyProblem(key=f"{TIS}_ratio_min", got=str(low), expected="null", fix=fix, also=(f"{TIS}_ratio",))
    if high is not None and low is not None and low > high:
        fix = "no weight could pass; lower it"
        expected = f"at most {TIS}_ratio = {high}"
        yield KeyProblem(key=f"{TIS}_ratio_min", got=str(low), expected=expected, fix=fix, also=(f"{TIS}_ratio",))
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        fix = "a ratio per rollout cannot be masked per rollout again; use tis or icepop"
        also = ("loss_fn.sequence_level_importance_ratios",)
        yield KeyProblem(key=f"{TIS}_type", got=kind, expected="tis or icepop", fix=fix, also=also)


def ratio_is_one_kind(config: Config) -> Iterator[KeyProblem]:
    """Refuse combinations of loss variants of which one would silently win."""
    loss = config.loss_fn
    switched = {
        "force_on_policy_ratio": loss.force_on_policy_ratio,
        "disable_ppo_ratio": loss.disable_ppo_ratio,
        "sequence_level_importance_ratios": loss.sequence_level_importance_ratios,
        "ratio_clip_c": loss.ratio_clip_c is not None,
    }
    for name in (name for name, is_on in switched.items() if is_on and loss.use_cispo):
        fix = f"use_cispo replaces it; set loss_fn.{name} to {'null' if name == 'ratio_clip_c' else 'false'}"
        wrong, also = f"cannot be combined with loss_fn.{name}", (f"loss_fn.{name}",)
        yield KeyProblem(key="loss_fn.use_cispo", wrong=wrong, fix=fix, also=also)
    if loss.force_on_policy_ratio and loss.disable_ppo_ratio:
        wrong, also = "cannot be combined with loss_fn.force_on_policy_ratio", ("loss_fn.force_on_policy_ratio",)
        fix = "force_on_policy_ratio would win; set one to false"
        yield KeyProblem(key="loss_fn.disable_ppo_ratio", wrong=wrong, fix=fix, also=also)
    for name in ("sequence_level_importance_ratios", "ratio_clip_c"):
        if loss.disable_ppo_ratio and switched[name]:
            fix = f"there is no ratio then; set loss_fn.{name} to {'null' if name == 'ratio_clip_c' else 'false'}"
            wrong, also = f"cannot be combined with loss_fn.{name}", (f"loss_fn.{name}",)
            yield KeyProblem(key="loss_fn.disable_ppo_ratio", wrong=wrong, fix=fix, also=also)
    if loss.use_cispo and not loss.token_level_loss:
        fix = "use_cispo weights single tokens; set this to true"
        key, also = "loss_fn.token_level_loss", ("loss_fn.use_cispo",)
        yield KeyProblem(key=key, got="false", expected="true", fix=fix, also=also)
    if loss.token_level_loss and loss.sequence_level_importance_ratios:
        fix = "one weight per rollout needs the mean per rollout; set this to false"
        also = ("loss_fn.sequence_level_importance_ratios",)
        yield KeyProblem(key="loss_fn.token_level_loss", got="true", expected="false", fix=fix, also=also)


def kl_in_reward_has_an_estimator(config: Config) -> Iterator[KeyProblem]:
    """Require Reinforce++ and a weight for the KL that is subtracted from the advantages."""
    key = "loss_fn.use_kl_in_reward"
    if config.loss_fn.use_kl_in_reward:
        if config.grpo.adv_estimator.name == "grpo":
            fix = "the group baseline has no reward per token; set it to false"
            yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=("grpo.adv_estimator.name",))
        if config.loss_fn.reference_policy_kl_penalty == 0:
            also = ("loss_fn.reference_policy_kl_penalty",)
            fix = "loss_fn.reference_policy_kl_penalty is 0, so nothing would be subtracted; set one of them"
            yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=also)
