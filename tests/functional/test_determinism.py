"""With `determinism: full` two runs are equal bit for bit, and so is one that is killed and started again.

The weights are random, and a reward of our own gives every answer another score: so each step moves the weights.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
from killing import RunCase, find, make_case
from speed import patiently

from recipes.grpo.checkpoint import complete_checkpoints, content_digest
from tools.look.compare import differences, main
from tools.look.report.load import load_steps

pytestmark = [pytest.mark.functional, pytest.mark.timeout(1800)]

SCORE = "import zlib\n\ndef score(response, row):\n    return zlib.crc32(response.encode()) % 97 / 97\n"


def make(directory: Path, num_steps: int) -> RunCase:
    """Return a run whose answers all get another reward."""
    directory.mkdir()
    (directory / "score.py").write_text(SCORE, encoding="utf-8")
    file = "env.nemo_gym.reward.resources_servers.reward.file"
    case = make_case(directory, num_steps, {file: directory / "score.py", "checkpointing.save_period": 1})
    agent = {"type": "responses_api_agents", "name": "reward_simple_agent"}
    lines = (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()
    own = [json.dumps({**json.loads(line), "agent_ref": agent}) for line in lines]
    (directory / "train.jsonl").write_text("".join(f"{line}\n" for line in own), encoding="utf-8")
    return RunCase(directory, num_steps, {**case.environment, "SEED": "5", "DETERMINISM": "full"})


def finish(case: RunCase) -> Path:
    with case.started() as run:
        assert run.wait(timeout=patiently(600)) == 0, case.text()[-6000:]
    return case.run_dir


def has_done(case: RunCase, step: int) -> bool:
    checkpoints = case.run_dir / "checkpoints"
    return case.steps_done() >= step and checkpoints.is_dir() and bool(complete_checkpoints(checkpoints))


@pytest.mark.parametrize(
    ("num_kills", "num_steps"),
    [pytest.param(1, 6, id="one kill"), pytest.param(10, 30, id="ten kills", marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_gives_the_bits_of_one_that_is_not(
    num_kills: int, num_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = finish(make(tmp_path / "whole", num_steps))
    steps = {record.step: record.values for record in load_steps(whole / "metrics.jsonl")}
    assert all(values["train/grad_norm"] > 0 for values in steps.values()), "a step has moved nothing"
    checkpoints = complete_checkpoints(whole / "checkpoints")
    assert len({content_digest(path) for path in checkpoints.values()}) == len(checkpoints) > 1

    killed, chance = make(tmp_path / "killed", num_steps), Random(7)
    for number in range(1, num_kills + 1):
        with killed.started() as run:
            step = number * num_steps // (num_kills + 2)
            killed.wait_until(run, partial(has_done, killed, step), f"step {step}")
            time.sleep(chance.uniform(0.0, 1.0))
            find(psutil.Process(run.pid), "run_grpo.py")[0].kill()
            assert run.wait(timeout=patiently(120)) != 0
    assert list(differences(whole, finish(killed))) == []
    assert "resumed from" in killed.text()

    assert main([str(whole), str(killed.run_dir)]) == 0
    assert f"{num_steps} steps and" in capsys.readouterr().out
