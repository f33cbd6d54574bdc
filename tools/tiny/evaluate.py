"""Measure a checkpoint on the rows of a split: reward per agent, sampled at temperature 1 and greedy.

    python -m tools.tiny.evaluate --model models/tiny-nemotron-h-sft --data data/tiny/val-split.jsonl [--samples 2]

Samples with plain transformers and scores with the real verifiers: a run's own validation must agree with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.verifier import Verdict, response_object
from recipes.environments.instances import AGENTS, VERIFIERS
from tools.command_line import exit_status
from tools.data.files.row_blocks import read_lines, require_file

MAX_NEW_TOKENS = 48
BATCH = 128


def score(row: Mapping[str, Any], codec: ChatCodec, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the reward that the row's verifier gives to a completion."""
    verifier = VERIFIERS[AGENTS[row["agent_ref"]["name"]].server]
    decoded = codec.decode(token_ids, prompt_ids=prompt_ids)
    verdict = verifier.score(response_object(decoded.items), verifier.parse_task(row, verifier.settings()))
    assert isinstance(verdict, Verdict), "no tiny task needs a judge"
    return verdict.reward


def generate(model: Any, codec: ChatCodec, prompts: Sequence[Sequence[int]], *, is_greedy: bool) -> list[list[int]]:
    """Return one completion per prompt, up to and including the end token."""
    import torch

    longest = max(map(len, prompts))
    padded = [[codec.pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    choice: dict[str, Any] = {"do_sample": False}
    if not is_greedy:
        choice = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=MAX_NEW_TOKENS, **choice
        )
    completions = output[:, longest:].tolist()
    eos = codec.eos_token_id
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in completions]


def evaluate(model_dir: Path, rows: Sequence[Mapping[str, Any]], *, samples: int, seed: int) -> dict[str, list[float]]:
    """Return the rewards of all answers, by `<agent> sampled` and `<agent> greedy`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    codec = ChatCodec(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = [codec.encode(row["responses_create_params"]) for row in rows]
    rewards: dict[str, list[float]] = defaultdict(list)
    for kind, repeats in (("sampled", samples), ("greedy", 1)):
        order = [index for _ in range(repeats) for index in range(len(rows))]
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            completions = generate(model, codec, [prompts[index] for index in part], is_greedy=kind == "greedy")
            for index, token_ids in zip(part, completions, strict=True):
                agent = rows[index]["agent_ref"]["name"]
                rewards[f"{agent} {kind}"].append(score(rows[index], codec, prompts[index], token_ids))
    return rewards


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    listed = list(values)
    return sum(listed) / len(listed)


def table(rewards: Mapping[str, Sequence[float]]) -> str:
    """Return one line per agent and one for all rows."""
    agents = sorted({key.split()[0] for key in rewards})
    lines = [f"{'mean reward':<32}{'sampled':>8}{'greedy':>8}"]
    for agent in agents:
        lines.append(f"{agent:<32}{mean(rewards[agent + ' sampled']):8.3f}{mean(rewards[agent + ' greedy']):8.3f}")
    overall = [
        mean(value for agent in agents for value in rewards[f"{agent} {kind}"]) for kind in ("sampled", "greedy")
    ]
    return "\n".join([*lines, f"{'all':<32}{overall[0]:8.3f}{overall[1]:8.3f}"])


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.evaluate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, required=True, help="directory in Hugging Face format")
    parser.add_argument("--data", type=Path, required=True, help="rows of the four tiny agents")
    parser.add_argument("--samples", type=int, default=2, help="sampled answers per row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    options = parser.parse_args(arguments)
    require_file(options.data, fix="give --data a split, e.g. data/tiny/val-split.jsonl")
    rows = [json.loads(line) for _, line in read_lines(options.data)]
    print(table(evaluate(options.model, rows, samples=options.samples, seed=options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
