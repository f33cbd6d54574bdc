"""A failed call to the actor of an engine, or a broken connection to it, as an error that names the engine."""

from __future__ import annotations

import asyncio

import ray

from recipes.errors import EngineError


def failure(name: str, error: BaseException, deadline_seconds: float) -> EngineError:
    """Return the error of a failed call or a broken connection to an engine's actor, as one that names the engine."""
    cause = getattr(error, "cause", None)  # of an error that Ray brings from the actor, whose own text is a traceback
    if isinstance(cause, EngineError):  # the actor has named itself
        return EngineError(str(cause))
    if isinstance(error, EngineError):
        return error
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ray.exceptions.GetTimeoutError):
        reason = f"no answer within {deadline_seconds:g} s"
    elif cause is None and isinstance(error, EOFError | OSError):
        reason = f"its connection ended, since its actor process died or the network failed ({error})"
    elif isinstance(error, ray.exceptions.RayActorError) and "creation task" in str(error):
        reason = f"its actor raised {str(error).strip().splitlines()[-1]}"
    elif isinstance(error, ray.exceptions.RayActorError):
        reason = "its actor process died; if the kernel killed it for lack of memory, dmesg says so"
    else:
        reason = f"{type(cause or error).__name__}: {cause or error}"
    return EngineError(f"{name}: {reason}")
