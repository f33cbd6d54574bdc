"""`python -m tools.bench.policy`: the policy's train step beside plain transformers, and a weight push beside a copy.

A train step is that of one rank: forward, GRPO's loss, backward, gradient norm, Adam. Beside it `transformers` trains
the same model on the same rows with the same number of threads: forward, the same tokens' log-probabilities, backward,
clipping, AdamW. Both take turns, so that a slow minute of the machine changes both. A push takes the weights from the
policy's process to an engine that can generate with them. Beside it numpy copies as many bytes within one process. The
time of one call to the engine and back, without weights, is printed too: where a copy takes less, no push can keep up.
Of a checkpoint, the time for which training stands still is compared with the time that writing takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from recipes.config.load import load_config, require_valid
from recipes.errors import RecipeError
from recipes.files import write_atomically
from tools.bench.policy_push import measure_push
from tools.bench.policy_save import measure_save
from tools.bench.verdict import Check, load_warning, machine, median_ratio, table
from tools.tiny.tokenizer import build_tokenizer

STEP_LIMIT = 1.0  # of the tokens per second of plain transformers
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


def _our_step(directory: Path) -> Callable[[], None]:
    from recipes.grpo.loss import grpo_loss
    from recipes.policy import step
    from recipes.policy.shards import BatchShard

    config = require_valid(load_config(TINY, [f"policy.model_name={directory}"]))
    loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
    trainer = step.build_trainer(config.policy, loss)
    shard = BatchShard(batch=_batch(), microbatches=(tuple(range(ROWS)),))

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


def _batch() -> Any:
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
