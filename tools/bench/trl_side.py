"""TRL's GRPOTrainer on the rows, the model and the rewards of a stage; prints the seconds of each step as JSON.

It runs in a process of its own with TRL on its path; see peer.py. One optimizer step per batch, as in the stage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from recipes.config.load import load_config, require_runnable
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.types import Completion, VersionSpan
from tools.bench.training import SPREAD

MICRO_BATCH = 32  # rows of one forward pass: TRL's fastest on two cores


class OneAnswer:
    """A model client that gives the answer which TRL has sampled."""

    def __init__(self, token_ids: tuple[int, ...], *, is_cut: bool, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._completion = Completion(
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            versions=(VersionSpan(version=0, start=0, end=len(token_ids)),),
            finish_reason="length" if is_cut else "stop",
        )

    async def generate(self, *_words: Any, **_options: Any) -> Completion:
        """Return the answer, whatever is asked."""
        return self._completion


class Rewards:
    """Scores TRL's samples as a rollout of the stage would be, all samples of a step at once."""

    __name__ = "rewards"  # TRL names reward functions by it

    def __init__(self, config: Config, rows: list[dict[str, Any]], eos: int, latency: float) -> None:
        codec = ChatCodec.from_config(config.policy)
        self.environments = Environments.from_config(config.env, codec)
        self._rows, self._eos, self._latency = rows, eos, latency
        self._max_tokens = config.policy.max_total_sequence_length
        self._loop, self._random = asyncio.new_event_loop(), random.Random(config.grpo.seed)

    def __call__(self, *, completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        """Return the rewards; a rollout without a verdict earns nothing here."""

        async def all_of_them() -> list[float]:
            return await asyncio.gather(*(self._one(*pair) for pair in zip(row, completion_ids, strict=True)))

        return self._loop.run_until_complete(all_of_them())

    async def _one(self, row: int, ids: list[int]) -> float:
        model = OneAnswer(tuple(ids), is_cut=ids[-1] != self._eos, max_model_len=self._max_tokens)
        rollout = await self.environments.run(self._rows[row], model, max_tokens=self._max_tokens)
        await asyncio.sleep(self._latency * self._random.uniform(*SPREAD))
        return rollout.reward or 0.0


def train(config: Config, *, num_steps: int, latency: float, out: Path) -> list[float]:
    """Train and return when each step ended, in seconds."""
    import torch
    from datasets import Dataset  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-untyped, import-not-found, unused-ignore]

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_words: Any, **_options: Any) -> None:
            ends.append(time.monotonic())

    grpo, directory = config.grpo, config.policy.model_name
    rows = [json.loads(line) for line in Path(config.data.train.data_path).read_bytes().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rewards = Rewards(config, rows, tokenizer.eos_token_id, latency)
    batch = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    prompts = [row["responses_create_params"]["input"] for row in rows]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=rewards,
        processing_class=tokenizer,
        callbacks=[Clock()],
        train_dataset=Dataset.from_dict({"prompt": prompts, "row": list(range(len(rows)))}),
        args=GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=min(MICRO_BATCH, batch),
            gradient_accumulation_steps=max(1, batch // MICRO_BATCH),
            num_generations=grpo.num_generations_per_prompt,
            max_completion_length=config.policy.generation.max_new_tokens,
            learning_rate=config.policy.megatron_cfg.optimizer.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_steps=num_steps,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
    )
    try:
        trainer.train()
    finally:
        rewards.environments.close()
    return ends


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON: when each step ended")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--latency", type=float, required=True, help="mean seconds that a rollout's environment waits")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = require_runnable(load_config(args.config, args.overrides))
    ends = train(config, num_steps=args.steps, latency=args.latency, out=args.out.with_suffix(".trl"))
    args.out.write_text(json.dumps(ends), encoding="utf-8")


if __name__ == "__main__":
    main()
