"""Build a run: place and start both sides at once, open the data, restore the newest checkpoint."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from recipes.cluster.connect import connect
from recipes.cluster.placement import WorkerCounts, place
from recipes.config.derive import Derived
from recipes.config.tree import Config, GrpoConfig
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.errors import ConfigError, DataError, Problem
from recipes.generation.generation import Generation
from recipes.grpo import refit
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.checkpoint import LedgerEntry, SavedState, latest_checkpoint, load_state, step_dir
from recipes.grpo.data import PromptDataset, PromptStream, require_rows
from recipes.grpo.log import RunLogger
from recipes.grpo.loss import grpo_loss
from recipes.grpo.rollout import RolloutCollector, RolloutSettings
from recipes.grpo.run import PolicyHandle, Run, TrainState
from recipes.grpo.validate import ValidationSet
from recipes.policy.policy import Policy
from recipes.stop import StopRequest
from recipes.types import Sampling

logger = logging.getLogger(__name__)


def setup(config: Config, derived: Derived, run_dir: Path, stop: StopRequest) -> Run:
    """Return a run that is ready to train, restored from its newest complete checkpoint if there is one."""
    environments = Environments.from_config(config.env, ChatCodec.from_config(config.policy))
    stream, validation_rows = _open_data(config, environments)
    checkpoints = run_dir / config.checkpointing.checkpoint_dir
    checkpoints.mkdir(parents=True, exist_ok=True)
    saved = _saved_state(checkpoints, config.grpo)  # verified before policy and engines start

    connect()
    policy, generation = _start_models(config, derived)
    buffer = ReplayBuffer(
        num_prompts_per_step=config.grpo.num_prompts_per_step,
        max_trajectory_age_steps=config.grpo.async_grpo.max_trajectory_age_steps,
    )
    collector = RolloutCollector(stream, generation, environments, buffer, _rollout_settings(config))
    num_steps = min(config.grpo.max_num_steps, stream.num_prompts // config.grpo.num_prompts_per_step)
    run = Run(
        config=config,
        policy=policy,
        generation=generation,
        environments=environments,
        collector=collector,
        buffer=buffer,
        validation=_validation(config, validation_rows),
        logger=RunLogger(run_dir, config.logger, num_steps=num_steps),
        stop=stop,
        state=_restore(saved, checkpoints, policy, collector),
        checkpoints=checkpoints,
        num_steps=num_steps,
        pad_token_id=environments.codec.pad_token_id,
    )
    run.logger.resume(run.state.step)
    stop.wake_with(buffer.close)
    return run


def _open_data(config: Config, environments: Environments) -> tuple[PromptStream, PromptDataset | None]:
    rows = require_rows(Path(config.data.train.data_path), environments.check_row)
    stream = PromptStream(
        rows, num_epochs=config.grpo.max_num_epochs, shuffle=config.data.shuffle, seed=config.grpo.seed
    )
    if stream.num_prompts < config.grpo.num_prompts_per_step:
        raise DataError(
            Problem(
                where=config.data.train.data_path,
                got=f"{stream.num_prompts} prompts ({len(rows)} rows, {config.grpo.max_num_epochs} times)",
                expected=f"enough for one step: grpo.num_prompts_per_step is {config.grpo.num_prompts_per_step}",
                fix="add rows, raise grpo.max_num_epochs, or lower grpo.num_prompts_per_step",
            )
        )
    path = config.data.validation.data_path
    return stream, require_rows(Path(path), environments.check_row) if path else None


def _start_models(config: Config, derived: Derived) -> tuple[Policy, Generation]:
    """Start policy and engines at the same time: each takes most of the time that a start needs."""
    counts = WorkerCounts(
        num_train_nodes=derived.num_train_nodes,
        train_workers_per_node=derived.train_workers_per_node,
        num_engines=derived.num_engines,
        units_per_engine=derived.gpus_per_engine,
    )
    policy_options, engine_options = place(counts, deadline_seconds=config.deadlines.placement)
    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as pool:
        policy_future = pool.submit(
            Policy.start,
            config.policy,
            loss=partial(grpo_loss, cfg=config.loss_fn),
            placement=policy_options,
            deadlines=config.deadlines,
            seed=config.grpo.seed,
        )
        generation_future = pool.submit(
            Generation.start,
            config.policy.generation,
            model_path=config.policy.model_name,
            seed=config.grpo.seed,
            placement=engine_options,
            deadlines=config.deadlines,
        )
        policy, generation = policy_future.result(), generation_future.result()
    refit.connect(policy, generation)
    logger.info("policy and engines are up after %.1f s", time.monotonic() - start)
    return policy, generation


def _rollout_settings(config: Config) -> RolloutSettings:
    generation = config.policy.generation
    return RolloutSettings(
        num_prompts_per_step=config.grpo.num_prompts_per_step,
        num_generations_per_prompt=config.grpo.num_generations_per_prompt,
        max_trajectory_age_steps=config.grpo.async_grpo.max_trajectory_age_steps,
        max_generation_failures=config.grpo.async_grpo.max_generation_failures,
        sampling=Sampling(
            temperature=generation.temperature, top_p=generation.top_p, max_tokens=generation.max_new_tokens
        ),
        max_model_len=generation.vllm_cfg.max_model_len,
        rollout_seconds=config.deadlines.rollout,
    )


def _validation(config: Config, rows: PromptDataset | None) -> ValidationSet | None:
    if rows is None:
        return None
    generation = config.policy.generation
    return ValidationSet(
        dataset=rows,
        sampling=Sampling(
            temperature=generation.val_temperature, top_p=generation.val_top_p, max_tokens=generation.max_new_tokens
        ),
        num_generations=config.grpo.val_num_generations_per_prompt,
        greedy=config.grpo.val_greedy,
        deadline_seconds=config.deadlines.progress,
    )


def _saved_state(checkpoints: Path, cfg: GrpoConfig) -> SavedState | None:
    path = latest_checkpoint(checkpoints)
    if path is None:
        return None
    saved = load_state(path)
    require_window(saved, cfg, path)
    return saved


def require_window(saved: SavedState, cfg: GrpoConfig, path: Path) -> None:
    """Check that the prompts drawn before a save fit into the window of steps after it; raises `ConfigError`.

    With a smaller window some groups would be trained too late, or never.
    """
    finished, in_flight = saved.collector.finished, saved.collector.in_flight
    targets = [group.target_step for group in finished] + [target for _, target in in_flight]
    ages = [target - saved.step for target in targets] + [group.target_step - group.version for group in finished]
    needed = {
        "num_prompts_per_step": (cfg.num_prompts_per_step, max(Counter(targets).values(), default=0)),
        "async_grpo.max_trajectory_age_steps": (cfg.async_grpo.max_trajectory_age_steps, max(ages, default=0)),
    }
    problems = [
        Problem(
            where=f"grpo.{key}",
            got=str(given),
            expected=f"at least {least}: it was larger when {path} was saved",
            fix=f"restore it, or start a new run with MODEL_PATH={path / 'hf'}",
        )
        for key, (given, least) in needed.items()
        if given < least
    ]
    if problems:
        raise ConfigError(problems)


def _restore(
    saved: SavedState | None, checkpoints: Path, policy: PolicyHandle, collector: RolloutCollector
) -> TrainState:
    """Load a checkpoint into policy and collector; a fresh state when there is none."""
    if saved is None:
        return TrainState()
    path = step_dir(checkpoints, saved.step)
    policy.load(path / "policy")
    collector.restore(saved.collector)
    trained: list[LedgerEntry] = [entry for entry in saved.ledger if entry.step > 0]
    logger.info("resumed from %s: step %d, %d prompts trained", path, saved.step, len(trained))
    return TrainState(step=saved.step, saved_step=saved.step, ledger=trained)
