"""The six tiny stages as a user starts them: each starts, or says in one list what it still lacks."""

from __future__ import annotations

import pytest

from recipes.config.load import config_path, find_stage, load_config, load_stages, refusals

TO_COME = "the native engine does not have the "
LOCAL = {"SCALE": "tiny", "LAUNCHER": "local", "CONFIG_PATH": ""}


def lacking(stage: str) -> list[str]:
    """Return what the native engine lacks for a stage: environments, agents, judges; the lists are tested elsewhere."""
    problems = refusals(load_config(config_path(find_stage(stage), "tiny", "h100")))
    return [problem.wrong for problem in problems if problem.wrong.startswith(TO_COME)]


@pytest.mark.parametrize("stage", [stage.id for stage in load_stages()])
def test_tiny_stage_starts_or_names_everything_it_lacks(launch, stage):
    names = lacking(stage)
    if not names:
        words = launch.plan("--stage", stage, "--dry-run", **LOCAL).words  # its judge may not be made
        assert words[2:4] == ["-m", "tools.job.local"]
        return
    lines = launch.plan("--stage", stage, **LOCAL, expect=2).stderr.splitlines()
    listed = [line for line in lines if TO_COME in line]
    assert len(listed) == len(names)
    for name in names:
        assert sum(f": {name}; " in line for line in listed) == 1, name
    numbers = [number for number, line in enumerate(lines) if line in listed]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # one list, nothing between its lines
    assert not (launch.directory / "results" / "exp" / "logs").exists()


def test_the_stages_that_train_today_lack_nothing():
    assert [stage.id for stage in load_stages() if not lacking(stage.id)][:3] == ["stage1.1", "stage1.2", "stage1.3"]
