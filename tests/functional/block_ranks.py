"""Load experts in blocks and one by one in every rank of an engine, by the layerwise reload that a push uses on GPUs.

    python block_ranks.py MODEL OTHER IS_EXPERT_PARALLEL

The engine has two ranks and is built for MODEL. `MARK` and JSON: for each rank what differs after both ways.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_engine
import torch
from nccl_push import BLOCK, MARK, in_blocks
from safetensors.torch import load_file
from torch import Tensor

from recipes.generation.engine_args import engine_args
from recipes.generation.weight_transfer import WorkerExtension

BUCKET_BYTES = 40_000


def buckets(tensors: dict[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors as vLLM's transfer does: some at once, so that those of a layer come in different ones."""
    left = list(tensors.items())
    while left:
        own, size = [], 0
        while left and size <= BUCKET_BYTES:
            own.append(left.pop(0))
            size += own[-1][1].nbytes
        yield own


class Comparing(WorkerExtension):
    """What each rank does."""

    def compare(self: Any, one: str, other: str) -> dict[str, Any]:
        """Push `other` both ways, each after `one`."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from recipes.generation.drafter import PushedModels

        old, new = (load_file(Path(path) / "model.safetensors") for path in (one, other))
        stacked = in_blocks(new, BLOCK)
        shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stacked.items() if name not in new]
        models = PushedModels(self.get_model(), blocks=shapes)

        def push(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            initialize_layerwise_reload(models)
            for bucket in buckets(tensors):
                models.load_weights(bucket)
            finalize_layerwise_reload(models, self.model_config)
            return {name: tensor.clone() for name, tensor in models.model.state_dict().items()}

        before, expected = push(old), push(new)
        push(old)
        for _ in range(2):  # the first finds the places, the second uses them
            got = push(stacked)
        own = [name for name in got if name.endswith((".w13_weight", ".w2_weight"))]
        exact = [self._is_exact(models.model, name, kind, new) for name, kind in mixers(new)]
        places = models._load._places
        return {
            "wrong": [name for name in expected if not torch.equal(got[name], expected[name])],
            "experts": len(own),
            "changed": sum(got[name].numel() > 0 and not torch.equal(before[name], got[name]) for name in own),
            "blocks": len(shapes),
            "stacks": sum(place is not None for place in places.values()),
            "dropped": sum(place is None for place in places.values()),
            "vectors": len(exact),
            "exact": sum(exact),
        }

    def _is_exact(self: Any, model: Any, name: str, kind: str, pushed: dict[str, Tensor]) -> bool:
        """Whether a Mamba layer has this rank's part of what was pushed."""
        mixer = model.get_submodule(name.replace("backbone", "model"))
        value = pushed[f"{name}.{kind}"].float()
        if kind == "A_log":
            kind, value = "A", -torch.exp(value)
        own = getattr(mixer, kind)
        return torch.equal(own.float(), value.chunk(len(value) // len(own))[self.rank])


def mixers(tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return the Mamba layers and their vectors, which a reload of vLLM's has dropped before."""
    names = (name.rpartition(".") for name in tensors)
    return [(layer, kind) for layer, _, kind in names if kind in ("A_log", "D", "dt_bias")]


def main(model: str, other: str, is_expert_parallel: str) -> None:
    from vllm import LLM

    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2 if is_expert_parallel == "True" else 1}
    cfg = tiny_engine.generation_config(**sizes)
    args = engine_args(cfg, model_path=model, seed=1, is_cpu=True, loads_weights=False)
    llm = LLM(**{**args, "worker_extension_cls": "block_ranks.Comparing"})
    for found in llm.collective_rpc("compare", args=(model, other)):
        print(MARK + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
