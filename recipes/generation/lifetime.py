"""A subprocess that must not outlive its parent. vLLM 0.32 leaves its EngineCore running when the actor is killed."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, so that no orphan keeps memory or a port."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent == 1 or os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
