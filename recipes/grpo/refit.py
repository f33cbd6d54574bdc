"""Refit: the policy's new weights into every generation engine, while the engines keep generating.

On CPU the policy writes full tensors, by their Hugging Face names, to a file in shared memory, and the engines load one
while the next is written. Where an engine is on another host, all load when Ray has brought it the whole content. On
CUDA both sides join an NCCL broadcast. In-flight requests keep their KV cache, compute it again, or end before the
push: `grpo.async_grpo` decides. The prefix cache never serves KV of older weights (see generation/core.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from recipes.errors import EngineError
from recipes.types import WeightLayout


class WeightSource(Protocol):
    """The part of `Policy` that a refit uses."""

    @property
    def num_sent(self) -> int: ...

    def weight_layout(self) -> WeightLayout: ...

    def send_weights(self) -> None: ...

    def give_up_push(self) -> None: ...

    def weight_content(self) -> Any: ...

    def sent_checksums(self) -> Mapping[str, int]: ...

    def make_nccl_id(self) -> bytes: ...

    def connect_engines(self, nccl_id: bytes, *, num_engine_ranks: int) -> None: ...


class WeightSink(Protocol):
    """The part of `Generation` that a refit uses."""

    def needs_connect(self, layout: WeightLayout) -> bool: ...

    @property
    def num_ranks(self) -> int: ...

    def connect_weights(self, layout: WeightLayout, *, nccl_id: bytes | None = None) -> None: ...

    @property
    def needs_weight_content(self) -> bool: ...

    def drain(self) -> None: ...

    def update_weights(self, version: int, content: Any = None, *, num_before: int | None = None) -> None: ...

    def verify_weights(self, sent: Mapping[str, int]) -> None: ...


def connect(policy: WeightSource, generation: WeightSink) -> None:
    """Tell the engines where each tensor lies; both sides raise within their deadlines.

    On CUDA the policy and all engines that are up form a new NCCL group. They meet by an id that travels through Ray,
    and NCCL has no barrier before it: so both sides are called at the same time.
    """
    layout = policy.weight_layout()
    if layout.path:
        generation.connect_weights(layout)
        return
    nccl_id, num_ranks = policy.make_nccl_id(), generation.num_ranks
    _by_nccl(
        policy,
        lambda: policy.connect_engines(nccl_id, num_engine_ranks=num_ranks),
        lambda: generation.connect_weights(layout, nccl_id=nccl_id),
    )


def refit(policy: WeightSource, generation: WeightSink, *, version: int) -> None:
    """Push the policy's weights; afterwards every new token is sampled with `version`.

    An engine that was started again since the last push takes part, and takes requests from then on. When one fails in
    a broadcast the others wait for it in vain, so the push fails.
    """
    generation.drain()  # first: a broadcast over NCCL would wait for the engines within its own, shorter deadline
    if generation.needs_connect(policy.weight_layout()):
        connect(policy, generation)
    if generation.needs_weight_content and policy.weight_layout().path:
        policy.send_weights()
        generation.update_weights(version, policy.weight_content())
    elif policy.weight_layout().path:
        num_before = policy.num_sent
        together(policy.send_weights, lambda: generation.update_weights(version, num_before=num_before))
    else:
        _by_nccl(policy, policy.send_weights, lambda: generation.update_weights(version))
    if policy.weight_layout().is_verified:
        generation.verify_weights(policy.sent_checksums())


def _by_nccl(policy: WeightSource, *calls: Callable[[], Any]) -> None:
    """Run what both sides do; when an engine fails, free the policy, which would wait for it and could not save."""
    try:
        together(*calls)
    except EngineError:
        policy.give_up_push()
        raise


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run blocking calls at the same time and return their results; the first failure is raised at once.

    Each call has a deadline of its own. After a failure the other calls go on, in threads that do not keep the process.
    """
    outcomes: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            outcomes.put((number, call(), None))
        except BaseException as error:  # raised below, in the caller's thread
            outcomes.put((number, None, error))

    for number, call in enumerate(calls):
        Thread(target=run, args=(number, call), daemon=True).start()
    results: dict[int, Any] = {}
    for _ in calls:
        number, result, error = outcomes.get()
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(len(calls))]
