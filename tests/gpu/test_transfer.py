"""Weights on their way to an engine on one GPU: the order of streams, and, where vLLM is installed, its own sender."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.policy import weights
from tests.gpu import gpu_case
from tests.gpu.conftest import Record

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def test_a_reader_on_another_stream_sees_finished_weights(record: Record) -> None:
    """A long kernel is queued before the weights are written; a reader that does not wait finds the old ones."""
    size = 4096
    matrix = torch.randn(size, size, device="cuda")
    old, new = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    reader = torch.cuda.Stream()

    def updated() -> Tensor:
        target = old.clone()
        torch.cuda.synchronize()
        for _ in range(40):
            matrix @ matrix
        target.copy_(new)
        return target

    def waiting(target: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "w", target

    target = updated()
    with torch.cuda.stream(reader):
        stale = target.clone()
    torch.cuda.synchronize()

    target = updated()
    made = weights._made_on(torch.cuda.current_stream(), waiting(target))
    with torch.cuda.stream(reader):
        seen = [tensor.clone() for _, tensor in made]
    torch.cuda.synchronize()
    record("a reader that does not wait sees", f"{stale.mean():.0%} of the new weights")
    assert torch.equal(seen[0], new)
    assert stale.mean() < 1.0, "the case must show the race"


@needs_vllm
def test_vllm_sends_every_tensor_of_a_trained_model(tmp_path: Path, record: Record) -> None:
    """NCCL refuses two processes on one GPU, so the sender is alone in its group; it packs and sends as always."""
    model = gpu_case.save_model(tmp_path, gpu_case.SMALL)
    trainer = gpu_case.build_trainer(
        gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=4096, recompute=False)
    )
    layout = weights.make_layout(trainer.pushed_shapes(), path="")
    nccl_id = weights.make_nccl_id()
    assert len(nccl_id) == 128
    sender = weights.NcclSender(layout, nccl_id=nccl_id, world_size=1, timeout_s=60, is_cancelled=lambda: False)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    sender.write(trainer.pushed(), timeout_s=60, is_cancelled=lambda: False)
    ended.record()
    torch.cuda.synchronize()
    sender.close()
    size, milliseconds = layout.num_bytes / 2**20, began.elapsed_time(ended)
    record("push of the small model, sender alone", f"{size:.0f} MiB, {milliseconds:.0f} ms")
