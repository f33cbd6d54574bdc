"""`make pipeline` on this machine: two tiny stages hand their weights over, and once finished nothing runs again.

Their calls are recorded, and the README's chain from the command to the loss is what they called.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from speed import patiently
from tiny_run import TWO_STEPS, launch_environment

from tools.draft.provenance import model_digest

pytestmark = [pytest.mark.functional, pytest.mark.promise, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"stage1.1": "rlvr1", "stage1.2": "rlvr2"}
TO_THE_POLICY, TO_THE_LOSS = "Policy.train", "grpo_loss"  # the first ends in the driver, the second in a worker


def make_pipeline(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["make", "pipeline", f"STAGES={' '.join(STAGES)}"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(580), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done


def chain_of_the_readme() -> list[str]:
    row = re.search(
        r"^\| from the command to the loss +\| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
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


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the stages, whose calls are written to CALL_TRACE_FILE, and return the environment of the command."""
    results = tmp_path_factory.mktemp("results")
    env = {
        **launch_environment(results, num_rows=40, overrides=TWO_STEPS),
        "MODEL_PATH": str(results / "model"),  # of the first stage; the others find their parent themselves
    }
    trace = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "functional" / "call_trace"), str(ROOT)]),
        "CALL_TRACE_ROOT": str(ROOT),
        "CALL_TRACE_FILE": str(results / "calls.txt"),
        "CALL_TRACE_ENDS": f"{TO_THE_POLICY} {TO_THE_LOSS}",
    }
    make_pipeline(env | trace)
    return env


def test_each_stage_starts_from_its_parents_export(env: dict[str, str]) -> None:
    results = Path(env["RESULTS_DIR"])
    parent = results / "model"
    seen = set()
    for stage, name in STAGES.items():
        run_dir = results / f"{stage}-{name}-tiny"
        lock = json.loads((run_dir / "run.lock.json").read_text(encoding="utf-8"))
        assert lock["model"] == {"path": str(parent.resolve()), **model_digest(parent)}
        seen.add(lock["model"]["weights_sha256"])
        used = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))["config"]["policy"]["model_name"]
        assert used == str(parent.resolve())  # the step, not `latest`
        export = run_dir / "checkpoints" / "latest" / "hf"
        assert load_file(export / "model.safetensors").keys() == load_file(parent / "model.safetensors").keys()
        parent = export
    assert len(seen) == len(STAGES)  # each stage has trained

    again = make_pipeline(env)
    assert again.stderr.count("has reached its end, left out") == len(STAGES)
    assert not (results / "stage1.2-rlvr2-tiny" / "logs" / "attempt_2").exists()


def test_the_chain_of_the_readme_is_what_is_called(env: dict[str, str]) -> None:
    stacks = (Path(env["RESULTS_DIR"]) / "calls.txt").read_text(encoding="utf-8").splitlines()
    assert [*files_of(stacks, TO_THE_POLICY), *files_of(stacks, TO_THE_LOSS)] == chain_of_the_readme()
