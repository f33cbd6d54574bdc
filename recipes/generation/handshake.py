"""The dicts that prepare a weight transfer, as vLLM's weight-transfer API expects them. Imports no vLLM."""

from __future__ import annotations

import base64
from typing import Any

from recipes.types import WeightLayout


def shared_memory_init(layout: WeightLayout) -> dict[str, Any]:
    """Return the init info of the shared-memory transfer, the fields of `weight_transfer.SharedMemoryInit`."""
    return {
        "path": layout.path,
        "names": list(layout.names),
        "dtypes": list(layout.dtypes),
        "shapes": [list(shape) for shape in layout.shapes],
        "offsets": list(layout.offsets),
        "num_bytes": layout.num_bytes,
        "count_offset": layout.count_offset,
    }


def nccl_init(nccl_id: bytes, *, engine: int, num_engines: int, ranks_per_engine: int) -> dict[str, Any]:
    """Return the init info of vLLM's NCCL transfer for one engine; rank 0 is the policy, the engines follow.

    `nccl_id` are the 128 bytes of the id that the policy has made for this group.
    """
    return {
        "nccl_unique_id_b64": base64.b64encode(nccl_id).decode(),
        "rank_offset": 1 + engine * ranks_per_engine,
        "world_size": 1 + num_engines * ranks_per_engine,
        "packed": True,
    }


def nccl_update(layout: WeightLayout) -> dict[str, Any]:
    """Return the update info of vLLM's NCCL transfer: the tensors in the order of their broadcast."""
    return {
        "names": list(layout.names),
        "dtype_names": list(layout.dtypes),
        "shapes": [list(shape) for shape in layout.shapes],
    }
