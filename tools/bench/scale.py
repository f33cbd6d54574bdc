"""`python -m tools.bench.scale`: what a step of production size costs the driver, on this machine and without a model.

The step has the size of stage 1: 256 prompts with 16 rollouts each, whose lengths are log-normal with a mean of 9,300
tokens and end at 65,024. Collector, rollout workers with their agents and scoring processes, routing, object store,
buffer, rewards, advantages, planning and the ranks' fetching and packing are those of a run, on a real Ray. Three parts
are not: engines answer with random tokens, a thousand times as fast as real ones; the tokenizer and the questions are
those of the tiny stages; a rank stops at its first packed microbatch. Steps with fewer or shorter rollouts show how the
cost grows. Then rollouts of 200 turns and 100,000 tokens, as in stage 2.2, go through sessions. A checkpoint of 561
sparse files, 1.96 TB, is saved and restarted from. An engine loads a push of Super's tensors, with tiny widths.

What a long rollout costs from the agent to the engine's input: CPU seconds of both processes, the model apart.

Several such rollouts run at once, as in stage 2.2, and their cost is divided among them. With one alone most of what is
measured would be the idle threads of Ray.

Engines that answer with random tokens: actor, connections and sessions are the real ones, but there is no vLLM.

The length of an answer is log-normal, and its tokens come at the speed of one sequence on an engine, `TIME_SCALE` times
as fast. The same request gets the same answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recipes.cluster.ports import hold_in_range
from recipes.config.load import load_config, require_valid
from recipes.environments.agents.conversation import Conversation, Episode
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.errors import RecipeError
from recipes.files import FileSum, write_atomically
from recipes.generation.serving.outstanding import Listener, OutstandingRequests, Tokens
from recipes.generation.serving.requests import Request, Sample, request_seed
from recipes.grpo.checkpoint import LedgerEntry, SavedState, latest_checkpoint, load_state, prune
from recipes.grpo.data import CollectorState, DataIdentity
from recipes.grpo.saving import CheckpointWriter
from recipes.rollouts.group import PolicyClient, Sampler
from recipes.token_ids import TokenIds
from recipes.tokens import pack_rollouts
from recipes.types import Completion, Group, PromptRef, Rollout, RolloutStatus, Sampling, Turn, VersionSpan
from tools.bench import push_cost
from tools.bench.scale_step import (
    HEADS,
    MEAN_TOKENS,
    MODEL_TOKENS,
    MOST_TOKENS,
    Parts,
    Rank,
    StepCost,
    StepSize,
    cpu_seconds,
    measure,
    write_inputs,
)
from tools.bench.verdict import load_warning, machine

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.generation.engine import EngineInfo
    from recipes.generation.generation import EngineHandle, Generation

NUM_SESSIONS, NUM_TURNS, NUM_TOKENS = 8, 200, 100_000
LIMIT_SECONDS = 0.5
_WORDS = "The file has a line that nobody reads. " * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCost:
    """CPU seconds of one rollout of `NUM_TURNS` turns and about `NUM_TOKENS` tokens, beside others like it."""

    num_tokens: int
    agent_seconds: float  # to render, to tokenize and to read what is said
    client_seconds: float
    engine_seconds: float

    @property
    def seconds(self) -> float:
        """Return the cost in both processes, the agent's own part included."""
        return self.agent_seconds + self.client_seconds + self.engine_seconds

    @property
    def is_kept(self) -> bool:
        """Whether it costs no more than the limit."""
        return self.seconds <= LIMIT_SECONDS

    def __str__(self) -> str:
        verdict = "within" if self.is_kept else "OVER"
        return (
            f"each of {NUM_SESSIONS} sessions at once, of {NUM_TURNS} turns and {self.num_tokens} tokens, costs"
            f" {self.seconds:.2f} s of CPU, {verdict} the limit of {LIMIT_SECONDS:g} s: {self.agent_seconds:.2f} s"
            f" for the agent, {self.client_seconds:.2f} s to reach the engine, {self.engine_seconds:.2f} s there"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": LIMIT_SECONDS}


def measure_session(
    generation: Generation, engines: Sequence[Any], engine_cpu: Callable[[], float], model_path: Path
) -> SessionCost:
    """Run rollouts as an agent of tools does; `engine_cpu()` returns the CPU seconds of the engines' processes.

    The agent is measured on written answers, since random tokens call no tools. `model_path` has its tokenizer.
    """
    import ray

    ray.get([engine.set_mean.remote(NUM_TOKENS / NUM_TURNS / 2) for engine in engines], timeout=60)
    codec = ChatCodec(model_path)
    asyncio.run(_use_tools(codec, 5))  # makes what is made once
    began = time.process_time()
    asyncio.run(_use_tools(codec, NUM_TURNS))
    return asyncio.run(_measure(generation, engine_cpu, agent_seconds=time.process_time() - began))


async def _measure(generation: Generation, engine_cpu: Callable[[], float], *, agent_seconds: float) -> SessionCost:
    """Sample as a rollout worker does: by a client of its own, on one event loop."""
    from recipes.generation.clients.client import FollowingClient

    client = FollowingClient("bench", generation.num_engines, max_model_len=MODEL_TOKENS, deadline_seconds=60.0)
    generation.subscribe(client.follow)  # nothing changes later, so it is told on this loop
    await _converse_at_once(client, 5)  # makes what is made once
    began, began_engine = time.process_time(), engine_cpu()
    num_tokens = await _converse_at_once(client, NUM_TURNS)
    here, there = time.process_time() - began, engine_cpu() - began_engine
    return SessionCost(
        num_tokens=num_tokens // NUM_SESSIONS,
        agent_seconds=agent_seconds,
        client_seconds=here / NUM_SESSIONS,
        engine_seconds=there / NUM_SESSIONS,
    )


async def _converse_at_once(sampler: Sampler, num_turns: int) -> int:
    """Return the tokens of all rollouts together."""
    return sum(await asyncio.gather(*(_converse(sampler, num_turns, number) for number in range(NUM_SESSIONS))))


async def _converse(sampler: Sampler, num_turns: int, prompt: int) -> int:
    """Take turns; what a tool answers brings each turn to the same length."""
    per_turn = NUM_TOKENS // NUM_TURNS
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=per_turn)
    client = PolicyClient(sampler, sampling, MODEL_TOKENS, affinity=prompt, rollout=0)
    seen = TokenIds()
    for turn in range(num_turns):
        new = tuple(range(1000, 1000 + turn * per_turn - len(seen))) or (1,)
        prompt_ids = seen.plus(new)
        completion = await client.generate(prompt_ids, max_tokens=per_turn)
        seen = prompt_ids.plus(completion.token_ids)
    client.close()
    return len(seen)


@dataclass(frozen=True, slots=True)
class _Written:
    """A model that says the same in every turn."""

    token_ids: tuple[int, ...]
    max_model_len: int = MODEL_TOKENS

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        count = len(self.token_ids)
        span = VersionSpan(version=0, start=0, end=count)
        return Completion(token_ids=self.token_ids, logprobs=(-0.5,) * count, versions=(span,), finish_reason="stop")


async def _use_tools(codec: ChatCodec, num_turns: int) -> None:
    """Let a written policy and a tool take turns; each says half of the tokens of a turn."""
    half = codec.text(codec.token_ids(_WORDS)[: NUM_TOKENS // NUM_TURNS // 2])
    call = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    says = (*codec.token_ids(f"<think>{half}</think>\n{call}"), codec.eos_token_id)
    episode = Episode(
        row={},
        codec=codec,
        model=_Written(says),
        verifier=cast(Any, None),  # nothing is scored
        patterns=FlagPatterns(invalid_tool_call=("<tool_call>",), thinking_tags=("<think>", "</think>")),
        max_tokens=len(says),
    )
    tool = {"type": "function", "name": "run", "parameters": {"properties": {"command": {"type": "string"}}}}
    said = Conversation(episode, {"input": [{"role": "user", "content": "Look around."}], "tools": [tool]})
    for _ in range(num_turns):
        [called] = await said.next_turn()
        said.add_answer(half, call_id=called["call_id"])


TOKENS_PER_SECOND = 60.0  # of one sequence
TIME_SCALE = 1000.0
SIGMA = 1.0  # spread of the logarithm of a length


NUM_IDS = 256  # the pieces of the tiny tokenizer that stand for one byte


class RandomEngine:
    """A Ray actor in the place of an engine's."""

    def __init__(self, index: int, *, mean_tokens: float, num_ids: int, ports: tuple[int, int]) -> None:
        """Ids are below `num_ids`; `it listens on one of `ports`: the first, and the end of the range."""
        self._ports = ports
        self._index, self._mean_tokens, self._num_ids = index, mean_tokens, num_ids
        self._outstanding = OutstandingRequests(self)
        self._totals = dict.fromkeys(("requests", "prompt_tokens", "generated_tokens"), 0.0)

    async def start(self) -> EngineInfo:
        """Return where it runs."""
        import numpy  # noqa: F401  loaded before anything is measured

        from recipes.generation.engine import EngineInfo

        self._listener = await Listener.start(self._outstanding, hold_in_range(*self._ports, host="127.0.0.1"))
        self._info = EngineInfo(
            index=self._index,
            node=socket.gethostname(),
            pid=os.getpid(),
            core_pids=(),
            address=self._listener.address,
            base_url=None,
            api_key=None,
            import_seconds=0.0,
            engine_seconds=0.0,
            server_seconds=0.0,
        )
        return self._info

    def __str__(self) -> str:
        return str(self._info)

    async def forget(self, client: str) -> None:
        """End every request and every session of a client."""
        self._outstanding.forget(client)

    @property
    def is_dead(self) -> bool:
        """It never dies."""
        return False

    async def set_mean(self, mean_tokens: float) -> None:
        """Answer with so many tokens in the mean from now on."""
        self._mean_tokens = mean_tokens

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        """Return random tokens once their time has passed."""
        import numpy as np

        rng = np.random.default_rng(request_seed(0, request, prompt.ids))
        length = rng.lognormal(np.log(self._mean_tokens) - SIGMA**2 / 2, SIGMA)
        count = int(np.clip(length, 1, request.sampling.max_tokens))
        await asyncio.sleep(count / TOKENS_PER_SECOND / TIME_SCALE)
        self._totals["requests"] += 1
        self._totals["prompt_tokens"] += len(prompt.values)
        self._totals["generated_tokens"] += count
        return Sample(
            token_ids=rng.integers(0, self._num_ids, count, dtype=np.int32).tobytes(),
            logprobs=(-rng.random(count, dtype=np.float32)).tobytes(),
            versions=((0, 0, count),),
            finish_reason="stop" if count < request.sampling.max_tokens else "length",
        )

    async def stats(self) -> dict[str, float]:
        """Return running totals."""
        return dict(self._totals)

    async def shutdown(self) -> None:
        """Do nothing: the process is all there is."""


def begin_engines(
    config: Config,
    count: int,
    *,
    kind: type[RandomEngine] = RandomEngine,
    mean_tokens: float = MEAN_TOKENS,
    num_ids: int = NUM_IDS,
    env: Mapping[str, str] | None = None,
) -> tuple[Generation, list[EngineHandle]]:
    """Begin to start engines under the real handle; `env` has variables of their processes."""
    import ray

    from recipes.generation.generation import EngineHandle, Generation

    remote, cfg = (
        ray.remote(kind).options(num_cpus=0, runtime_env={"env_vars": dict(env or {})}),
        config.policy.generation,
    )
    ports = cfg.port_range_low, cfg.port_range_high

    def make_actor(index: int, _options: Any) -> Any:
        return remote.remote(index, mean_tokens=mean_tokens, num_ids=num_ids, ports=ports)

    handles = [EngineHandle(index, {}, make_actor) for index in range(count)]
    return Generation(handles, cfg=cfg, deadlines=config.deadlines, loads_weights=True), handles


STORE_BYTES = 2 << 30
PARTS = (16, 4, 1)  # of the largest step: steps of 256, 1,024 and 4,096 rollouts show how the cost grows
TINY = Path(__file__).resolve().parents[2] / "configs/tiny/stage1_rlvr.yaml"


@contextmanager
def running(config: Config, args: argparse.Namespace) -> Iterator[Parts]:
    """Run a Ray instance of our own with all parts of a step; `config` is that of the stage to plan for."""
    import ray

    from recipes.cluster.private import private_ray
    from recipes.rollouts.workers import RolloutWorkers

    with (
        tempfile.TemporaryDirectory(prefix="bench-scale-", ignore_cleanup_errors=True) as directory,
        private_ray(args.ranks, object_store_memory=STORE_BYTES),
    ):
        place = Path(directory)
        write_inputs(place, args.prompts)
        own = _workers_config(place, args)
        multiple = config.policy.make_sequence_length_divisible_by
        ranks = [ray.remote(Rank).options(num_cpus=1).remote(multiple) for _ in range(args.ranks)]
        generation, handles = begin_engines(own, args.engines)
        generation.starts.wait(300)
        engines = [handle.actor for handle in handles]
        workers = RolloutWorkers(own, [{"num_cpus": 0} for _ in range(args.workers)])
        workers.connect(generation)
        ray.get([rank.__ray_ready__.remote() for rank in ranks], timeout=300)
        yield Parts(
            config=config,
            rows=place / "rows.jsonl",
            workers=workers,
            generation=generation,
            engines=engines,
            ranks=ranks,
        )
        workers.close()
        generation.shutdown()


def _workers_config(place: Path, args: argparse.Namespace) -> Config:
    """Return the configuration of the rollout workers and the engines: the tiny stage with long answers."""
    loaded = load_config(
        TINY,
        [
            f"policy.model_name={place / 'model'}",
            f"policy.max_total_sequence_length={MODEL_TOKENS}",
            f"policy.generation.max_new_tokens={MOST_TOKENS}",
            f"cluster.gpus_per_node={args.engines + 1}",
            f"policy.generation.colocated.resources.gpus_per_node={args.engines}",
            "deadlines.generation=550",
            "deadlines.rollout=560",
            "deadlines.progress=570",
        ],
    )
    return require_valid(loaded)


NUM_RANKS, NUM_EXPORT_FILES = 512, 49
RANK_BYTES, EXPORT_BYTES = 3_350_000_000, 5_000_000_000  # of one file
INDEX_BYTES = 100_000_000  # of Megatron's .metadata: 41,643 tensors in many parts
NUM_GROUPS, NUM_ROLLOUTS, SAVED_TOKENS, NUM_STEPS = 256, 16, 9_300, 200
SAVE_LIMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Seconds of the driver's processor, and as they passed; the ranks' own work is not among them."""

    num_files: int
    num_bytes: int
    save_seconds: float
    save_elapsed: float
    restart_seconds: float
    restart_elapsed: float

    @property
    def is_kept(self) -> bool:
        """Whether neither costs more than the limit; how long they take depends on what else this machine does."""
        return max(self.save_seconds, self.restart_seconds) <= SAVE_LIMIT_SECONDS

    def __str__(self) -> str:
        verdict = "within" if self.is_kept else "OVER"
        return (
            f"a checkpoint of {self.num_files} large files, {self.num_bytes / 1e12:.2f} TB, costs the driver"
            f" {self.save_seconds:.2f} s of CPU to save and {self.restart_seconds:.2f} s to restart from, {verdict} the"
            f" limit of {SAVE_LIMIT_SECONDS:g} s; on the clock {self.save_elapsed:.2f} and {self.restart_elapsed:.2f} s"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": SAVE_LIMIT_SECONDS}


_Times = tuple[float, float]
"""Seconds of this process, all threads together, and of the clock."""


def _now() -> _Times:
    return time.process_time(), time.monotonic()


def _since(start: _Times) -> _Times:
    now = _now()
    return now[0] - start[0], now[1] - start[1]


@dataclass(slots=True)
class _SparsePolicy:
    """Has written files of the right sizes at once."""

    sums: dict[Path, FileSum] = field(default_factory=dict)
    times: _Times = (0.0, 0.0)  # of its own work

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None:
        start = _now()
        names = {path / f"__{rank}_0.distcp": RANK_BYTES for rank in range(NUM_RANKS)}
        parts = range(1, NUM_EXPORT_FILES + 1)
        names |= {export_path / f"model-{n:05d}-of-{NUM_EXPORT_FILES:05d}.safetensors": EXPORT_BYTES for n in parts}
        for directory in (path, export_path):
            directory.mkdir(parents=True)
        for file, size in names.items():
            file.touch()
            os.truncate(file, size)
        (path / ".metadata").write_bytes(os.urandom(INDEX_BYTES))
        self.sums = {file: FileSum("0" * 64, size) for file, size in names.items()}
        self.times = _since(start)

    def is_save_written(self) -> bool:
        return True

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        return 0.0, self.sums


def measure_save() -> SaveCost:
    """Save twice, so that the second prunes the first, and restart from the second."""
    policy = _SparsePolicy()
    with tempfile.TemporaryDirectory(prefix="bench-save-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        keep_one = partial(prune, root, keep_top_k=1, metric=None, higher_is_better=True, save_period=1)
        writer = CheckpointWriter(root, policy, prune=keep_one)
        for step in (NUM_STEPS - 1, NUM_STEPS):
            state = _state(step)
            start = _now()
            writer.begin(state)
            writer.wait()
            save = _since(start)
        start = _now()
        newest = latest_checkpoint(root)
        assert newest is not None and load_state(newest).step == NUM_STEPS, "the sparse files were read"
        restart = _since(start)
    sizes = [one.num_bytes or 0 for one in policy.sums.values()]
    return SaveCost(
        num_files=len(sizes),
        num_bytes=sum(sizes),
        save_seconds=save[0] - policy.times[0],
        save_elapsed=save[1] - policy.times[1],
        restart_seconds=restart[0],
        restart_elapsed=restart[1],
    )


def _state(step: int) -> SavedState:
    """Return the state of a run with one step of finished groups; their arrays are written as often as they stand."""
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=tuple(range(SAVED_TOKENS)),
        logprobs=(-0.5,) * SAVED_TOKENS,
        versions=(VersionSpan(version=step, start=0, end=SAVED_TOKENS),),
        finish_reason="stop",
    )
    rollout = Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="right", reward=1.0)
    headers, tokens = pack_rollouts([rollout] * NUM_ROLLOUTS)
    prompts = [PromptRef(epoch=0, row_index=row, prompt_id="ab" * 8) for row in range(NUM_GROUPS)]
    finished = tuple(
        Group(prompt=one, agent="a", prompt_text="", target_step=step, version=step, rollouts=headers, tokens=None)
        for one in prompts
    )
    collector = CollectorState(
        position=NUM_GROUPS, in_flight=(), finished=finished, finished_tokens=(tokens,) * NUM_GROUPS, failed=()
    )
    return SavedState(
        step=step,
        data=DataIdentity(sha256="ef" * 32, num_rows=NUM_GROUPS, shuffle=False, seed=1),
        collector=collector,
        ledger=tuple(LedgerEntry(key=one.key, step=done) for done in range(1, step + 1) for one in prompts),
        metrics={"train/reward": 0.5},
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; return 0, 1 when a limit is missed, or 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/stage1_rlvr.yaml"), help="stage to plan for")
    parser.add_argument("--out", type=Path, default=Path("results/bench_scale.json"), help="JSON result")
    parser.add_argument("--prompts", type=int, default=256, help="prompts of the largest step")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--engines", type=int, default=4, help="engines that answer with random tokens")
    args = parser.parse_args(argv)
    if args.prompts < PARTS[0] or min(args.ranks, args.workers, args.engines) < 1:
        parser.error(f"at least {PARTS[0]} prompts, 1 rank, 1 worker and 1 engine are needed")
    found = machine()
    try:
        config = require_valid(load_config(args.config))
        saving, push = measure_save(), push_cost.measured()
        with running(config, args) as parts:
            costs, session = _measure_all(parts, num_prompts=args.prompts)
    except RecipeError as error:
        print(f"bench-scale: {error}", file=sys.stderr)
        return error.exit_code
    widths = [max(len(row[column]) for row in (HEADS, *(cost.row() for cost in costs))) for column in range(len(HEADS))]
    for row in (HEADS, *(cost.row() for cost in costs)):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"bench-scale: {session}\nbench-scale: {saving}\nbench-scale: {push_cost.sentence(push)}")
    steps = [asdict(cost) for cost in costs]
    result = {
        "machine": found,
        "steps": steps,
        "session": session.as_dict(),
        "checkpoint": saving.as_dict(),
        "push": push,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(result, default=str).encode())
    if warning := load_warning(found):
        print(f"bench-scale: {warning}")
    print(f"bench-scale: {args.out}")
    return 0 if session.is_kept and saving.is_kept and push_cost.is_kept(push) else 1


def _measure_all(parts: Parts, *, num_prompts: int) -> tuple[list[StepCost], SessionCost]:
    sizes = [StepSize(num_prompts=num_prompts // part, mean_tokens=MEAN_TOKENS) for part in PARTS]
    sizes += [StepSize(num_prompts=num_prompts, mean_tokens=MEAN_TOKENS // 4)]
    measure(StepSize(num_prompts=4, mean_tokens=100), parts)  # makes what is made once
    costs = [measure(size, parts) for size in sizes]
    engine_cpu = partial(cpu_seconds, "ray::RandomEngine")
    return costs, measure_session(parts.generation, parts.engines, engine_cpu, parts.rows.parent / "model")


if __name__ == "__main__":
    sys.exit(main())
