"""A Ray instance of one process alone, for a bench or a test. Runs join the cluster that the launcher started."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from recipes.cluster.tuning import worker_environment

_NUM_TRIES = 3
_LATE = "timed out during startup"  # in Ray's message


@contextmanager
def private_ray(num_cpus: int, **options: Any) -> Iterator[None]:
    """Run Ray in a new directory below /tmp until the block ends; `options` are those of `ray.init`.

    Where a start comes too late, it is tried again: Ray gives its agents 15 s, however busy the machine is, unless it
    knows their ports before, as in a cluster of the launcher.
    """
    os.environ.pop("RAY_ADDRESS", None)
    for name, value in worker_environment(1).items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        _start(directory, {"num_cpus": num_cpus, "include_dashboard": False, "logging_level": logging.ERROR, **options})
        try:
            yield
        finally:
            ray.shutdown()


def _start(directory: str, options: dict[str, Any]) -> None:
    for number in range(1, _NUM_TRIES + 1):
        try:
            ray.init(address="local", _temp_dir=f"{directory}/{number}", log_to_driver=False, **options)
        except Exception as late:
            if _LATE not in str(late) or number == _NUM_TRIES:
                raise
        else:
            return
