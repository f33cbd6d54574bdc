"""What vLLM's EngineCore process imports first: this turns garbage collection off until its scheduler is built.

On a CPU it also lets vLLM report routes: its check of the configuration, which each process makes, would refuse that.

Python's multiprocessing imports the main module of a process again in each process that it spawns. In a Ray actor that
is Ray's worker program, which the EngineCore process has no use for.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def allow_routes() -> None:
    """Skip vLLM's check, in this process, that the platform reports routes; on CPUs `cpu_hybrid.py` adds that code."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = lambda _: None


# Of the processes that the EngineCore process spawns itself, none has a scheduler, which would turn it on again.
if __name__ == "__mp_main__" and multiprocessing.current_process().name.startswith("EngineCore"):
    gc.disable()
    allow_routes()


@contextmanager
def as_main_module() -> Iterator[None]:
    """Let processes that are spawned in the block import this module in place of the main module."""
    main = sys.modules["__main__"]
    spec, main.__spec__ = main.__spec__, find_spec(__name__)
    try:
        yield
    finally:
        main.__spec__ = spec
