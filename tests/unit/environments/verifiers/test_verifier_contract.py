"""What every verifier promises, for every name of the registry."""

from __future__ import annotations

import importlib
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.config.keys.schema import CONFIG_DIR
from recipes.environments.contract.settings import NoSettings
from recipes.environments.contract.verifier import (
    Agent,
    Verdict,
    Verifier,
    advance,
    function_call_item,
    last_message_text,
    message_item,
    reasoning_item,
)
from recipes.environments.instances import AGENTS, CODING_AGENTS, VERIFIERS, _declared_in, find_agent, servers_of
from recipes.environments.verifiers import calendar, inverse_if, mcqa, multichallenge, workplace_assistant
from recipes.environments.verifiers import single_step_tool_use_with_argument_comparison as single_step
from recipes.errors import ConfigError
from tests.office import small_office

EVENT = {"event_id": 0, "duration": 60, "constraint": "before 1pm", "min_time": "10:00", "max_time": "16:00"}
ACTION = {"type": "function_call", "name": "f", "arguments": '{"q": "two words"}'}
EXAMPLES = CONFIG_DIR / "environments" / "examples"
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
    "terminal_pivot": {"expected_answer": '{"commands": []}', "metadata": {"harness": "terminus_2"}},
    "workplace_assistant": {"ground_truth": [{"name": "email_delete_email", "arguments": '{"email_id": "00000001"}'}]},
}
for name in VERIFIERS.keys() - ROWS.keys():  # a fork's own; without example rows it is its own tests' matter
    if (EXAMPLES / f"{name}.jsonl").is_file():
        ROWS[name] = json.loads((EXAMPLES / f"{name}.jsonl").read_bytes().splitlines()[0])
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


@pytest.mark.parametrize("text", ["x = 1", "VERIFIER = 3"])
def test_a_file_that_declares_no_verifier_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier is found by its file, so a file that is none is a mistake."""
    folder = tmp_path / f"mine_{len(text)}"
    folder.mkdir()
    for name in ("__init__", "half"):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"half: got .*, expected a Verifier or a GroupVerifier called VERIFIER"):
        dict(_declared_in(importlib.import_module(folder.name)))


def test_a_setting_without_a_default_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server of every verifier is made, also where no configuration names it."""
    folder = tmp_path / "bare_settings"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = (CONFIG_DIR.parent / "recipes" / "environments" / "verifiers" / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert " = 40\n" in code
    (folder / "palindrome.py").write_text(code.replace(" = 40\n", "\n"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="palindrome: most_letters: this setting has no default; give it one"):
        dict(_declared_in(importlib.import_module(folder.name)))


def test_what_a_verifier_leaves_out_follows_from_its_name() -> None:
    made = Verifier(task=mcqa.Task, parse_task=mcqa.parse_task, score=mcqa.score)
    assert (made.class_name, made.rewards, made.settings()) == ("McqaResourcesServer", (0.0, 1.0), NoSettings())
    assert made.agents == mcqa.VERIFIER.agents == {"mcqa_simple_agent": Agent(kind="single_turn", server="mcqa")}


@pytest.mark.parametrize("name", ROWS)
def test_junk_gives_a_finite_reward_in_range_twice_the_same_in_bounded_time(name: str) -> None:
    verifier = VERIFIERS[name]
    task = verifier.parse_task(ROWS[name], verifier.settings(**SETTINGS.get(name, {})))
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
    for name, verifier in ((name, VERIFIERS[name]) for name in ROWS):
        for setting in settings.get(name, [{}]):
            task = verifier.parse_task(ROWS[name], verifier.settings(**{**SETTINGS.get(name, {}), **setting}))
            if verifier.is_cheap(task):
                tasks.append(pytest.param(name, task, id="-".join([name, *setting.values()])))
    return tasks


@pytest.mark.parametrize(("name", "task"), cheap_tasks())
def test_what_is_cheap_is_cheap_on_the_worst_text(name: str, task: Any) -> None:
    for response in worst_responses():
        start = time.process_time()
        settled(VERIFIERS[name], response, task)
        assert time.process_time() - start < CHEAP_SECONDS, str(response)[:300]


def at_its_bound(name: str, beyond: int = 0) -> tuple[dict[str, Any], Any]:
    """Return a row as large as a cheap one may be, or `beyond` that, and an answer to all of it."""
    count = calendar.CHEAP_EVENTS + beyond
    row, events = ROWS[name], {str(number): {**EVENT, "event_id": number} for number in range(count)}
    entries = [{"event_id": number, "start_time": "10am", "duration": 60} for number in range(count)]
    size = single_step.CHEAP_CHARACTERS // single_step.CHEAP_CALLS - 10
    calls = [{**ACTION, "arguments": json.dumps({"q": "a " * (size // 2)})}] * single_step.CHEAP_CALLS
    actual = [function_call_item("f", json.dumps({"q": "a " * 4_000}), call_id="c")] * 64
    update, reply = ROWS["workplace_assistant"]["ground_truth"], [message_item("PASS [[YES]] " * 2_000)]
    deletions = [function_call_item(update[0]["name"], update[0]["arguments"], call_id="c")] * 200
    rows: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "calendar": ({"exp_cal_state": events}, [message_item(json.dumps(entries))]),
        "inverse_if": ({**row, "rubric": [{"criteria": "c"}] * (inverse_if.CHEAP_CRITERIA + beyond)}, reply),
        "mcqa": (
            {**row, "options": [{chr(65 + n): "x " * 2_000 + str(n)} for n in range(26)]},
            [message_item("x " * 9_000)],
        ),
        "multichallenge": (
            {**row, "rubric": [{"question": "q", "pass_criteria": "YES"}] * (multichallenge.CHEAP_ITEMS + beyond)},
            reply,
        ),
        "single_step_tool_use_with_argument_comparison": (
            {"expected_action": {"type": "function_call_batch", "calls": calls}},
            actual,
        ),
        "workplace_assistant": (
            {**row, "ground_truth": update * (workplace_assistant.CHEAP_CALLS + beyond)},
            deletions,
        ),
    }
    given, items = rows.get(name, (row, reply))
    return given, {"output": items}


@pytest.mark.parametrize("name", sorted({task.values[0] for task in cheap_tasks()}))
def test_a_cheap_answer_at_its_bound_takes_little_time(name: str) -> None:
    """It is scored in the thread that collects answers: while one is, no other goes on."""
    row, response = at_its_bound(name)
    task = VERIFIERS[name].parse_task(row, VERIFIERS[name].settings(**SETTINGS.get(name, {})))
    assert VERIFIERS[name].is_cheap(task)
    seconds = []
    for _ in range(2):  # the first one may import
        start = time.process_time()
        settled(VERIFIERS[name], response, task)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", ["calendar", "inverse_if", "multichallenge", "workplace_assistant"])
def test_a_row_beyond_the_bound_is_not_cheap(name: str) -> None:
    row, _ = at_its_bound(name, beyond=1)
    task = VERIFIERS[name].parse_task(row, VERIFIERS[name].settings(**SETTINGS.get(name, {})))
    assert not VERIFIERS[name].is_cheap(task)


@pytest.mark.parametrize("name", ROWS)
def test_tasks_are_values(name: str) -> None:
    """Equal rows give equal, hashable tasks: verdicts are cached by task."""
    rows = (json.loads(json.dumps(ROWS[name])) for _ in range(2))
    one, other = (VERIFIERS[name].parse_task(row, VERIFIERS[name].settings(**SETTINGS.get(name, {}))) for row in rows)
    assert one == other
    assert hash(one) == hash(other)


# Rows of these may leave out every field of their own: the last user message is then what is judged.
ALL_OPTIONAL = {"jailbreak_detection", "over_refusal_detection"}


@pytest.mark.parametrize("name", sorted(ROWS.keys() - ALL_OPTIONAL))
def test_a_row_of_another_kind_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=r"^field '"):
        VERIFIERS[name].parse_task({"responses_create_params": {"input": "hi"}}, VERIFIERS[name].settings())


@pytest.mark.parametrize("name", sorted(AGENTS.keys() - {*CODING_AGENTS}))
def test_every_agent_has_its_verifier(name: str) -> None:
    assert find_agent(name, {}).server in servers_of({})


def test_agents_that_are_missing_say_why() -> None:
    with pytest.raises(ValueError, match="unknown agent 'mcqa_simple_agnt'; did you mean 'mcqa_simple_agent'"):
        find_agent("mcqa_simple_agnt", {})


def test_example_rows_name_agents_that_are_known(gym_row: Callable[..., dict[str, Any]]) -> None:
    for name in ("structured_outputs", "structured_outputs__structured_outputs_v3_example"):
        assert gym_row(name)["agent_ref"]["name"] in AGENTS
    assert gym_row("genrm_compare")["agent_ref"]["name"] in AGENTS
