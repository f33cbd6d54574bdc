"""What runs inside vLLM's EngineCore process: a prefix cache keyed by weight push, and death with the actor.

vLLM's own `reset_prefix_cache` refuses while any request holds KV blocks, which is always so in a push that keeps
requests in flight. The schedulers here never refuse: each push starts a new *salt*, which enters the hash of the first
block and through it every later one. So a request finds only KV that was computed after the last push, while requests
already running keep theirs, under the old salt, where no newer request looks.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from recipes.generation.lifetime import die_with_parent


def push_salt(num_pushes: int) -> str:
    """Return the prefix-cache salt in force after `num_pushes` weight pushes."""
    return f"push-{num_pushes}"


class _PushKeyedCache:
    """Mix-in of a vLLM scheduler; see the module's docstring. Written against vLLM 0.32."""

    requests: dict[str, Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the scheduler's own arguments
        super().__init__(*args, **kwargs)
        self._num_pushes = 0
        die_with_parent()

    def add_request(self, request: Request) -> None:
        """Queue a request under the current salt, whatever salt it came with."""
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Hide all KV computed so far from requests that have none yet, running requests or not."""
        self._num_pushes += 1
        for request in self.requests.values():
            if request.num_computed_tokens == 0 and request.status != RequestStatus.PREEMPTED:
                self._salt(request)
        if reset_running_requests or reset_connector:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))  # type: ignore[misc]
        return True

    def _salt(self, request: Request) -> None:
        salt = push_salt(self._num_pushes)
        if request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


class PushKeyedScheduler(_PushKeyedCache, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler; used on CPU, where vLLM has no asynchronous scheduling."""


class PushKeyedAsyncScheduler(_PushKeyedCache, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler that overlaps scheduling with the device."""
