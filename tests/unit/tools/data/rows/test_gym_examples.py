"""Every example row that NeMo Gym ships passes the check; one without an agent gets the one that blends give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.instances import AGENTS
from recipes.grpo.data import check_line
from tests.office import real_office
from tools.data.rows.checks import RowChecker

AGENT_OF = {  # rows of these files have no agent_ref: the step that makes blends puts it in
    "calendar": "calendar_simple_agent",
    "code_gen": "code_gen_simple_agent",
    "equivalence_llm_judge": "equivalence_llm_judge_simple_agent",
    "instruction_following": "instruction_following_simple_agent",
    "math_formal_lean": "math_formal_lean_refinement_agent",
    "math_with_judge": "math_with_judge_simple_agent",
    "mcqa": "mcqa_simple_agent",
    "over_refusal_detection": "over_refusal_detection_simple_agent",
    "reasoning_gym": "reasoning_gym_simple_agent",
    "single_step_tool_use_with_argument_comparison": "single_step_tool_use_with_argument_comparison_agent",
    "workplace_assistant": "workplace_assistant_simple_agent",
}
NUM_FILES = 28


def example_files(gym_examples_dir: Path) -> list[Path]:
    found = sorted(gym_examples_dir.glob("*.jsonl"))
    assert len(found) == NUM_FILES
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    kind = path.stem.split("__")[0]
    return [row if "agent_ref" in row else row | {"agent_ref": {"name": AGENT_OF[kind]}} for row in rows]


def test_every_example_row_validates(gym_examples_dir: Path) -> None:
    office = {"workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": real_office()}}}}
    checker = RowChecker.for_tokenizer(None, office)
    wrong, num_full = [], 0
    for path in example_files(gym_examples_dir):
        for number, row in enumerate(rows_of(path), start=1):
            line, agent = json.dumps(row).encode(), row["agent_ref"]["name"]
            assert agent in AGENTS or agent.endswith("_tool_simulation_agent"), agent
            if "all_attempts" in row:  # what came of a rollout, without the fields that a verifier needs
                assert "field 'header'" in str(checker.check(line)[1])
            elif agent in AGENTS:
                num_full += 1
                found = [text for _, text in checker.check(line)[1] if "needs a judge" not in text]  # none is here
                wrong += [f"{path.name}:{number}: {text}" for text in found]
            else:
                wrong += [f"{path.name}:{number}: {found}" for found in check_line(line, lambda _: [])]
    assert not wrong
    assert num_full >= 30


@pytest.mark.parametrize(("agent", "found"), [("swe_agents_val", []), ("mcqa_simple_agent", ["no `responses_"])])
def test_only_an_agent_that_writes_its_prompt_may_have_none(agent: str, found: list[str]) -> None:
    row = {"responses_create_params": {"input": []}, "agent_ref": {"name": agent}}
    assert [text[:14] for text in check_line(json.dumps(row).encode(), lambda _: [])] == found
