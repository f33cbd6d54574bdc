"""What runs inside vLLM's EngineCore process: two changes to its scheduler, and death with the actor.

A prefix cache keyed by weight push. vLLM's own `reset_prefix_cache` refuses while any request holds KV blocks, which
is always so in a push that keeps requests in flight. Here it never refuses: each push starts a new *salt*, which enters
the hash of the first block and through it every later one. So a request finds only KV that was computed after the last
push, while requests already running keep theirs, under the old salt, where no newer request looks.

Log-probabilities that travel in bulk. vLLM sends three small arrays per token to the process that collects answers;
for a request that is only read when it is finished they are sent together. On a model of a million parameters this
saves about a quarter of the CPU time per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from recipes.generation.lifetime import die_with_parent

BULK_TOKENS = 256  # log-probabilities are sent at the latest after so many; bounds what a long answer holds back


def push_salt(num_pushes: int) -> str:
    """Return the prefix-cache salt in force after `num_pushes` weight pushes."""
    return f"push-{num_pushes}"


class _RolloutScheduling:
    """Mix-in of a vLLM scheduler; see the module's docstring. Written against vLLM 0.32."""

    requests: dict[str, Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the scheduler's own arguments
        super().__init__(*args, **kwargs)
        self._num_pushes = 0
        self._held: dict[str, list[LogprobsLists]] = {}  # by request, not yet sent
        die_with_parent()

    def add_request(self, request: Request) -> None:
        """Queue a request under the current salt, whatever salt it came with."""
        self._salt(request)
        params = request.sampling_params
        if params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop:
            self._held[request.request_id] = []
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

    def update_from_output(self, *args: Any) -> dict[int, EngineCoreOutputs]:  # the scheduler's own arguments
        """Take the log-probabilities out of the step's outputs until their request is finished."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args)  # type: ignore[misc]
        for of_client in outputs.values():
            for output in of_client.outputs:
                held = self._held.get(output.request_id)
                if held is not None:
                    self._hold(output, held)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:  # the scheduler's own arguments
        """Forget what aborted requests held back."""
        finished: list[Request] = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def _hold(self, output: EngineCoreOutput, held: list[LogprobsLists]) -> None:
        if output.new_logprobs is not None:
            held.append(output.new_logprobs)
        is_finished = output.finish_reason is not None
        if held and (is_finished or len(held) >= BULK_TOKENS):
            output.new_logprobs = LogprobsLists(
                *(np.concatenate(arrays) for arrays in zip(*(part[:3] for part in held), strict=True))
            )
            held.clear()
        else:
            output.new_logprobs = None
        if is_finished:
            del self._held[output.request_id]

    def _salt(self, request: Request) -> None:
        salt = push_salt(self._num_pushes)
        if request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


class RolloutScheduler(_RolloutScheduling, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler; used on CPU, where vLLM has no asynchronous scheduling."""


class RolloutAsyncScheduler(_RolloutScheduling, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler that overlaps scheduling with the device."""
