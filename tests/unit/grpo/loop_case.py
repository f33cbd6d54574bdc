"""A whole run on small deterministic fakes of policy, engines and environments: for the order of things."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recipes.cluster.starts import Starts
from recipes.config.keys.derive import max_age
from recipes.config.load import load_config, require_runnable
from recipes.errors import EngineError
from recipes.files import FileSum
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.checkpoint import latest_checkpoint, load_state
from recipes.grpo.data import PromptDataset, PromptStream
from recipes.grpo.log import Recorder, RunLogger
from recipes.grpo.rollout import RolloutCollector
from recipes.grpo.run import Run
from recipes.grpo.saving import Saver
from recipes.grpo.setup import _num_steps, _restore, _rollout_settings, _validation
from recipes.grpo.train import train
from recipes.rollouts.group import GroupRunner
from recipes.stop import StopRequest
from recipes.types import (
    Completion,
    ModelClient,
    Rollout,
    RolloutStatus,
    Row,
    Sampling,
    TrainBatch,
    Turn,
    VersionSpan,
    WeightLayout,
)
from tests.groups import LocalStore, LocalWorkers

ROOT = Path(__file__).resolve().parents[3]
P, G = 2, 2
LOGPROB = -1.0


class Failures(dict[str, Exception]):
    """What raises, by "part.method" or "part.method N" for its Nth call; each once."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__(failures)
        self._calls: dict[str, int] = {}

    def meet(self, name: str) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1
        failure = self.pop(f"{name} {self._calls[name]}", None)
        if failure is not None:
            raise failure


class LoopPolicy:
    """Counts its optimizer steps; a checkpoint holds the count."""

    num_sent = 0  # tensors
    expected = 0.0  # seconds of a save

    def __init__(self, failures: Failures) -> None:
        self.failures, self.step = failures, 0

    def logprobs(self, batch: TrainBatch) -> list[torch.Tensor]:
        return [torch.full((length,), LOGPROB) for length in batch.lengths_B.tolist()]

    def fetch(self, _batch: TrainBatch) -> None:
        self.failures.meet("policy.fetch")

    def train(self, _batch: TrainBatch) -> dict[str, float]:
        self.failures.meet("policy.train")
        self.step += 1
        return {"loss": 0.0, "lr": 1e-3, "global_valid_toks": 8.0}

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None:
        self.failures.meet("policy.begin_save")
        for directory in (path, export_path):
            directory.mkdir()
        (path / "step").write_text(str(self.step), encoding="utf-8")
        (export_path / "config.json").write_text("{}", encoding="utf-8")

    def expected_save_seconds(self, directory: Path, *, with_optimizer: bool) -> float:
        self.failures.meet("policy.expected_save_seconds")
        assert directory.is_dir() and with_optimizer
        return self.expected

    def is_save_written(self) -> bool:
        self.failures.meet("policy.is_save_written")
        return True

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        self.failures.meet("policy.finish_save")
        return 0.5, {}

    def load(self, path: Path) -> None:
        self.step = int((path / "step").read_text(encoding="utf-8"))

    def weight_layout(self) -> WeightLayout:
        return WeightLayout(path="shared", names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0)

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class LoopGeneration:
    """Answers every prompt with two tokens, once it has got weights: like the real one, it starts without."""

    needs_weight_content = False
    num_engines = num_engines_alive = 1

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.has_weights = False
        self.starts = Starts(["generation engine 0"], max_starts=1, min_share=1.0)

    def needs_connect(self, _layout: WeightLayout) -> bool:
        return False

    async def generate(self, _ids: tuple[int, ...], _sampling: Sampling, **_options: Any) -> Completion:
        self.failures.meet("generation.generate")
        if not self.has_weights:
            raise EngineError("generation engine 0 has no weights before the first push")
        spans = (VersionSpan(version=0, start=0, end=2),)
        return Completion(token_ids=(5, 6), logprobs=(LOGPROB, LOGPROB), versions=spans, finish_reason="stop")

    def end(self, _session: Any) -> None: ...

    def drain(self) -> None: ...

    def update_weights(self, _version: int, _content: Any = None, **_options: Any) -> None:
        self.failures.meet("generation.update_weights")
        self.has_weights = True

    def stats(self) -> list[dict[str, float]]:
        self.failures.meet("generation.stats")
        return [{"generated_tokens": 8.0, "busy_seconds": 0.1}]

    def take_samples(self) -> list[dict[str, float]]:
        return [{"kv_cache_usage_perc/mean": 0.5}]

    def shutdown(self) -> None: ...


class LoopEnvironments:
    """Rewards 1 and 0 in turn; rows whose text is in `broken` get no verdict."""

    codec = SimpleNamespace(encode=lambda params: (1,) * (2 + len(params["input"])))

    def __init__(self, broken: Sequence[str] = ()) -> None:
        self.broken = set(broken)
        self.asked: list[str] = []

    def compares(self, row: Row) -> bool:
        return False

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        text = row["responses_create_params"]["input"]
        self.asked.append(text)
        answer = await model.generate((1, 2), max_tokens=max_tokens)
        await asyncio.sleep(0)
        turn = Turn(
            prompt_token_ids=(1, 2),
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
        )
        if text in self.broken:
            return Rollout(turns=(turn,), status=RolloutStatus.ENV_FAILED, reason="down", reward=None)
        reward = float(len(self.asked) % 2)
        return Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="counted", reward=reward)

    def reserve(self, row: Row, *, seconds: float) -> nullcontext[None]:
        return nullcontext()

    async def finish_group(self, _row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        return tuple(rollouts)

    def close(self) -> None: ...


def write_rows(path: Path, names: Sequence[str]) -> Path:
    """Write one row per name; what stands before a colon is its agent."""
    rows = [
        {"responses_create_params": {"input": name}, "agent_ref": {"name": name.rpartition(":")[0] or "agent"}}
        for name in names
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def make_run(
    directory: Path,
    names: Sequence[str],
    *overrides: str,
    failures: dict[str, Exception] | None = None,
    environments: LoopEnvironments | None = None,
    stop: StopRequest | None = None,
) -> Run:
    """Return a run over these rows, resumed from the newest checkpoint below `directory` if there is one."""
    rows = write_rows(directory / "train.jsonl", names)
    config = require_runnable(
        load_config(
            ROOT / "configs" / "tiny" / "stage1_rlvr.yaml",
            [
                "policy.model_name=model",
                f"data.train.data_path={rows}",
                f"data.validation.data_path={write_rows(directory / 'val.jsonl', ['held:out'])}",
                f"grpo.num_prompts_per_step={P}",
                f"grpo.num_generations_per_prompt={G}",
                "grpo.val_at_start=false",
                "grpo.val_at_end=false",
                "checkpointing.save_period=100",
                "logger.tensorboard_enabled=false",
                *overrides,
            ],
        )
    )
    failing = Failures(failures or {})
    environments = environments or LoopEnvironments()
    policy, generation = LoopPolicy(failing), LoopGeneration(failing)
    stream = PromptStream(PromptDataset(rows), num_epochs=1, shuffle=False, seed=0)
    checkpoints = directory / "checkpoints"
    found = latest_checkpoint(checkpoints)
    saved = load_state(found) if found else None
    age = max_age(config.grpo.async_grpo)
    buffer = ReplayBuffer(num_prompts_per_step=P, max_trajectory_age_steps=age)
    settings = _rollout_settings(config)
    groups = GroupRunner(
        sampler=generation,
        runner=environments,
        max_model_len=settings.max_model_len,
        rollout_seconds=config.deadlines.rollout,
    )
    workers = LocalWorkers(groups)
    collector = RolloutCollector(stream, workers, buffer, LocalStore(), settings)
    num_steps = _num_steps(config.grpo, stream, saved)
    state = _restore(saved, checkpoints, policy, collector)  # type: ignore[arg-type]
    stop = stop or StopRequest(must_save_by=None, job_start=0.0)
    logger = RunLogger(directory, config.logger, num_steps=num_steps)
    recorder = Recorder(
        config=config,
        logger=logger,
        state=state,
        generation=generation,  # type: ignore[arg-type]
        workers=workers,
        collector=collector,
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
        policy=policy,  # type: ignore[arg-type]
        generation=generation,  # type: ignore[arg-type]
        environments=environments,
        workers=workers,
        collector=collector,
        buffer=buffer,
        validation=_validation(config, PromptDataset(directory / "val.jsonl"), environments),
        recorder=recorder,
        saver=saver,
        stop=stop,
        state=state,
        num_steps=num_steps,
    )
    logger.resume(state.step)
    run.end_if_good_enough(run.state.metrics)
    run.stop.wake_with(buffer.close)
    return run


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(directory: Path) -> list[int]:
    """Return the rows that the newest checkpoint's ledger holds as trained, in order of step."""
    found = latest_checkpoint(directory / "checkpoints")
    assert found is not None
    return [int(entry.key.split(":")[1]) for entry in load_state(found).ledger if entry.step]


def drive(run: Run) -> BaseException | None:
    """Train and leave as the entrypoint does."""
    try:
        train(run)
    except Exception as failure:
        run.save_after(failure)
        return failure
    finally:
        run.close()
    return None


def policy_step(directory: Path) -> int:
    """Return the step at which the policy of the newest checkpoint was saved."""
    found = latest_checkpoint(directory / "checkpoints")
    assert found is not None
    return int((found / "policy" / "step").read_text(encoding="utf-8"))
