"""What is refused before policy and engines are started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import ConfigError, DataError
from recipes.grpo.checkpoint import SavedState
from recipes.grpo.rollout import CollectorState
from recipes.grpo.setup import _open_data, require_window
from recipes.types import Group, PromptRef


def config(*, prompts: int, age: int = 1, path: Path | None = None) -> Any:
    return SimpleNamespace(
        grpo=SimpleNamespace(
            num_prompts_per_step=prompts,
            max_num_epochs=2,
            seed=0,
            async_grpo=SimpleNamespace(max_trajectory_age_steps=age),
        ),
        data=SimpleNamespace(
            shuffle=False, train=SimpleNamespace(data_path=str(path)), validation=SimpleNamespace(data_path=None)
        ),
    )


def test_data_that_gives_no_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"responses_create_params": {"input": "question"}, "agent_ref": {"name": "a"}}
    path.write_text(f"{json.dumps(row)}\n" * 3)
    environments: Any = SimpleNamespace(check_row=lambda _row: [])
    with pytest.raises(DataError, match=r"train\.jsonl: got 6 prompts \(3 rows, 2 times\), expected .* is 7; add rows"):
        _open_data(config(prompts=7, path=path), environments)
    stream, validation = _open_data(config(prompts=6, path=path), environments)
    assert (stream.num_prompts, validation) == (6, None)


def group(row: int, *, target: int, version: int) -> Group:
    ref = PromptRef(epoch=0, row_index=row, prompt_id="ab" * 8)
    return Group(prompt=ref, agent="a", prompt_text="", target_step=target, version=version, rollouts=())


def saved(in_flight: tuple[tuple[int, int], ...], *finished: Group) -> SavedState:
    collector = CollectorState(position=20, in_flight=in_flight, finished=finished, failed=())
    return SavedState(step=4, collector=collector, ledger=(), metrics={})


def problems(state: SavedState, *, prompts: int, age: int) -> list[str]:
    try:
        require_window(state, config(prompts=prompts, age=age).grpo, Path("step_000004"))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_resume_needs_the_window_it_was_saved_with() -> None:
    state = saved(((11, 4), (12, 5), (13, 5)), group(10, target=4, version=3))
    assert problems(state, prompts=2, age=1) == problems(state, prompts=8, age=2) == []
    (prompts,) = problems(state, prompts=1, age=1)
    assert prompts.startswith("grpo.num_prompts_per_step: got 1, expected at least 2: it was larger when step_000004")
    assert prompts.endswith("restore it, or start a new run with MODEL_PATH=step_000004/hf")
    (age,) = problems(state, prompts=2, age=0)
    assert age.startswith("grpo.async_grpo.max_trajectory_age_steps: got 0, expected at least 1")
    assert len(problems(state, prompts=1, age=0)) == 2


def test_a_group_from_weights_that_are_too_old_now_needs_their_age() -> None:
    state = saved((), group(10, target=4, version=2))
    assert len(problems(state, prompts=1, age=1)) == 1
    assert problems(state, prompts=1, age=2) == []
