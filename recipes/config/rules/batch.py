"""How many rollouts a step has and how the optimizer divides them."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import G, P
from recipes.config.tree import Config

BATCH = "policy.train_global_batch_size"
ON_POLICY = "loss_fn.force_on_policy_ratio"


def batch_is_prompts_times_generations(config: Config) -> Iterator[KeyProblem]:
    """Require the global batch to be one step's rollouts, or to divide them when the ratio may move."""
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    batch, samples = config.policy.train_global_batch_size, prompts * generations
    formula = f"{P} * {G} = {prompts} * {generations} = {samples}"
    also = (P, G, ON_POLICY)
    if config.loss_fn.force_on_policy_ratio and batch != samples:
        fix = "force_on_policy_ratio needs exactly one optimizer step per batch; delete this key"
        yield KeyProblem(key=BATCH, got=str(batch), expected=formula, fix=fix, also=also)
    elif samples % batch:
        yield KeyProblem(
            key=BATCH, got=str(batch), expected=f"a divisor of {formula}", fix="delete this key", also=also
        )


def group_has_a_baseline(config: Config) -> Iterator[KeyProblem]:
    """Require groups of two or more: the baseline of a single rollout is its own reward, so nothing is learned."""
    estimator = config.grpo.adv_estimator
    has_baseline = estimator.name == "grpo" or estimator.minus_baseline
    if config.grpo.num_generations_per_prompt < 2 and has_baseline:
        baseline = "leave-one-out" if estimator.name == "grpo" and estimator.use_leave_one_out_baseline else "group"
        fix = f"the {baseline} baseline of a group of 1 leaves no advantage; set it to 2 or more"
        yield KeyProblem(key=G, got=str(config.grpo.num_generations_per_prompt), expected="2 or more", fix=fix)


def batch_multiplier_has_dynamic_sampling(config: Config) -> Iterator[KeyProblem]:
    """Require dynamic sampling where more prompts are generated than trained on."""
    multiplier = config.grpo.batch_multiplier
    if multiplier != 1 and not config.grpo.use_dynamic_sampling:
        key, also = "grpo.batch_multiplier", ("grpo.use_dynamic_sampling",)
        fix = "the further prompts would be dropped; set grpo.use_dynamic_sampling, or this to 1"
        yield KeyProblem(key=key, got=f"{multiplier:g}", expected="1", fix=fix, also=also)
