"""What must hold between keys. Each rule is one function that yields a `KeyProblem` with the formula and its values.

RULES hold for every engine. REFUSALS are combinations that the native engine does not honour; what it refuses of one
key alone is declared with that key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.rules import environments, generation, loss, optimizer, parallel, validation
from recipes.config.tree import Config

Rule = Callable[[Config], Iterator[KeyProblem]]

RULES: tuple[Rule, ...] = (
    parallel.batch_is_prompts_times_generations,
    parallel.group_has_a_baseline,
    parallel.batch_multiplier_has_dynamic_sampling,
    loss.lag_needs_importance_correction,
    loss.truncation_is_complete,
    loss.ratio_is_one_kind,
    loss.kl_in_reward_has_an_estimator,
    loss.distillation_has_teachers,
    loss.teachers_are_there,
    loss.pairs_are_compared_once,
    loss.what_reads_rewards_is_off,
    loss.scaling_has_a_range,
    loss.length_penalty_starts_above_zero,
    loss.effort_shaping_is_on_or_off,
    loss.penalties_survive_the_clip,
    validation.validation_can_run,
    validation.greedy_validation_is_sampled_once,
    parallel.engine_and_trainer_agree_on_length,
    parallel.lengths_are_divisible,
    parallel.packing_fits_one_rollout,
    parallel.nodes_are_shared_out,
    parallel.parallel_sizes_divide_the_gpus,
    parallel.engines_divide_the_gpus,
    parallel.sequence_parallel_has_ranks,
    parallel.experts_share_the_sequence,
    parallel.uneven_stages_have_a_pipeline,
    parallel.deepep_is_the_flex_dispatcher,
    parallel.deepep_can_carry_the_tokens,
    parallel.fused_activation_has_grouped_experts,
    parallel.shared_expert_overlaps_an_exchange,
    optimizer.dtypes_agree,
    optimizer.fused_attention_has_16_bits,
    optimizer.clip_norm_is_stated_once,
    optimizer.schedule_is_ordered,
    optimizer.weight_decay_does_not_fall,
    optimizer.weight_decay_is_that_of_the_schedule,
    optimizer.values_belong_to_the_optimizer,
    optimizer.sgd_is_not_distributed,
    optimizer.distributed_optimizer_is_there,
    optimizer.chunked_logprobs_defer_logits,
    optimizer.offloaded_share_is_offloaded,
    optimizer.frozen_trunk_has_heads,
    generation.sampling_is_whole_distribution,
    generation.engine_arguments_have_one_place,
    generation.drafts_fit_one_step,
    generation.replayed_routes_are_reported,
    generation.ports_do_not_collide,
    generation.equal_bits_have_one_order,
    environments.cohort_is_the_group,
    environments.judges_fill_their_nodes,
    environments.judges_can_answer,
    environments.references_exist,
    environments.repositories_have_images,
    validation.waits_are_nested,
    validation.tasks_end_within_a_rollout,
)

REFUSALS: tuple[Rule, ...] = (
    generation.requests_share_the_template,
    generation.parsers_are_built,
    generation.engine_arguments_are_free,
    optimizer.offloaded_weights_have_16_bits,
    parallel.engines_fit_a_node,
    parallel.grouped_experts_are_rounded,
    environments.agents_sample_from_the_policy,
    environments.models_to_come,
    environments.judges_fit_a_node,
    environments.engines_of_judges_are_ours,
    validation.metrics_are_measured,
)
