"""`python -m tools.bench.policy`: the policy's train step beside plain transformers, and a weight push beside a copy.

A train step is that of one rank: forward, GRPO's loss, backward, gradient norm, Adam. Beside it `transformers` trains
the same model on the same rows with the same number of threads: forward, the same tokens' log-probabilities, backward,
clipping, AdamW. Both take turns, so that a slow minute of the machine changes both. A push takes the weights from the
policy's process to an engine that can generate with them. Beside it numpy copies as many bytes within one process. The
time of one call to the engine and back, without weights, is printed too: where a copy takes less, no push can keep up.
Of a checkpoint, the time for which training stands still is compared with the time that writing takes.

How long training stands still for a checkpoint of a real policy, and how long writing it takes.

The time of weight pushes from a policy to an engine, of plain copies of as many bytes, and of empty calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config.load import load_config, require_valid
from recipes.errors import RecipeError, RunError
from recipes.files import write_atomically
from tools.bench.verdict import Check, load_warning, machine, median_ratio, table
from tools.tiny.model import HYBRID_LAYERS, build_hybrid_model, build_tokenizer

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.policy.policy import Policy
    from recipes.types import TrainBatch
if TYPE_CHECKING:
    from recipes.config.tree import Config


SAVE_SECONDS = 1800.0  # for the policy to be up, and for a save: the machine may be busy
STORE_BYTES = 100 << 20


def measure_save(config: Config, batch: TrainBatch, num_rounds: int, place: Path) -> tuple[list[float], list[float]]:
    """Return the seconds that training stood still, and those of writing, save by save into `place`.

    A save has weights, optimizer and the export, as a run's has. `batch` is trained once before, as the optimizer has
    no state before its first step; its arrays lie in this process.
    """
    from recipes.cluster.private import private_ray
    from recipes.cluster.token_store import RayTokenStore
    from recipes.grpo.loss import grpo_loss
    from recipes.policy.policy import Policy

    os.environ["OMP_NUM_THREADS"] = "1"
    deadlines = replace(config.deadlines, placement=SAVE_SECONDS, engine_start=SAVE_SECONDS, checkpoint=SAVE_SECONDS)
    stood, wrote = [], []
    with private_ray(2, object_store_memory=STORE_BYTES):
        loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
        policy = Policy.start(config.policy, loss=loss, placement=[{"num_cpus": 1}], deadlines=deadlines, seed=1)
        store = RayTokenStore()
        policy.train(replace(batch, tokens=tuple(store.put(tokens) for tokens in batch.tokens)))
        for number in range(num_rounds):
            began, seconds = _save(policy, place / f"save{number}")
            stood.append(began)
            wrote.append(seconds)
            shutil.rmtree(place / f"save{number}")
        policy.shutdown()
    return stood, wrote


def _save(policy: Policy, path: Path) -> tuple[float, float]:
    began = time.perf_counter()
    policy.begin_save(path / "policy", path / "hf")
    stood = time.perf_counter() - began
    while not policy.is_save_written():
        if time.perf_counter() - began > SAVE_SECONDS:
            raise RunError(f"bench-policy: a save was not written within {SAVE_SECONDS:g} s")
        time.sleep(0.05)
    began = time.perf_counter()
    wrote, _ = policy.finish_save()
    return stood + time.perf_counter() - began, wrote


START_SECONDS = 900.0  # for policy and engine to be up, and for a push: the machine may be busy


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Seconds, one of each kind per round; the kinds take turns."""

    pushes: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # to the engine and back, without weights: no push is faster


def measure_push(config: Config, num_rounds: int) -> PushTimes:
    """Push the weights of a policy to an engine, copy as many bytes within this process, and call the engine."""
    import numpy as np

    from recipes.cluster.private import private_ray
    from recipes.generation.generation import Generation
    from recipes.generation.serving.requests import AtPush
    from recipes.grpo.loss import grpo_loss
    from recipes.grpo.refit import connect, refit
    from recipes.policy.policy import Policy

    os.environ["OMP_NUM_THREADS"] = "1"
    deadlines = replace(config.deadlines, placement=START_SECONDS, engine_start=START_SECONDS, refit=START_SECONDS)
    times = PushTimes()
    with private_ray(2, object_store_memory=STORE_BYTES):
        loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
        one = [{"num_cpus": 1}]
        policy = Policy.start(config.policy, loss=loss, placement=one, deadlines=deadlines, seed=1)
        generation = Generation.start(
            config.policy.generation,
            model_path=config.policy.model_name,
            seed=1,
            placement=one,
            deadlines=deadlines,
            loads_weights=False,
        )
        connect(policy, generation)
        refit(policy, generation, version=0)  # makes what is made once
        source = np.ones(policy.weight_layout().num_bytes, np.uint8)
        target = np.zeros_like(source)
        for version in range(1, num_rounds + 1):
            times.pushes.append(_seconds_of(partial(refit, policy, generation, version=version)))
            times.copies.append(_seconds_of(partial(np.copyto, target, source)))
            generation.at_push = AtPush.DRAIN  # an idle engine answers at once; the next push lets it go on
            times.calls.append(_seconds_of(generation.drain))
            generation.at_push = AtPush.KEEP
        generation.shutdown()
        policy.shutdown()
    return times


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


STEP_LIMIT = 1.0  # of the tokens per second of plain transformers
REPLAY_LIMIT = 0.98  # of the tokens per second without routes
PUSH_LIMIT = 1 / 3  # of the speed of a copy
SAVE_LIMIT = 10.0  # times as long as training stands still may writing take, at least
ROWS, TOKENS = 4, 256
VOCABULARY = 512
SHAPES = {  # millions of parameters -> hidden size, layers
    1: (128, 4),
    10: (320, 8),
    50: (640, 10),
    300: (1280, 16),
}
TINY = Path(__file__).resolve().parents[2] / "configs/tiny/stage1_rlvr.yaml"


def write_model(directory: Path, millions: int) -> int:
    """Write a random dense model and the tiny tokenizer; return the number of its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers = SHAPES[millions]
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(weight.numel() for weight in model.parameters())


def measure_step(directory: Path, num_rounds: int) -> tuple[list[float], list[float]]:
    """Return tokens per second of our step and of the plain one, round by round."""
    ours, plain = _our_step(directory), _plain_step(directory)
    ours(), plain()  # make what is made once
    rounds = [(_seconds(ours), _seconds(plain)) for _ in range(num_rounds)]
    return tuple([ROWS * TOKENS / pair[side] for pair in rounds] for side in (0, 1))  # type: ignore[return-value]


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _our_step(directory: Path, *, replays: bool = False) -> Callable[[], None]:
    from recipes.grpo.loss import grpo_loss
    from recipes.policy import step
    from recipes.policy.shards import BatchShard

    overrides = [f"policy.model_name={directory}", f"policy.router_replay.enabled={str(replays).lower()}"]
    config = require_valid(load_config(TINY, overrides))
    loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
    trainer = step.build_trainer(config.policy, loss)
    shard = BatchShard(batch=_batch(_any_routes() if replays else b""), microbatches=(tuple(range(ROWS)),))

    def call() -> None:
        step.train_steps(trainer, [shard])

    return call


def _plain_step(directory: Path) -> Callable[[], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids_BS = torch.tensor(_rows())
    advantages_B1 = torch.linspace(-1.0, 1.0, ROWS)[:, None]

    def step() -> None:
        optimizer.zero_grad()
        logprobs_BTV = model(input_ids=ids_BS, use_cache=False).logits[:, :-1].log_softmax(-1)
        current_BT = logprobs_BTV.gather(-1, ids_BS[:, 1:, None])[..., 0]
        ratio_BT = (current_BT - current_BT.detach()).exp()
        (-(ratio_BT * advantages_B1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _rows() -> list[list[int]]:
    return [[(7 * place + 31 * row) % 250 for place in range(TOKENS)] for row in range(ROWS)]


def _any_routes() -> bytes:
    """Return two of eight experts for each token of a row, in the layers of the tiny hybrid that have experts."""
    import numpy as np

    from recipes.routes import pack

    chosen_TDK = np.zeros((TOKENS - 1, len(HYBRID_LAYERS), 2), np.uint8)
    has_experts = [kind == "moe" for kind in HYBRID_LAYERS]
    scores = np.random.default_rng(0).random((TOKENS - 1, sum(has_experts), 8))
    chosen_TDK[:, has_experts] = scores.argsort(axis=2)[:, :, :2]
    return pack(chosen_TDK, 0)


def _batch(routes: bytes = b"") -> Any:
    """Return the rows as a batch whose arrays lie in this process."""
    from dataclasses import replace

    import torch

    from recipes.grpo.batch import build_batch
    from recipes.tokens import pack_rollouts
    from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn

    rollouts = []
    for ids in _rows():
        turn = Turn(
            prompt_token_ids=tuple(ids[:1]),
            token_ids=tuple(ids[1:]),
            logprobs=(-5.0,) * (TOKENS - 1),
            versions=(),
            finish_reason="stop",
            routes=routes,
        )
        rollouts.append(Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="", reward=0.0))
    headers, tokens = pack_rollouts(rollouts)
    prompt = PromptRef(epoch=0, row_index=0, prompt_id="")
    group = Group(prompt=prompt, agent="", prompt_text="", target_step=0, version=0, rollouts=headers, tokens=tokens)
    rewards_B = torch.zeros(ROWS, dtype=torch.float64)
    batch = build_batch([group], rewards_B, overlong_filtering=False, mask_flagged=False)
    return replace(batch, advantages_B=torch.linspace(-1.0, 1.0, ROWS))


def step_checks(sizes: Sequence[int], num_rounds: int, place: Path) -> list[Check]:
    """Measure a train step of models of these sizes, in millions of parameters."""
    import torch
    from torch._C._distributed_c10d import HashStore

    from recipes.policy import parallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    cfg = require_valid(load_config(TINY)).policy.megatron_cfg
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=cfg, seed=1, timeout_s=60)
    checks = []
    for millions in sizes:
        parameters = write_model(place / f"step{millions}", millions)
        ours, plain = measure_step(place / f"step{millions}", num_rounds)
        check = Check(
            name=f"train step over transformers, {parameters / 1e6:.1f} M",
            ratio=median_ratio(ours, plain),
            limit=STEP_LIMIT,
            detail=f"{statistics.median(plain):.0f} -> {statistics.median(ours):.0f} tokens/s",
        )
        checks.append(check)
    return checks


def replay_check(num_rounds: int, place: Path) -> Check:
    """Measure a train step of the tiny hybrid that replays routes beside one that does not; `step_checks` is first."""
    directory = place / "replay"
    build_hybrid_model(build_tokenizer(), seed=0).save_pretrained(directory)
    replaying, plain = _our_step(directory, replays=True), _our_step(directory)
    replaying(), plain()  # make what is made once
    pairs = [(ROWS * TOKENS / _seconds(replaying), ROWS * TOKENS / _seconds(plain)) for _ in range(num_rounds)]
    ours, without = ([pair[side] for pair in pairs] for side in (0, 1))
    return Check(
        name="train step with router replay over one without",
        ratio=median_ratio(ours, without),
        limit=REPLAY_LIMIT,
        detail=f"{statistics.median(without):.0f} -> {statistics.median(ours):.0f} tokens/s",
    )


def push_checks(sizes: Sequence[int], num_rounds: int, place: Path) -> list[Check]:
    """Measure a weight push of models of these sizes."""
    checks = []
    for millions in sizes:
        parameters = write_model(place / f"push{millions}", millions)
        config = require_valid(load_config(TINY, [f"policy.model_name={place / f'push{millions}'}"]))
        times = measure_push(config, num_rounds)
        check = Check(
            name=f"copy over weight push, {parameters / 1e6:.1f} M",
            ratio=median_ratio(times.copies, times.pushes),
            limit=PUSH_LIMIT,
            detail="{:.1f} -> {:.1f} ms, of which an empty call to the engine takes {:.1f} ms".format(
                *(1e3 * statistics.median(kind) for kind in (times.copies, times.pushes, times.calls))
            ),
        )
        checks.append(check)
    return checks


def save_checks(sizes: Sequence[int], num_rounds: int, place: Path) -> list[Check]:
    """Measure a checkpoint of models of these sizes."""
    checks = []
    for millions in sizes:
        parameters = write_model(place / f"save{millions}", millions)
        config = require_valid(load_config(TINY, [f"policy.model_name={place / f'save{millions}'}"]))
        stood, wrote = measure_save(config, _batch(), num_rounds, place)
        check = Check(
            name=f"writing over standing still, {parameters / 1e6:.1f} M",
            ratio=median_ratio(wrote, stood),
            limit=SAVE_LIMIT,
            detail=f"{statistics.median(stood):.2f} of {statistics.median(wrote):.2f} s",
        )
        checks.append(check)
    return checks


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; return 0 when every limit is kept, 1 when one is not, 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.policy", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("results/bench_policy.json"), help="JSON result")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each size")
    parser.add_argument("--steps", type=int, nargs="*", default=[10, 50], choices=SHAPES, help="millions of parameters")
    parser.add_argument("--pushes", type=int, nargs="*", default=[1, 50, 300], choices=SHAPES, help="the same")
    parser.add_argument("--saves", type=int, nargs="*", default=[300], choices=SHAPES, help="the same")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not args.steps + args.pushes + args.saves:
        parser.error("at least one round and one size are needed")
    found = machine()
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench-policy-", dir=args.out.parent) as directory:
            checks = step_checks(args.steps, args.rounds, Path(directory)) if args.steps else []
            checks += [replay_check(4 * args.rounds, Path(directory))] if args.steps else []
            checks += push_checks(args.pushes, args.rounds, Path(directory)) if args.pushes else []
            checks += save_checks(args.saves, args.rounds, Path(directory)) if args.saves else []
    except RecipeError as error:
        print(f"bench-policy: {error}", file=sys.stderr)
        return error.exit_code
    print(table(checks, []))
    result = {"machine": found, "checks": [{**asdict(check), "is_kept": check.is_kept} for check in checks]}
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())
    if warning := load_warning(found):
        print(f"bench-policy: {warning}")
    print(f"bench-policy: {args.out}")
    return 0 if all(check.is_kept for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
