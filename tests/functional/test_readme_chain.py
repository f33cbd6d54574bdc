"""The README's chain from the command to the loss, compared with the calls of one real step."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
from tiny_run import TWO_STEPS, launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TO_THE_POLICY, TO_THE_LOSS = "Policy.train", "grpo_loss"  # the first ends in the driver, the second in a worker


def chain_of_the_readme() -> list[str]:
    row = re.search(r"^\| from the command to the loss +\| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    return re.findall(r"`([^`]+)`", row[1])


def files_of(stacks: list[str], end: str) -> list[str]:
    """Return the files of the only stack that ends in a function, each once for calls within it."""
    found = {
        tuple(file for file, _ in itertools.groupby(call.split(":")[0] for call in stack.split()))
        for stack in stacks
        if stack.rsplit(":", 1)[-1] == end
    }
    assert len(found) == 1, f"{end} is reached in several ways: {found}"
    return list(found.pop())


def test_the_chain_of_the_readme_is_what_is_called(tmp_path: Path) -> None:
    env = launch_environment(tmp_path, num_rows=12, overrides={**TWO_STEPS, "grpo.max_num_steps": 1})
    trace = tmp_path / "calls.txt"
    env |= {
        "EXP_NAME": "traced",
        "MODEL_PATH": str(tmp_path / "model"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "functional" / "call_trace"), str(ROOT)]),
        "CALL_TRACE_ROOT": str(ROOT),
        "CALL_TRACE_FILE": str(trace),
        "CALL_TRACE_ENDS": f"{TO_THE_POLICY} {TO_THE_LOSS}",
    }
    done = subprocess.run(["make", "stage1.1"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    stacks = trace.read_text(encoding="utf-8").splitlines()
    assert [*files_of(stacks, TO_THE_POLICY), *files_of(stacks, TO_THE_LOSS)] == chain_of_the_readme()
