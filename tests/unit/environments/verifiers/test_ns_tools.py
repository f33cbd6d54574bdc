"""Mathematics with Python: what a call becomes, what the model is shown, whose settings score the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.contract.verifier import Cell, Verdict, message_item
from recipes.environments.instances import servers_of
from recipes.environments.verifiers.ns_tools import LOST, TOOL, VERIFIER, Settings
from recipes.errors import ConfigError
from tests.recorded import recorded

TOOLS = VERIFIER.tools
assert TOOLS is not None and TOOLS.read is not None
JUDGE = {"responses_api_models": {"vllm_model": {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}}}
MATH = {"should_use_judge": True, "judge_model_server": {"type": "responses_api_models", "name": "judge_model"}}


@pytest.mark.parametrize("name", ["ns_tools", "ns_tools__compmath_test"])
def test_every_real_row_is_scored(name: str) -> None:
    path: Path = recorded("GYM_EXAMPLES_DIR", "gym_examples") / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert all(VERIFIER.parse_task(row, VERIFIER.settings()).expected_answer for row in rows)


def test_the_answer_is_scored_symbolically(gym_row: Callable[..., dict[str, Any]]) -> None:
    task = VERIFIER.parse_task(gym_row("ns_tools"), VERIFIER.settings())
    for text, reward in (("so \\boxed{70}", 1.0), ("so \\boxed{71}", 0.0), ("", 0.0)):
        verdict = VERIFIER.score({"output": [message_item(text)]}, task)
        assert isinstance(verdict, Verdict)
        assert verdict.reward == reward


def test_a_row_for_another_verifier_is_refused(gym_row: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="field 'verifier_type': got string 'code_gen', expected one of math_with_jud"):
        VERIFIER.parse_task({**gym_row("ns_tools"), "verifier_type": "code_gen"}, VERIFIER.settings())


def test_the_named_servers_settings_and_judge_are_taken_over() -> None:
    named = {"type": "resources_servers", "name": "my_math"}
    instances = {
        "my_math": {"resources_servers": {"math_with_judge": MATH}},
        "judge_model": JUDGE,
        "ns_tools": {"resources_servers": {"ns_tools": {
            "default_verifier": "math_with_judge", "verifiers": {"math_with_judge": named}, "sandbox_port": 6001}}},
    }  # fmt: skip
    server = servers_of(instances)["ns_tools"]
    assert VERIFIER.needs_judge(server.settings)
    assert server.judge is not None
    assert server.judge.name == "judge_model"
    assert server.settings.sandbox_port == 6001
    assert VERIFIER.parse_task({"question": "q", "expected_answer": "1"}, server.settings).asks_judge


def test_a_call_becomes_a_cell_and_its_answer_a_text() -> None:
    state = TOOLS.start(Settings(nemo_skills_tool_overrides={"DirectPythonTool": {"exec_timeout_s": 3}}))
    _, cell = TOOLS.call(state, TOOL, {"code": "1"})
    assert cell == Cell(code="1", seconds=3.0, max_characters=1000)
    assert TOOLS.read is not None
    state, first = TOOLS.read(state, {"stdout": "1\n", "stderr": "", "new_session_created": True})
    state, second = TOOLS.read(state, {"stdout": "a\n", "stderr": "b\n", "new_session_created": False})
    state, third = TOOLS.read(state, {"stdout": "a\n", "stderr": None, "new_session_created": True})
    assert (first, second, third) == ("1", "a\nb", f"{LOST}a")


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("other", {"code": "1"}, "Unknown tool: other"),
        (TOOL, {}, "argument 'code': got nothing, expected a string"),
        (TOOL, {"code": ["1"]}, "argument 'code': got list ['1'], expected a string"),
    ],
)
def test_a_wrong_call_is_answered_without_the_sandbox(name: str, arguments: dict[str, Any], error: str) -> None:
    _, text = TOOLS.call(TOOLS.start(Settings()), name, arguments)
    assert isinstance(text, str)
    assert json.loads(text) == {"error": error}


def test_running_earlier_cells_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="disable_session_restore: got False, expected True, the one value"):
        servers_of({"mine": {"resources_servers": {"ns_tools": {"disable_session_restore": False}}}})
