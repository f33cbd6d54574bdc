"""The scheduler of vLLM's EngineCore process, with three changes; the process ends with its actor.

The prefix cache is keyed by weight push. vLLM's `reset_prefix_cache` refuses while a request holds KV blocks, and
during a push requests do. Here it never refuses: each push starts a new *salt*, which enters the hash of a prompt's
first block and, through that hash, the hash of every later block. A new request therefore finds only KV that was
computed after the last push. Running requests keep their KV under the old salt, which no new request uses; or, when
the caller asks for that, they give it up and compute it again.

Log-probabilities and routes travel in bulk. vLLM sends small arrays per token to the process that collects answers. A
request whose caller reads only the finished answer gets them together. On a model of a million parameters this saves
about a quarter of the CPU time per token.

Nothing is computed during a push. When requests have just ended, vLLM would run one more step, without tokens, to tell
the model runner. Its first runner takes the running requests out of its batch for such a step, and with them the count
of drafts that were accepted last. Mamba layers would then go on from the state of another token.

Subprocesses that end with their parent. vLLM 0.32 leaves its EngineCore process running when its actor is killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends: an orphan would keep memory and ports."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent == 1 or os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


BULK_TOKENS = 256  # what is held back is sent after so many tokens at the latest, so that memory stays bounded


def push_salt(num_pushes: int) -> str:
    """Return the prefix-cache salt in force after `num_pushes` weight pushes."""
    return f"push-{num_pushes}"


@dataclass(slots=True)
class _Held:
    """The results of one request that have not been sent yet."""

    logprobs: list[LogprobsLists] = field(default_factory=list)
    routes: list[np.ndarray[Any, Any]] = field(default_factory=list)


class _RolloutScheduling:
    """The changes, to be mixed into a scheduler of vLLM 0.32."""

    requests: dict[str, Request]
    _pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the scheduler's own arguments
        super().__init__(*args, **kwargs)
        gc.enable()  # off since the process began, see core_start.py
        self._num_pushes = 0
        self._held: dict[str, _Held] = {}  # by request id
        self._block_hasher = self._hasher_of_routes()
        die_with_parent()

    def add_request(self, request: Request) -> None:
        """Queue a request under the current salt: a push may have come after the caller chose one."""
        if self._block_hasher is not None:
            request._block_hasher = self._block_hasher
            request.update_block_hashes()
        self._salt(request)
        params = request.sampling_params
        if params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop:
            self._held[request.request_id] = _Held()
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Hide all KV computed so far from every request that has not used any of it yet.

        With `reset_running_requests` no KV is left: running requests compute that of all their tokens again.
        """
        self._num_pushes += 1
        is_reset = True
        if reset_running_requests or reset_connector:
            is_reset = bool(super().reset_prefix_cache(reset_running_requests, reset_connector))  # type: ignore[misc]
        for request in self.requests.values():
            has_used_none = request.num_computed_tokens == 0 and request.status != RequestStatus.PREEMPTED
            if reset_running_requests or has_used_none:
                self._salt(request)
        return is_reset

    def has_finished_requests(self) -> bool:
        """Whether a step has to say what has ended: that waits for the end of a push."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return False
        return bool(super().has_finished_requests())  # type: ignore[misc]

    def update_from_output(self, *args: Any) -> dict[int, EngineCoreOutputs]:  # the scheduler's own arguments
        """Hold back the log-probabilities and routes of unfinished requests."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args)  # type: ignore[misc]
        for of_client in outputs.values():
            for output in of_client.outputs:
                held = self._held.get(output.request_id)
                if held is not None:
                    self._hold(output, held)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:  # the scheduler's own arguments
        """Drop what is held back of requests that were aborted."""
        finished: list[Request] = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def _hold(self, output: EngineCoreOutput, held: _Held) -> None:
        if output.new_logprobs is not None:
            held.logprobs.append(output.new_logprobs)
        if output.routed_experts is not None:
            held.routes.append(output.routed_experts)
        output.new_logprobs = output.routed_experts = None
        is_finished = output.finish_reason is not None
        if is_finished or len(held.logprobs) >= BULK_TOKENS:
            if held.logprobs:
                output.new_logprobs = LogprobsLists(
                    *(np.concatenate(arrays) for arrays in zip(*(part[:3] for part in held.logprobs), strict=True))
                )
            if held.routes:
                output.routed_experts = np.concatenate(held.routes)
            held.logprobs.clear()
            held.routes.clear()
        if is_finished:
            del self._held[output.request_id]

    def _hasher_of_routes(self: Any) -> Any:
        """Return the function that makes the keys of kept routes; without a prefix cache vLLM makes none itself."""
        cache = self.vllm_config.cache_config
        if self.aux_output_connector is None or cache.enable_prefix_caching:
            return None
        hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        return get_request_block_hasher(self.hash_block_size, hash_function)

    def _salt(self, request: Request) -> None:
        salt = push_salt(self._num_pushes)
        if request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


class RolloutScheduler(_RolloutScheduling, Scheduler):  # type: ignore[misc]
    """For CPU, where vLLM has no asynchronous scheduling."""


class RolloutAsyncScheduler(_RolloutScheduling, AsyncScheduler):  # type: ignore[misc]
    """For GPUs: schedules the next step while the GPU computes the current one."""
