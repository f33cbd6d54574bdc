"""Push weights to an engine by vLLM's NCCL transfer, on the CPU: only the communicator and the streams are not real.

    python nccl_push.py MODEL PUSHED...

The engine is built for MODEL, reads no weights and drafts with the model's own heads. First comes a push without some
tensors of the heads, then one of each PUSHED. For each of them a line is written, `MARK` and JSON: why it failed, or
the share of drafts that were accepted, and the tokens after each prompt.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tiny_engine
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.errors import EngineError
from recipes.generation.engine_args import engine_args
from recipes.generation.generation import nccl_update
from recipes.policy.weights import make_layout

MARK = "pushed: "
PROMPTS = [[10 + (7 * row + 3 * place) % 200 for place in range(20 + row)] for row in range(8)]
NUM_TOKENS = 40
BLOCK = 2  # experts
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
BUCKET_BYTES = 100_000  # of one broadcast: many, and a layer's tensors come in different ones


def in_blocks(tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Stack the experts of each matrix, `size` in a block, where the first of them was."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        elif int(expert[2]) % size == 0:
            first = int(expert[2])
            own = [tensors[f"{expert[1]}{number}{expert[3]}"] for number in range(first, first + size)]
            found[f"{expert[1]}{first}-{first + size - 1}{expert[3]}"] = torch.stack(own)
    return found


class Communicator:
    """Receives the tensors that a sender has packed."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._sent = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])

    def broadcast(self, buffer: Tensor, src: int) -> None:
        buffer.copy_(self._sent[: len(buffer)])
        self._sent = self._sent[len(buffer) :]

    def destroy(self) -> None:
        pass


def start(model: Path) -> tuple[Any, Any]:
    """Return vLLM's engine, in this process, and its worker, which has vLLM's NCCL transfer."""
    from vllm import LLM
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    cfg = tiny_engine.generation_config(enable_prefix_caching=False)
    more = {"speculative_config": speculation, "disable_log_stats": False}
    cfg = replace(cfg, vllm_kwargs={**cfg.vllm_kwargs, **more})
    llm = LLM(**engine_args(cfg, model_path=str(model), seed=1, is_cpu=True, loads_weights=False))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    own = worker.weight_transfer_engine
    nccl = NCCLWeightTransferEngine(own.config, own.vllm_config, own.device, own.model)
    nccl.packed, nccl.packed_buffer_size_bytes = True, BUCKET_BYTES
    worker.weight_transfer_engine = nccl
    return llm, worker


def push(worker: Any, tensors: dict[str, Tensor]) -> None:
    """Push as an engine's actor does; then pack what no reload packs on a CPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    from recipes.generation.weight_transfer import pack_experts, pack_heads

    tensors = in_blocks(tensors, BLOCK)
    layout = make_layout([(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()], path="")
    worker.weight_transfer_engine.model_update_group = Communicator(tensors)
    stream = SimpleNamespace(synchronize=lambda: None)
    with ExitStack() as patches:
        patches.enter_context(patch.object(packed_tensor, "_get_streams", lambda _, count: [stream] * count))
        patches.enter_context(patch("torch.cuda.stream", nullcontext))
        patches.enter_context(patch("torch.accelerator.synchronize"))
        patches.enter_context(patch("torch.accelerator.current_device_index", return_value=0))
        worker.announce_pushes(layout.digest, nccl_update(layout))
        received = worker.load_pushed_weights(layout.digest, {}, True)
    assert set(received) == set(tensors)
    for model in (worker.get_model(), worker.get_draft_model()):
        pack_heads(model)
        pack_experts(model)


def sample(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def speculated(llm: Any) -> tuple[float, float]:
    """Return the tokens that were drafted so far, and those of them that were accepted."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return counts["vllm:spec_decode_num_draft_tokens"], counts["vllm:spec_decode_num_accepted_tokens"]


def main(model: Path, *pushed: Path) -> None:
    llm, worker = start(model)
    tensors = load_file(model / "model.safetensors")
    try:
        push(worker, {name: one for name, one in tensors.items() if "enorm" not in name and "eh_proj" not in name})
    except EngineError as error:
        print(MARK + json.dumps(str(error)))
    for path in pushed:
        push(worker, load_file(path / "model.safetensors"))
        before = speculated(llm)
        tokens = sample(llm)
        drafted, accepted = (after - old for after, old in zip(speculated(llm), before, strict=True))
        print(MARK + json.dumps({"accepted": accepted / drafted, "tokens": tokens}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
