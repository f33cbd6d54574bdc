"""What every verifier promises, for every name of the registry."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.asking import advance
from recipes.environments.contract.responses import (
    function_call_item,
    last_message_text,
    message_item,
    reasoning_item,
)
from recipes.environments.contract.verdict import Verdict
from recipes.environments.contract.verifier import Verifier
from recipes.environments.instances import servers_of
from recipes.environments.registry import AGENTS, CODING_AGENTS, LATER_AGENTS, VERIFIERS, find_agent
from recipes.environments.verifiers import mcqa
from tests.office import small_office

EVENT = {"event_id": 0, "duration": 60, "constraint": "before 1pm", "min_time": "10:00", "max_time": "16:00"}
ACTION = {"type": "function_call", "name": "f", "arguments": '{"q": "two words"}'}
ROWS: dict[str, dict[str, Any]] = {
    "calendar": {"exp_cal_state": {"0": EVENT}},
    "code_gen": {"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["2"]}}},
    "instruction_following": {"instruction_id_list": ["detectable_format:title"], "kwargs": [{}]},
    "single_step_tool_use_with_argument_comparison": {"expected_action": ACTION},
    "equivalence_llm_judge": {"responses_create_params": {"input": "q"}, "expected_answer": "4"},
    "inverse_if": {"prompt": "p", "rubric": [{"criteria": "c"}], "reference_response": "r"},
    "jailbreak_detection": {"adversarial_prompt": "p", "response_policy_mapped": "refusal_with_explanation"},
    "math_formal_lean": {"header": "h", "formal_statement": "theorem t : a := by"},
    "math_with_judge": {"question": "q", "expected_answer": "\\frac{1}{2}"},
    "mcqa": {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "A", "grading_mode": "lenient_boxed"},
    "multichallenge": {"context": "c", "rubric": [{"question": "q", "pass_criteria": "YES"}]},
    "ns_tools": {"question": "q", "expected_answer": "\\frac{1}{2}"},
    "over_refusal_detection": {"safe_prompt": "p"},
    "reasoning_gym": {"question": "q", "answer": "12", "metadata": {"source_dataset": "chain_sum"}},
    "swerl_gen": {
        "mode": "repro-gen",
        "instance": {"repo": "o/r", "patch": "p", "regression_script": ""},
        "metadata": {"image": "i", "relevant_file_contents": "{}"},
    },
    "structured_outputs": {"schema_str": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
    "workplace_assistant": {"ground_truth": [{"name": "email_delete_email", "arguments": '{"email_id": "00000001"}'}]},
}
SETTINGS: dict[str, dict[str, Any]] = {"workplace_assistant": {"tables": small_office()}}  # others need none
JUNK_SECONDS = 5.0  # of processor time: a busy machine takes longer


def junk_texts() -> list[str]:
    rng = random.Random(0)
    pieces = ["\\boxed{", "}", "{", "$", "<answer>", "</answer>", "\\frac", "1", "A", '"', ":", "\n", "[", "\\(", "^"]
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 40))) for _ in range(30)]
    texts += [bytes(rng.randrange(256) for _ in range(200)).decode("utf-8", errors="replace") for _ in range(10)]
    return [*texts, "\x00", "\ud800", "\u202e", "9" * 5000, "(" * 500, "\\boxed{" * 200, "a" * 100_000, "\n" * 10_000]


def junk_responses() -> list[Any]:
    shapes: list[Any] = [
        {},
        {"output": None},
        {"output": "text"},
        {"output": [None, 3, "x", {}]},
        {"output": [{"type": "message"}]},
        {"output": [{"type": "message", "content": None}]},
        {"output": [{"type": "message", "content": [{"text": None}, 5]}]},
        {"output": [reasoning_item(["\\boxed{A}"])]},
        {"output": [function_call_item("f", "{", call_id="c")]},
        {"output": [{"type": "function_call"}]},
    ]
    return shapes + [{"output": [message_item(text)]} for text in junk_texts()]


def settled(verifier: Verifier, response: Any, task: Any) -> Verdict:
    """Return the verdict; whoever is asked repeats the response's own text, which a hostile answer makes it do."""
    text = last_message_text(response) if isinstance(response.get("output"), list) else ""
    replies: list[list[Any]] = []
    while isinstance(scored := advance(verifier.score(response, task), replies), list):
        printed = '{"ready": true}\n' + text
        judged, run = (
            {"output": [message_item(text or "nothing")]},
            {"process_status": "failed", "stdout": printed, "stderr": text},
        )
        replies.append([{**judged, **run} for _ in scored])
    return scored


def test_every_verifier_is_in_the_table() -> None:
    assert ROWS.keys() == VERIFIERS.keys()


@pytest.mark.parametrize("name", VERIFIERS)
def test_junk_gives_a_finite_reward_in_range_twice_the_same_in_bounded_time(name: str) -> None:
    verifier = VERIFIERS[name]
    task = verifier.parse_task(ROWS[name], SETTINGS.get(name, {}))
    low, high = verifier.rewards
    settled(verifier, {}, task)  # imports libraries
    for response in junk_responses():
        start = time.process_time()
        verdict = settled(verifier, response, task)
        assert time.process_time() - start < JUNK_SECONDS, response
        assert isinstance(verdict, Verdict)
        assert math.isfinite(verdict.reward)
        assert low <= verdict.reward <= high
        assert verdict.reason
        assert verdict == settled(verifier, response, task)
        assert all(isinstance(value, float) for value in verdict.metrics.values())


# What is slow for some way of reading text: repeated, nested, or never closed. 100 kB each.
WORST = (
    *("A,", ",", "A or ", " ", "\n", "\\text{", "\\boxed{", "answer:", "answer ", "**", "A", "[", "]", "{", "[{", "("),
    *(
        ")",
        '"',
        "<<",
        ">>",
        "*",
        "*a*",
        "a ",
        "```",
        "P.S",
        "\\text{A}",
        "<think>",
        "-",
        "a-",
        "1:",
        "am",
        "\u200b",
        "***",
    ),
)
CHEAP_SECONDS = 1.0  # on a busy machine; it runs in the collector's thread


def worst_responses() -> list[Any]:
    texts = [text for piece in WORST for text in (piece * (100_000 // len(piece)), f"answer: A{piece * 50_000}B")]
    texts += [f"answer: A{piece * (100_000 // len(piece))}no B" for piece in WORST]
    nested = "\\text{" * 14_000 + "A" + "}" * 14_000
    texts += [f"\\boxed{{{nested}}}", "answer: " + nested, "[" + '{"a": 1}, ' * 10_000 + "]"]
    calls = [[function_call_item("f", json.dumps({"q": text}), call_id="c")] for text in texts[::7]]
    return [{"output": [message_item(text)]} for text in texts] + [{"output": call} for call in calls]


def cheap_tasks() -> list[Any]:
    settings: dict[str, list[dict[str, Any]]] = {"mcqa": [{"grading_mode": mode} for mode in mcqa.SERVER_MODES]}
    tasks = []
    for name, verifier in VERIFIERS.items():
        for setting in settings.get(name, [{}]):
            task = verifier.parse_task(ROWS[name], {**SETTINGS.get(name, {}), **setting})
            if verifier.is_cheap(task):
                tasks.append(pytest.param(name, task, id="-".join([name, *setting.values()])))
    return tasks


@pytest.mark.parametrize(("name", "task"), cheap_tasks())
def test_what_is_cheap_is_cheap_on_the_worst_text(name: str, task: Any) -> None:
    for response in worst_responses():
        start = time.process_time()
        settled(VERIFIERS[name], response, task)
        assert time.process_time() - start < CHEAP_SECONDS, str(response)[:300]


@pytest.mark.parametrize("name", VERIFIERS)
def test_tasks_are_values(name: str) -> None:
    """Equal rows give equal, hashable tasks: verdicts are cached by task."""
    rows = (json.loads(json.dumps(ROWS[name])) for _ in range(2))
    one, other = (VERIFIERS[name].parse_task(row, SETTINGS.get(name, {})) for row in rows)
    assert one == other
    assert hash(one) == hash(other)


# Rows of these may leave out every field of their own: the last user message is then what is judged.
ALL_OPTIONAL = {"jailbreak_detection", "over_refusal_detection"}


@pytest.mark.parametrize("name", sorted(VERIFIERS.keys() - ALL_OPTIONAL))
def test_a_row_of_another_kind_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=r"^field '"):
        VERIFIERS[name].parse_task({"responses_create_params": {"input": "hi"}}, {})


@pytest.mark.parametrize("name", sorted(AGENTS.keys() - {*CODING_AGENTS}))
def test_every_agent_has_its_verifier(name: str) -> None:
    assert find_agent(name, {}).server in servers_of({})


def test_no_agent_is_both_built_and_to_come() -> None:
    assert not AGENTS.keys() & LATER_AGENTS


def test_agents_that_are_missing_say_why() -> None:
    with pytest.raises(ValueError, match="'swe_pivot_tool_simulation_agent' comes with a later release"):
        find_agent("swe_pivot_tool_simulation_agent", {})
    with pytest.raises(ValueError, match="unknown agent 'mcqa_simple_agnt'; did you mean 'mcqa_simple_agent'"):
        find_agent("mcqa_simple_agnt", {})


def test_example_rows_name_agents_that_are_known(gym_row: Callable[..., dict[str, Any]]) -> None:
    for name in ("structured_outputs", "structured_outputs__structured_outputs_v3_example"):
        assert gym_row(name)["agent_ref"]["name"] in AGENTS
    assert gym_row("genrm_compare")["agent_ref"]["name"] in AGENTS
    for name in ("swe_pivot",):
        assert gym_row(name)["agent_ref"]["name"] in LATER_AGENTS
