"""Refit: the policy's new weights into every generation engine, while the engines keep generating.

On CPU the policy writes full HF-named tensors to a shared-memory file and the engines then load it; with NCCL both
sides take part in one broadcast, so receiving is begun first. In-flight requests keep their KV cache; the prefix
cache never serves KV of older weights (see generation/engine.py).
"""

from __future__ import annotations

from typing import Protocol

from recipes.grpo.types import WeightLayout


class WeightSource(Protocol):
    """The part of `Policy` that a refit uses."""

    def weight_layout(self) -> WeightLayout: ...

    def send_weights(self) -> None: ...


class WeightSink(Protocol):
    """The part of `Generation` that a refit uses."""

    def connect_weights(self, layout: WeightLayout) -> None: ...

    def update_weights(self, version: int) -> None: ...


def connect(policy: WeightSource, generation: WeightSink) -> None:
    """Agree once on where each tensor lies; both raise within their deadlines."""
    generation.connect_weights(policy.weight_layout())


def refit(policy: WeightSource, generation: WeightSink, *, version: int) -> None:
    """Push the policy's weights; afterwards every new token is sampled with `version`."""
    policy.send_weights()
    generation.update_weights(version)
