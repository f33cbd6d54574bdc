"""Importing large packages in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn garbage collection off for imports in the block, and leave what they made out of later collections.

    An import of torch or vLLM makes hundreds of thousands of objects that stay. The collector would look through them
    again and again: a fifth of the CPU time of importing vLLM.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
