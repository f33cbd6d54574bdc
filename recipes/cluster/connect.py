"""Connect the driver to the Ray cluster that the launcher started."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from recipes.errors import LaunchError, Problem, RunError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # Ray itself gives up long before when nothing listens


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names. Call it from the main thread: it restores a signal handler.

    Raises `LaunchError` when the variable is not set, and `RunError` when no cluster answers there. When one takes the
    connection and then says nothing, the process ends: Ray waits for it in a call without a deadline.
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
        with _ends_after(CONNECT_SECONDS, address):
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise RunError(f"no Ray cluster answers at {address}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's handler would end the process before it has saved


@contextmanager
def _ends_after(seconds: float, address: str) -> Iterator[None]:
    """End the process when the block takes longer; nothing else interrupts a call that waits outside Python."""

    def end() -> None:
        what = f"the Ray node at {address} has not answered for {seconds:g} s; its raylet.out may say why"
        logger.error("%s: start again", what)
        os._exit(RunError.exit_code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
