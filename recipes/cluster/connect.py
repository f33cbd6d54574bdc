"""Connect the driver to the Ray cluster that the launcher started."""

from __future__ import annotations

import logging
import os
import signal

import ray

from recipes.errors import LaunchError, Problem, RunError


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names. Call it from the main thread: it restores a signal handler.

    Raises `LaunchError` when the variable is not set, and `RunError` when no cluster answers there.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise LaunchError(
            Problem(
                where="RAY_ADDRESS",
                wrong="not set, so there is no Ray cluster to join",
                fix="start runs with super_launch.sh (make stage1.1), which starts Ray and sets it",
            )
        )
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        # Workers write their own log files, and the launcher prints where. Their errors are raised in the driver.
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise RunError(f"no Ray cluster answers at {address}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's handler would end the process before it has saved
