"""Environments import without the heavy packages, so that a data check or a server starts at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "transformers", "megatron", "sympy", "math_verify", "reasoning_gym")


@pytest.mark.parametrize("module", ["registry", "environments", "chat.codec", "scoring.worker", "server.resources"])
def test_stays_light(module: str) -> None:
    code = f"import sys, recipes.environments.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
