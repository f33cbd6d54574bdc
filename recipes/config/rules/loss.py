"""Variants of the loss that need or exclude each other.

From rewards to advantages: scaling, length shaping, effort levels, fixed advantages.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.derive import (
    AGENTS,
    DISTILLATION,
    MODELS,
    PREFERENCE,
    STARTED,
    TEACHER_OF_ALL,
    max_age,
    rewards_teach,
    servers,
    started_judges,
)
from recipes.config.keys.schema import KeyProblem, show
from recipes.config.rules.validation import AGE, TIS
from recipes.config.tree import Config
from recipes.errors import nearest

SCALING, SHAPING = "grpo.reward_scaling", "grpo.reward_shaping"
EFFORT = "env.nemo_gym.effort_levels"


def scaling_has_a_range(config: Config) -> Iterator[KeyProblem]:
    """Require a non-empty source range of the reward map."""
    scaling = config.grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        expected = f"less than {SCALING}.source_max = {scaling.source_max}"
        also, fix = (
            (f"{SCALING}.source_max", f"{SCALING}.enabled"),
            "the map divides by their difference; change one of them",
        )
        yield KeyProblem(
            key=f"{SCALING}.source_min", got=str(scaling.source_min), expected=expected, fix=fix, also=also
        )


def length_penalty_starts_above_zero(config: Config) -> Iterator[KeyProblem]:
    """Require a length penalty that begins inside the answer."""
    shaping = config.grpo.reward_shaping
    key, limit = f"{SHAPING}.overlong_buffer_length", f"{SHAPING}.max_response_length"
    if shaping.enabled and shaping.overlong_buffer_length >= shaping.max_response_length:
        expected = f"less than {limit} = {shaping.max_response_length}"
        fix = "every answer would be punished; lower it"
        also = (limit, f"{SHAPING}.enabled")
        yield KeyProblem(key=key, got=str(shaping.overlong_buffer_length), expected=expected, fix=fix, also=also)


def effort_shaping_is_on_or_off(config: Config) -> Iterator[KeyProblem]:
    """Refuse effort levels of which only one of two switches is set: they look on and do nothing."""
    effort = config.env.nemo_gym.effort_levels
    if (effort.low_weight > 0) != (effort.low_string != ""):
        name, other = ("low_string", "low_weight") if effort.low_weight > 0 else ("low_weight", "low_string")
        off = '""' if name == "low_string" else "0"
        wrong, fix = f"is {off}, which is off, although {EFFORT}.{other} is set", "set both or neither"
        yield KeyProblem(key=f"{EFFORT}.{name}", wrong=wrong, fix=fix, also=(f"{EFFORT}.{other}",))


def penalties_survive_the_clip(config: Config) -> Iterator[KeyProblem]:
    """Require the fixed advantages to lie inside the bounds that are applied after them."""
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    for name in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        value = getattr(config.grpo, name)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            expected = f"a number in [{low}, {high}] = grpo.advantage_clip_low..high"
            also = ("grpo.advantage_clip_low", "grpo.advantage_clip_high")
            fix = "the clip comes last and would change it; change this value or the bounds"
            yield KeyProblem(key=f"grpo.{name}", got=str(value), expected=expected, fix=fix, also=also)


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
        if config.grpo.adv_estimator.name != "reinforce_plus_plus":
            fix = "only reinforce_plus_plus has a reward per token; set it to false"
            yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=("grpo.adv_estimator.name",))
        if config.loss_fn.reference_policy_kl_penalty == 0:
            also = ("loss_fn.reference_policy_kl_penalty",)
            fix = "loss_fn.reference_policy_kl_penalty is 0, so nothing would be subtracted; set one of them"
            yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=also)


def distillation_has_teachers(config: Config) -> Iterator[KeyProblem]:
    """Require teachers where advantages come from them, and only there, and nothing that would be set against them."""
    estimator, key, name = config.grpo.adv_estimator, "grpo.adv_estimator.teachers", "grpo.adv_estimator.name"
    distils = estimator.name == DISTILLATION
    if distils != bool(estimator.teachers):
        expected = "a teacher, as {default: NAME}" if distils else "{}"
        fix = f"{name} is {estimator.name}; change one of them"
        yield KeyProblem(key=key, got=show(dict(estimator.teachers)), expected=expected, fix=fix, also=(name,))
    if distils and config.policy.generation.temperature != 1:
        fix = "teachers answer at temperature 1, and both must be compared at one; write 1"
        key, got = "policy.generation.temperature", str(config.policy.generation.temperature)
        yield KeyProblem(key=key, got=got, expected="1", fix=fix, also=(name,))
    penalty = "loss_fn.reference_policy_kl_penalty"
    if distils and config.loss_fn.reference_policy_kl_penalty > 0:
        fix = "the teacher takes the place of the reference; write 0"
        got = str(config.loss_fn.reference_policy_kl_penalty)
        yield KeyProblem(key=penalty, got=got, expected="0", fix=fix, also=(name,))


def pairs_are_compared_once(config: Config) -> Iterator[KeyProblem]:
    """Require two answers to a prompt, one optimizer step per batch, and one reference where pairs are learned from."""
    if config.grpo.adv_estimator.name != PREFERENCE:
        return
    name, grpo, batch = "grpo.adv_estimator.name", config.grpo, config.policy.train_global_batch_size
    prompts, generations = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if grpo.num_generations_per_prompt < 2:
        fix = f"{name} is dpo, which compares two answers; raise it"
        yield KeyProblem(key=generations, got="1", expected="2 or more", fix=fix, also=(name,))
    if batch != samples:
        fix = f"{name} is dpo, and margins are those before the step; delete this key"
        expected, also = f"{prompts} * {generations} = {samples}", (name, prompts, generations)
        yield KeyProblem(key="policy.train_global_batch_size", got=str(batch), expected=expected, fix=fix, also=also)
    penalty = "loss_fn.reference_policy_kl_penalty"
    if config.loss_fn.reference_policy_kl_penalty > 0:
        fix = "dpo.reference_policy_kl_penalty takes its place; write 0"
        got = str(config.loss_fn.reference_policy_kl_penalty)
        yield KeyProblem(key=penalty, got=got, expected="0", fix=fix, also=(name,))


def teachers_are_there(config: Config) -> Iterator[KeyProblem]:
    """Require agents and model servers that are in the configuration, and teachers that can read the longest rollout.

    A teacher is asked for one token after the sequence: a server that generates none is refused.
    """
    key, longest = "grpo.adv_estimator.teachers", config.policy.max_total_sequence_length
    there = {own: (kind, settings) for own, kind, settings in servers(config, MODELS)}
    agents = [TEACHER_OF_ALL, *(name for name, _, _ in servers(config, AGENTS))]
    for agent, teacher in config.grpo.adv_estimator.teachers.items():
        if agent not in agents:
            close, also = nearest(agent, agents), ("env.nemo_gym.config_paths",)
            wrong = f"no agent is called {agent}; there is {', '.join(sorted(agents))}"
            fix = f"did you mean {close}?" if close else f"correct the name, or add its file to {also[0]}"
            yield KeyProblem(key=f"{key}.{agent}", wrong=wrong, fix=fix, also=also)
        kind, settings = there.get(teacher, ("", {}))
        if kind not in STARTED and not settings.get("base_url"):
            wrong = f"env.nemo_gym has no model server {teacher} with a model or an address of its own"
            yield KeyProblem(key=f"{key}.{agent}", wrong=wrong, fix="write one, as for a judge, or correct the name")
    for judge in started_judges(config):
        context = judge.engine_arguments.get("max_model_len")
        is_short = isinstance(context, int) and 0 < context <= longest
        if is_short and judge.name in config.grpo.adv_estimator.teachers.values():
            where, bound = f"{judge.key}.vllm_serve_kwargs.max_model_len", "policy.max_total_sequence_length"
            expected, fix = f"more than {bound} = {longest}", "the longest rollouts would have no teacher; raise it"
            yield KeyProblem(key=where, got=str(context), expected=expected, fix=fix, also=(key, bound))


def what_reads_rewards_is_off(config: Config) -> Iterator[KeyProblem]:
    """Refuse what works by rewards where these do not decide what is learned."""
    if rewards_teach(config):
        return
    values = {
        "grpo.use_dynamic_sampling": (config.grpo.use_dynamic_sampling, False),
        "loss_fn.positive_example_nll_weight": (config.loss_fn.positive_example_nll_weight, 0.0),
    }
    is_frozen = config.policy.megatron_cfg.freeze_trunk
    why = ("policy.megatron_cfg.freeze_trunk", "grpo.adv_estimator.name")[not is_frozen]
    for key, (got, expected) in values.items():
        if got != expected:
            fix = f"rewards do not decide what is learned ({why}); write this"
            yield KeyProblem(key=key, got=show(got), expected=show(expected), fix=fix, also=(why,))
