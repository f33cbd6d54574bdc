"""When a run validates."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.grpo.checkpoint import TrainState
from recipes.grpo.run import Run
from recipes.stop import StopRequest
from tests.configuration import block, config


def run_at(step: int) -> Run:
    """Return a run of nine steps that validates at the start, every two steps from the fourth on, and at the end."""
    grpo = block("grpo", val_at_start=True, val_period=2, val_start_at=4, val_at_end=True)
    parts: dict[str, Any] = dict.fromkeys(
        (
            "policy",
            "generation",
            "environments",
            "workers",
            "collector",
            "buffer",
            "validation",
            "recorder",
            "saver",
        )
    )
    return Run(
        config=config(grpo=grpo),
        stop=StopRequest(must_save_by=None, job_start=0.0),
        state=TrainState(step=step),
        num_steps=9,
        **parts,
    )


@pytest.mark.parametrize("step", [0, 4, 8, 9])
def test_validates_when_due_unless_asked_to_stop(step: int) -> None:
    run = run_at(step)
    assert run.validates_now()
    run.stop.reason = "signal SIGTERM"
    assert not run.validates_now(), "what is left of the time is for saving"


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_does_not_validate_in_between(step: int) -> None:
    assert not run_at(step).validates_now()
