"""Connect the driver to the Ray cluster that the launcher started."""

from __future__ import annotations

import logging
import os
import signal

import ray

from recipes.errors import LaunchError, Problem, RunError


def connect() -> None:
    """Join the cluster named by RAY_ADDRESS; never starts one by itself. Call it from the main thread."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise LaunchError(
            Problem(
                where="RAY_ADDRESS",
                got="nothing",
                expected="the address of a running Ray cluster",
                fix="start runs with super_launch.sh (make stage1.1), which starts Ray and sets it",
            )
        )
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        # Workers log to their own files, whose place the launcher prints; what fails is raised in the driver.
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise RunError(f"no Ray cluster answers at {address}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's own would end the process before it has saved
