"""Build a run: place and start both sides at once, open the data, restore the newest checkpoint."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from recipes.cluster.connect import connect
from recipes.cluster.placement import ActorOptions, Places, WorkerCounts, place, spread
from recipes.cluster.token_store import RayTokenStore
from recipes.config.fits import other_model_problems, teacher_problems
from recipes.config.keys.derive import Derived, max_age, num_prompts_at_once, started_judges
from recipes.config.tree import AsyncGrpoConfig, Config, GrpoConfig
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.scoring.judge_servers import with_addresses
from recipes.errors import CheckpointError, ConfigError, DataError, Problem
from recipes.generation.generation import Generation
from recipes.generation.judges import Judges
from recipes.generation.serving.requests import AtPush
from recipes.grpo import refit
from recipes.grpo.advantage import algorithm_of
from recipes.grpo.batch import build_batch
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.checkpoint import (
    LedgerEntry,
    SavedState,
    TrainState,
    complete_export,
    is_export,
    latest_checkpoint,
    load_state,
    step_dir,
    window_problems,
)
from recipes.grpo.data import (
    COMPARED_ALONE,
    RESTORE_DATA,
    CollectorState,
    PromptDataset,
    PromptStream,
    RolloutSettings,
    few_rows,
    identity_problems,
    require_rows,
    too_few_rows,
)
from recipes.grpo.log import Recorder, RunLogger
from recipes.grpo.reward import collect_rewards
from recipes.grpo.rollout import RolloutCollector
from recipes.grpo.run import PolicyHandle, Run
from recipes.grpo.saving import Saver
from recipes.grpo.validate import ValidationSet
from recipes.policy.policy import Policy
from recipes.rollouts.workers import RolloutWorkers
from recipes.stop import StopRequest
from recipes.tokens import TextOf
from recipes.types import Group, Sampling

logger = logging.getLogger(__name__)


def setup(config: Config, derived: Derived, run_dir: Path, stop: StopRequest) -> Run:
    """Return a run that is ready to train, restored from its newest complete checkpoint if there is one."""
    logger.info("checking every row of training and validation")
    environments = Environments.from_config(config.env, ChatCodec.from_config(config.policy))
    stream, validation_rows = _open_data(config, environments)
    validation = _validation(config, validation_rows, environments)
    checkpoints = run_dir / config.checkpointing.checkpoint_dir
    checkpoints.mkdir(parents=True, exist_ok=True)
    newest = latest_checkpoint(checkpoints)  # its small files are read before policy and engines start
    saved, run_logger = _begin(newest, run_dir, stream, config, environments.codec.text)
    logger.info("joining Ray, and placing %d workers", derived.train_gpus + derived.num_engines)
    connect()
    places = _place(config, derived)
    judges = _launch_judges(config, places.judges)
    config = _with_addresses(config, judges, environments)
    workers = RolloutWorkers(config, spread(config.grpo.async_grpo.num_rollout_workers))  # they start beside the models
    policy, generation, whole = _start_models(config, places, judges, checkpoints)
    if whole != newest:  # the ranks have found damage in a large file
        run_logger.close()
        saved, run_logger = _begin(whole, run_dir, stream, config, environments.codec.text)
    workers.connect(generation)
    _meet_judges(config, judges, workers, environments)
    buffer = ReplayBuffer(
        num_prompts_per_step=config.grpo.num_prompts_per_step,
        max_trajectory_age_steps=max_age(config.grpo.async_grpo),
    )
    collector = RolloutCollector(stream, workers, buffer, RayTokenStore(), _rollout_settings(config))
    state = _restore(saved, checkpoints, policy, collector)
    recorder = Recorder(
        config=config, logger=run_logger, state=state, generation=generation, workers=workers, collector=collector
    )
    saver = Saver(
        config=config,
        root=checkpoints,
        policy=policy,
        collector=collector,
        recorder=recorder,
        state=state,
        data=stream.identity,
        stop=stop,
    )
    run = Run(
        config=config,
        policy=policy,
        generation=generation,
        judges=judges,
        environments=environments,
        workers=workers,
        collector=collector,
        buffer=buffer,
        validation=validation,
        recorder=recorder,
        saver=saver,
        stop=stop,
        state=state,
        num_steps=_num_steps(config.grpo, stream, saved),
    )
    run.end_if_good_enough(run.state.metrics)  # of the step that was saved last: then nothing is left to do
    stop.wake_with(buffer.close)
    return run


def _open_data(config: Config, environments: Environments) -> tuple[PromptStream, PromptDataset | None]:
    rows = require_rows(Path(config.data.train.data_path), environments.check_row)
    stream = PromptStream(
        rows, num_epochs=config.grpo.max_num_epochs, shuffle=config.data.shuffle, seed=config.grpo.seed
    )
    if problem := too_few_rows(rows.path, len(rows), config.grpo):
        raise DataError(problem)
    if problem := few_rows(rows.path, len(rows), config.grpo):
        logger.warning("%s", problem)
    path = config.data.validation.data_path
    return stream, require_rows(Path(path), environments.check_row) if path else None


def _place(config: Config, derived: Derived) -> Places:
    counts = WorkerCounts(
        num_train_nodes=derived.num_train_nodes,
        train_workers_per_node=derived.train_workers_per_node,
        num_engines=derived.num_engines,
        units_per_engine=derived.gpus_per_engine,
        units_of_judges=tuple(judge.gpus_per_copy for judge in started_judges(config) for _ in range(judge.num_copies)),
    )
    return place(counts, deadline_seconds=config.deadlines.placement)


def _launch_judges(config: Config, places: Sequence[ActorOptions]) -> Judges | None:
    """Return the judges that the run starts, with an address each; their models are not loaded yet.

    Raises `ConfigError` for a teacher that reads the policy's token ids as other tokens.
    """
    if problems := teacher_problems(config, Path(config.policy.model_name)):
        raise ConfigError(problems)
    if not places:
        return None
    return Judges.launch(
        started_judges(config),
        placement=places,
        cfg=config.policy.generation,
        deadlines=config.deadlines,
    )


def _with_addresses(config: Config, judges: Judges | None, environments: Environments) -> Config:
    """Return the configuration with the addresses of the judges that the run starts; the environments learn them."""
    if judges is None:
        return config
    instances = with_addresses(config.env.nemo_gym.instances, judges.addresses(), judges.api_key)
    env = replace(config.env, nemo_gym=replace(config.env.nemo_gym, instances=instances))
    environments.ask_judges_of(env)
    return replace(config, env=env)


def _meet_judges(config: Config, judges: Judges | None, workers: RolloutWorkers, environments: Environments) -> None:
    """Have every worker ask the copies that are up from now on, and probe them here."""
    if judges is not None:
        judges.subscribe(workers.ask_judges_at)
        environments.ask_judges_at(judges.addresses())
    _probe_judges(config, environments)


def _probe_judges(config: Config, environments: Environments) -> None:
    """Refuse judges that are wrong about known answers, or warn of them, as `env.judge_probe` says."""
    if config.env.judge_probe == "off" or not (problems := environments.wrong_judges(environments.asked_for)):
        return
    if config.env.judge_probe == "refuse":
        raise ConfigError(problems)
    for problem in problems:
        logger.warning("%s", problem)


def _start_models(
    config: Config, places: Places, judges: Judges | None, checkpoints: Path
) -> tuple[Policy, Generation, Path | None]:
    """Start policy, engines and judges at the same time: each takes most of the time that a start needs.

    While the others start, the ranks of the policy read what they will load; returns the checkpoint to go on from.
    """
    start = time.monotonic()
    logger.info("loading %s into policy and engines", config.policy.model_name)
    algorithm, further = algorithm_of(config), [judges.load] if judges is not None else []

    def start_policy() -> tuple[Policy, Path | None]:
        policy = Policy.start(
            config.policy,
            loss=partial(
                algorithm.loss, cfg=config.loss_fn, mismatch_threshold=config.grpo.seq_logprob_error_threshold
            ),
            placement=places.policy,
            deadlines=config.deadlines,
            seed=config.grpo.seed,
            reference=algorithm.reference(config),
        )
        if is_export(start := Path(config.policy.model_name)):
            complete_export(start, policy.sha256s)
        return policy, latest_checkpoint(checkpoints, policy.sha256s)

    (policy, whole), generation, *_ = refit.together(
        start_policy,
        lambda: Generation.start(
            config.policy.generation,
            model_path=config.policy.model_name,
            seed=config.grpo.seed,
            placement=places.engines,
            deadlines=config.deadlines,
            loads_weights=False,  # the first refit comes before the first sample
        ),
        *further,
    )
    generation.at_push = _at_push(config.grpo.async_grpo)
    refit.connect(policy, generation)
    logger.info("policy and engines are up after %.1f s", time.monotonic() - start)
    return policy, generation, whole


def _at_push(cfg: AsyncGrpoConfig) -> AtPush:
    """Return what becomes of running requests at a push. When they end before it, there is no cache to recompute."""
    if not cfg.in_flight_weight_updates:
        return AtPush.DRAIN
    return AtPush.RECOMPUTE if cfg.recompute_kv_cache_after_weight_updates else AtPush.KEEP


def _rollout_settings(config: Config) -> RolloutSettings:
    generation = config.policy.generation
    return RolloutSettings(
        num_prompts_per_step=config.grpo.num_prompts_per_step,
        num_generations_per_prompt=config.grpo.num_generations_per_prompt,
        max_trajectory_age_steps=max_age(config.grpo.async_grpo),
        max_generation_failures=config.grpo.async_grpo.max_generation_failures,
        sampling=Sampling(
            temperature=generation.temperature, top_p=generation.top_p, max_tokens=generation.max_new_tokens
        ),
        max_model_len=generation.vllm_cfg.max_model_len,
        circuit_breaker=config.env.circuit_breaker,
        **_dynamic_sampling(config),
    )


def _dynamic_sampling(config: Config) -> dict[str, Any]:
    """Return the settings that replace groups without variance; none when they are trained on as they are."""
    if not config.grpo.use_dynamic_sampling:
        return {}
    return {
        "teaches": partial(teaches, config=config),
        "max_gen_batches": config.grpo.dynamic_sampling_max_gen_batches,
        "num_prompts_ahead": num_prompts_at_once(config.grpo) - config.grpo.num_prompts_per_step,
    }


def teaches(group: Group, config: Config) -> bool:
    """Whether the rewards of the group's rollouts that may enter the loss differ: else its advantages are all 0."""
    rewards_G, _ = collect_rewards([group], config)
    masked, overlong = config.env.should_mask_flagged_samples, config.grpo.overlong_filtering
    batch = build_batch([group], rewards_G, overlong_filtering=overlong, mask_flagged=masked)
    kept_G = rewards_G[batch.sample_mask_B > 0]
    return bool(kept_G.numel()) and bool(kept_G.max() > kept_G.min())


def _validation(config: Config, rows: PromptDataset | None, environments: Environments) -> ValidationSet | None:
    if rows is None:
        return None
    generation, num = config.policy.generation, config.grpo.val_num_generations_per_prompt
    if num == 1 and any(environments.compares(rows[index]) for index in range(len(rows))):
        raise ConfigError(COMPARED_ALONE)
    return ValidationSet(
        dataset=rows,
        sampling=Sampling(
            temperature=generation.val_temperature, top_p=generation.val_top_p, max_tokens=generation.max_new_tokens
        ),
        num_generations=num,
        greedy=config.grpo.val_greedy,
        deadline_seconds=config.deadlines.progress,
        compares=environments.compares,
    )


def _num_steps(cfg: GrpoConfig, stream: PromptStream, saved: SavedState | None) -> int:
    """Return the step at which the run ends: the configured one, or the last that the data suffices for."""
    done, left = (
        (0, stream.num_prompts) if saved is None else (saved.step, saved.collector.num_left(stream.num_prompts))
    )
    return min(cfg.max_num_steps, done + left // cfg.num_prompts_per_step)


def _begin(
    path: Path | None, run_dir: Path, stream: PromptStream, config: Config, text_of: TextOf
) -> tuple[SavedState | None, RunLogger]:
    """Return the state to go on from, and a log that ends with its step.

    Before policy and engines start, as it opens TensorBoard and W&B.
    """
    saved = _saved_state(path, stream, config)
    run_logger = RunLogger(run_dir, config.logger, num_steps=_num_steps(config.grpo, stream, saved), text_of=text_of)
    run_logger.resume(0 if saved is None else saved.step)
    return saved, run_logger


def _saved_state(path: Path | None, stream: PromptStream, config: Config) -> SavedState | None:
    if path is None:
        return None
    if other := other_model_problems(Path(config.policy.model_name), path):
        raise CheckpointError(other)
    saved = on_same_data(load_state(path), stream, config.data.on_change, path)
    if problems := window_problems(saved, config, path):
        raise ConfigError(problems)
    return saved


def on_same_data(saved: SavedState, stream: PromptStream, on_change: str, path: Path) -> SavedState:
    """Return the state to continue from, whose positions all refer to `stream`.

    When the data is another than that of the checkpoint, `data.on_change` decides: `refuse` raises `CheckpointError`
    with every difference; `restart` draws from the first row again; `keep_ledger` draws every row that the ledger
    does not hold, by prompt id, however the rows are ordered now. Groups of the old data that wait or are in flight
    are given up: they are in no ledger, so their prompts are drawn again where they are still there.
    """
    differing = _differences(saved, stream, path)
    if not differing:
        return saved
    if on_change == "refuse":
        raise CheckpointError(differing)
    done = Counter(entry.key.rpartition(":")[2] for entry in saved.ledger)
    skipped = stream.positions_of(done) if on_change == "keep_ledger" else ()
    logger.warning(
        "the data differs from that of %s, and data.on_change is %s: %d of %d prompts are left",
        path,
        on_change,
        stream.num_prompts - len(skipped),
        stream.num_prompts,
    )
    for problem in differing:
        logger.warning("%s: was %s, is %s", problem.where, problem.expected, problem.got)
    collector = CollectorState(position=0, in_flight=(), finished=(), failed=saved.collector.failed, skipped=skipped)
    return replace(saved, data=stream.identity, collector=collector)


def _differences(saved: SavedState, stream: PromptStream, path: Path) -> list[Problem]:
    """Name what differs between the data of a checkpoint and `stream`; when nothing does, the prompts that moved."""
    if found := identity_problems(saved.data, stream.identity, stream.dataset.path, path):
        return found
    drawn = [(prompt.prompt, stream.draw(prompt.position)) for prompt in saved.collector.in_flight]
    drawn += [(group.prompt, stream.find(group.prompt)) for group in saved.collector.finished]
    moved = [(ref, got[0].key if got else "no row") for ref, got in drawn if got is None or got[0] != ref]
    return [
        Problem(
            where=f"{stream.dataset.path}: row {ref.row_index + 1} of pass {ref.epoch + 1}",
            got=got,
            expected=f"{ref.key}, as when {path} was saved",
            fix=RESTORE_DATA,
        )
        for ref, got in moved
    ]


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
    return TrainState(
        step=saved.step,
        saved_step=saved.step,
        ledger=trained,
        step_seconds=saved.step_seconds,
        save_seconds=saved.save_seconds,
        metrics=dict(saved.metrics),
    )
