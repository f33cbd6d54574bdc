"""Environments import without the heavy packages, so that a data check or a server starts at once."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "ray", "vllm", "transformers", "megatron", "sympy", "math_verify", "reasoning_gym"}
MODULES = ("instances", "environments", "chat.codec", "scoring.worker", "server.resources")


def test_stays_light() -> None:
    # One module at a time in one process, so that the message names the first that is heavy.
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module(f'recipes.environments.{name}')\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
