"""Talks to a checkpoint: one line is one message, an empty line begins a new conversation, the end of input ends it.

    python -m tools.look.chat CHECKPOINT [--temperature 0.7]

The engine, the chat template and its arguments are those of the run's file, so the model sees what it sees in training.
The engine runs in this process; nothing listens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from recipes.config.load import config_path, find_stage, load_config, require_runnable
from recipes.config.tree import PolicyConfig
from recipes.generation.engine_args import CPU_ENV, ENV, engine_args, stop_token_ids
from tools.command_line import exit_status
from tools.hub import model_path
from tools.look.report.chart import CONTROL
from tools.look.run_state import find_checkpoint

Generate = Callable[[tuple[int, ...]], tuple[int, ...] | None]
"""From a prompt to an answer; None when the context has no room for one."""


def converse(lines: Iterable[str], codec: Any, generate: Generate, show: Callable[[str], None]) -> None:
    """Answer each line with what was said before; an empty line forgets it. Reasoning is shown, but not kept."""
    messages: list[dict[str, str]] = []
    for line in lines:
        if not line.strip():
            messages = []
            show("(a new conversation)")
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        prompt = codec.encode_chat(messages, [], {})
        ids = generate(prompt)
        if ids is None:
            messages.pop()
            show("(no room is left in the context; an empty line begins a new conversation)")
            continue
        decoded = codec.decode(ids, prompt_ids=prompt)
        said = "".join(part["text"] for item in decoded.items if item["type"] == "message" for part in item["content"])
        messages.append({"role": "assistant", "content": said.strip()})
        show(CONTROL.sub(lambda found: f"<U+{ord(found[0]):04X}>", decoded.text.strip()) or "(an empty answer)")


def engine(policy: PolicyConfig, model: Path, *, temperature: float, seed: int) -> Generate:
    """Start the engine in this process and return what answers a prompt."""
    import torch

    is_cpu = not torch.cuda.is_available()
    os.environ.update({**ENV, **(CPU_ENV if is_cpu else {})})

    from vllm import LLM, SamplingParams

    llm = LLM(**engine_args(policy.generation, model_path=str(model), seed=seed, is_cpu=is_cpu))
    ends, longest = list(stop_token_ids(model)), policy.generation.vllm_cfg.max_model_len

    def generate(prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        room = min(policy.generation.max_new_tokens, longest - len(prompt))
        if room < 1:
            return None
        params = SamplingParams(temperature=temperature, max_tokens=room, stop_token_ids=ends, detokenize=False)
        [answer] = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        return tuple(answer.outputs[0].token_ids)

    return generate


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Talk to a checkpoint."""
    parser = argparse.ArgumentParser(prog="chat", description=__doc__.split("\n", 1)[0])
    about = "a run, one of its checkpoints, a Hugging Face directory, or a name on the hub that was fetched"
    parser.add_argument("checkpoint", help=about)
    parser.add_argument("--config", type=Path, help="whose engine and chat template are used, by default the run's")
    parser.add_argument("--stage", default="stage1.1", help="in its place where no run says, at SCALE on PLATFORM")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token each time")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    args = parser.parse_intermixed_args(argv)
    checkpoint = find_checkpoint(Path(model_path(args.checkpoint)))
    model = checkpoint.model
    scale, platform = os.environ.get("SCALE") or "tiny", os.environ.get("PLATFORM") or "h100"
    unused = ["data.train.data_path=none", "data.validation.data_path=null", "grpo.val_period=0"]
    unused += ["grpo.val_at_start=false", "grpo.val_at_end=false", "policy.router_replay.enabled=false"]
    overrides = [f"policy.model_name={model.resolve()}", *unused, *args.overrides]
    file = args.config or checkpoint.config or config_path(find_stage(args.stage), scale, platform)
    config = require_runnable(load_config(file, overrides))
    generate = engine(config.policy, model, temperature=args.temperature, seed=config.grpo.seed)

    from recipes.environments.chat.codec import ChatCodec

    codec = ChatCodec.from_config(config.policy)
    is_terminal = sys.stdin.isatty()
    print(f"{model}: one line is one message, an empty line begins anew, ctrl-d ends", flush=True)
    converse(prompted() if is_terminal else sys.stdin, codec, generate, lambda text: print(text, flush=True))
    return 0


def prompted() -> Iterable[str]:
    """Yield what is typed, line by line, until the end of input."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


if __name__ == "__main__":
    sys.exit(main())
