"""The GRPO train loop, top to bottom.

    prompts -> collector -> replay buffer -> reward -> batch -> advantage -> policy.train
                  ^                                                              |
                  +--------------------------- refit <---------------------------+

The collector generates ahead, at most `max_trajectory_age_steps` steps; this loop is the only clock. With 0 the
collector waits for each refit, so training is synchronous with the same code.

This loop handles only headers of rollouts: which prompt, how it ended, its length, its reward, where its tokens lie.
The ranks of the policy fetch the tokens themselves.

`state.step` is the number of batches trained on, and so the version of the weights. A batch is one optimizer step, or
several of `policy.train_global_batch_size` rollouts each. Metrics and checkpoint names use the same count: the record
of the first step says 1.
"""

from __future__ import annotations

from recipes.errors import TokensLostError
from recipes.grpo.advantage import add_advantages
from recipes.grpo.batch import build_batch, spread_over_sequences
from recipes.grpo.parity import check_parity
from recipes.grpo.refit import refit
from recipes.grpo.reward import collect_rewards
from recipes.grpo.run import Run


def train(run: Run) -> None:
    """Step the policy until the configured number of steps, the end of the data, or a request to stop."""
    cfg, state = run.config, run.state

    refit(run.policy, run.generation, version=state.step)
    check_parity(run)
    if state.step == 0 and run.validates_now():
        run.recorder.begin(state.step)
        run.validate()
        run.recorder.record()
    run.collector.start(version=state.step, last_step=run.num_steps)

    while state.step < run.num_steps and not run.stop.requested(state.step_seconds):
        metrics = run.recorder.begin(state.step + 1)

        with metrics.timed("exposed_generation"):
            groups = run.take()
        if not groups:
            break  # the data ended, or a signal asked to stop

        with metrics.timed("reward_calculation"):
            rewards_B, shaping = collect_rewards(groups, cfg)
        metrics.add(shaping)

        with metrics.timed("data_processing"):
            batch = build_batch(
                groups,
                rewards_B,
                overlong_filtering=cfg.grpo.overlong_filtering,
                mask_flagged=cfg.env.should_mask_flagged_samples,
            )

        with metrics.timed("advantage_calculation"):
            batch, advantages = add_advantages(batch, groups, cfg)
        metrics.add(advantages)
        run.recorder.note_advantages(groups, batch.advantages_B.tolist())

        with metrics.timed("data_processing"):
            batch = spread_over_sequences(batch, groups, token_level_loss=cfg.loss_fn.token_level_loss)
            try:
                run.policy.fetch(batch)
            except TokensLostError as lost:  # the step begins again once these groups are there
                run.take_back(lost)
                continue

        with metrics.timed("policy_training"):
            losses = run.policy.train(batch)
        state.advance(groups)
        metrics.add(losses)

        # The policy changes only when the engines hold its present weights, so a token's version is exact.
        with metrics.timed("weight_sync"):
            refit(run.policy, run.generation, version=state.step)
        run.collector.set_version(state.step)

        if run.validates_now():
            with metrics.timed("validation"):
                run.validate()

        run.recorder.record(groups)
        if run.saver.is_due:
            run.saver.begin()  # written while the next steps train

    run.finish()
