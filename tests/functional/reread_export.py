"""Read an exported model as two strangers do, transformers and vLLM, in a process of its own.

reread_export.py MODEL_DIR < {"conversations": [{"messages": [...], "tools": [...]}, ...]}

Prints one line that begins with MARK: for each reader, the token ids of each conversation's prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tiny_engine

from recipes.generation.engine_args import engine_args

MARK = "prompts: "


def by_transformers(model: str, conversations: list[dict[str, Any]]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(one["messages"], tools=one["tools"] or None, add_generation_prompt=True)[
            "input_ids"
        ]
        for one in conversations
    ]


def by_vllm(model: str, conversations: list[dict[str, Any]]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    cfg = tiny_engine.generation_config(max_model_len=256)
    llm = LLM(
        **engine_args(cfg, model_path=model, seed=1, is_cpu=True, loads_weights=True)
        | {"tokenizer": model, "skip_tokenizer_init": False}
    )
    sampling, prompts = SamplingParams(max_tokens=2), []
    for one in conversations:
        (answer,) = llm.chat(one["messages"], sampling, tools=one["tools"] or None, use_tqdm=False)
        assert answer.outputs[0].token_ids, "an answer has tokens"
        prompts.append(list(answer.prompt_token_ids or []))
    return prompts


def main() -> None:
    model, conversations = sys.argv[1], json.load(sys.stdin)["conversations"]
    found = {"transformers": by_transformers(model, conversations), "vllm": by_vllm(model, conversations)}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
