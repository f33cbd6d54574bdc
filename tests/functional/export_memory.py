"""Save a checkpoint, or export one and print the memory that this took; each in a process of its own.

export_memory.py save MODEL_DIR CHECKPOINT_DIR
export_memory.py export MODEL_DIR CHECKPOINT_DIR OUT_DIR SHARD_BYTES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from policy_case import load_case
from torch.distributed import HashStore

from recipes.policy import checkpoint, hf, parallel, step
from recipes.policy.export import export_checkpoint
from recipes.types import LossFunction


def save(model: Path, path: Path) -> None:
    """Load the model as one rank does and save it, without its optimizer."""
    config = load_case(model)
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=config.policy.megatron_cfg, seed=1, timeout_s=60)
    loss: LossFunction = _no_loss
    path.mkdir()
    checkpoint.save(step.build_trainer(config.policy, loss), path, with_optimizer=False)


def _no_loss(*_: object) -> object:
    raise AssertionError("nothing is trained here")


def export(model: Path, path: Path, out: Path, shard_bytes: int) -> None:
    """Export the checkpoint and print by how many bytes the memory of this process rose at its peak.

    It is exported twice: the first time also loads modules, which stay.
    """
    hf.SHARD_BYTES = shard_bytes
    export_checkpoint(path, out / "first", load_case(model).policy)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    export_checkpoint(path, out / "second", load_case(model).policy)
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        export(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
