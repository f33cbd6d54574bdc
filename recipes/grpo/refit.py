"""Refit: the policy's new weights into every generation engine, while the engines keep generating.

On CPU the policy writes full tensors, by their Hugging Face names, to a file in shared memory, which the engines load;
engines on other hosts get its content through Ray. On CUDA both sides are called together and join an NCCL broadcast.
In-flight requests keep their KV cache; the prefix cache never serves KV of older weights (see generation/core.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from recipes.types import WeightLayout


class WeightSource(Protocol):
    """The part of `Policy` that a refit uses."""

    def weight_layout(self) -> WeightLayout: ...

    def send_weights(self) -> None: ...

    def weight_content(self) -> Any: ...

    def open_rendezvous(self) -> tuple[str, int]: ...

    def connect_engines(self, *, num_engine_ranks: int) -> None: ...


class WeightSink(Protocol):
    """The part of `Generation` that a refit uses."""

    @property
    def num_ranks(self) -> int: ...

    def connect_weights(self, layout: WeightLayout, *, rendezvous: tuple[str, int] | None = None) -> None: ...

    @property
    def needs_weight_content(self) -> bool: ...

    def update_weights(self, version: int, content: Any = None) -> None: ...


def connect(policy: WeightSource, generation: WeightSink) -> None:
    """Tell the engines where each tensor lies, once per run; both sides raise within their deadlines."""
    layout = policy.weight_layout()
    if layout.path:
        generation.connect_weights(layout)
        return
    address = policy.open_rendezvous()
    _together(
        lambda: policy.connect_engines(num_engine_ranks=generation.num_ranks),
        lambda: generation.connect_weights(layout, rendezvous=address),
    )


def refit(policy: WeightSource, generation: WeightSink, *, version: int) -> None:
    """Push the policy's weights; afterwards every new token is sampled with `version`."""
    if policy.weight_layout().path:
        policy.send_weights()
        generation.update_weights(version, policy.weight_content() if generation.needs_weight_content else None)
    else:
        _together(policy.send_weights, lambda: generation.update_weights(version))


def _together(*calls: Callable[[], None]) -> None:
    """Run blocking calls side by side; each has its own deadline, the first failure is raised."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()
