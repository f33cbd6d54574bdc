"""A run that loses one of its two engines goes on: no restart, the right number of steps, every prompt trained once.

The engine is killed by its actor or by its EngineCore process. What matters is the moment: while the engines sample the
first prompts, between steps, in a push, or near the end, when the run ends while the engine is started again.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from killing import RunCase, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

STEPS = 40
OVERRIDES = {
    "cluster.gpus_per_node": 3,  # one worker process trains, two are engines
    "policy.generation.colocated.resources.gpus_per_node": 2,
}


@dataclass(frozen=True)
class Moment:
    """When to kill which process of which engine: so long after a step."""

    step: int
    seconds: float
    process: str
    engine: int


ACTOR, CORE = "actor", "EngineCore"
SAMPLE = [Moment(1, 0.05, CORE, 0)]
OTHERS = [
    Moment(0, 0.0, ACTOR, 0),
    Moment(0, 0.3, CORE, 1),
    Moment(2, 0.1, ACTOR, 1),
    Moment(5, 0.02, CORE, 0),
    Moment(10, 0.15, ACTOR, 0),
    Moment(15, 0.0, CORE, 1),
    Moment(20, 0.0, ACTOR, 1),
    Moment(30, 0.2, CORE, 0),
    Moment(38, 0.0, ACTOR, 1),
]
MOMENTS = [*SAMPLE, *(pytest.param(moment, marks=pytest.mark.slow) for moment in OTHERS)]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_run_outlives_one_of_two_engines(moment: Moment, tmp_path: Path) -> None:
    case = make_case(tmp_path, STEPS, OVERRIDES)
    with case.started() as run:
        kill_at(moment, run, case)
        status = run.wait(timeout=patiently(300))
    text = case.text()
    assert status == 0, text[-6000:]
    assert re.search(r"generation engine [01] .*; its requests are sampled elsewhere; 1 of 2 engines are left", text)
    assert "engines 1 of 2" in text, "the progress line must say that an engine is missing"
    assert "resumed from" not in text
    case.check_end()


def kill_at(moment: Moment, run: subprocess.Popen[bytes], case: RunCase) -> None:
    case.wait_until(run, partial(is_reached, case, moment.step), f"step {moment.step}")
    time.sleep(moment.seconds)
    psutil.Process(process_ids(case)[moment.engine][moment.process]).kill()


def is_reached(case: RunCase, step: int) -> bool:
    return "policy and engines are up" in case.text() and case.steps_done() >= step


def process_ids(case: RunCase) -> dict[int, dict[str, int]]:
    """Return engine -> process -> process id, as the run has said them last."""
    said = re.findall(r"generation engine (\d) \(node .*?, actor pid (\d+), EngineCore pid (\d+)\)", case.text())
    return {int(engine): {ACTOR: int(actor), CORE: int(core)} for engine, actor, core in said}
