"""Every recorded case of the reference verifiers, conversion and flags, case by case.

A deliberate difference is listed with its reason; a listed case that agrees after all fails, so the list stays true.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.config.tree import build
from recipes.environments.chat.codec import PrefixError, replace_prefix
from recipes.environments.chat.messages import assistant_items, chat_request
from recipes.environments.chat.tool_calls import FlagPatterns, turn_flags
from recipes.environments.instances import VERIFIERS
from tests.recorded import env_cases, env_cases_of

# file -> (verifier, settings of the server)
TOOL_USE = "single_step_tool_use_with_argument_comparison"
PARALLEL = {"word_count_similarity_threshold": 0.1, "parallel_tool_call_rewarding": True}
SURPLUS = {**PARALLEL, "allow_subset": True, "allow_superset": True}
TOOL_USE_FILES = {
    "parallel_f1": {**SURPLUS, "parallel_tool_call_reward_mode": "f1"},
    "parallel_fractional": {**SURPLUS, "parallel_tool_call_reward_mode": "fractional"},
    "parallel_strict": PARALLEL,
    **{f"thr{threshold}": {"word_count_similarity_threshold": threshold} for threshold in (0.0, 0.1, 0.3)},
}
REWARD_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "calendar": ("calendar", {}),
    "instruction_following": ("instruction_following", {}),
    **{
        f"single_step_tool_use_{name}": (TOOL_USE, {"tool_call_comparator_config": config})
        for name, config in TOOL_USE_FILES.items()
    },
    "math_with_judge_library": ("math_with_judge", {"should_use_judge": False}),
    "mcqa": ("mcqa", {"grading_mode": None}),
    "mcqa_md": ("mcqa", {"grading_mode": "lenient_answer_colon_md"}),
    "reasoning_gym": ("reasoning_gym", {}),
    "structured_outputs": ("structured_outputs", {}),
}

# (file, case) -> the reward here, and why. "refused": the row has no task, so no reward either.
DIFFERENCES: dict[tuple[str, str], str | float] = {
    **{
        (f"single_step_tool_use_thr{threshold}", "msg_expected_empty_text"): 0.0  # an empty message says nothing
        for threshold in (0.0, 0.1, 0.3)
    },
    ("reasoning_gym", "kk_no_source"): "refused",  # the reference raised; a row without its task name is bad data
}


@pytest.mark.parametrize(("name", "case"), env_cases_of(REWARD_FILES))
def test_reward(name: str, case: dict[str, Any]) -> None:
    verifier, settings = VERIFIERS[REWARD_FILES[name][0]], REWARD_FILES[name][1]
    decided = DIFFERENCES.get((name, case["name"]), case["reward"])
    if decided == "refused":
        assert case["reward"] is None
        with pytest.raises(ValueError, match="source_dataset"):
            verifier.parse_task(case["row"], build(verifier.settings, settings))
        return
    verdict = verifier.score(case["response"], verifier.parse_task(case["row"], build(verifier.settings, settings)))
    assert verdict.reward == decided, verdict.reason
    assert ((name, case["name"]) in DIFFERENCES) == (decided != case["reward"]), "it agrees after all"
    assert verdict.reason
    for extra in ("extracted_answer", "error_type", "task_name"):
        if extra in case["extras"]:
            assert verdict.details[extra] == case["extras"][extra]


@pytest.mark.parametrize("case", env_cases("turn_flags"))
def test_turn_flags(case: dict[str, Any]) -> None:
    patterns = FlagPatterns(
        invalid_tool_call=("<tool_call>", "</tool_call>", "<function_call>", "</function_call>"),
        thinking_tags=("<think>", "</think>"),
    )
    assert list(turn_flags(case["item"], patterns)) == case["result"]


@pytest.mark.parametrize("case", env_cases("responses_chat_conversion"))
def test_request_as_chat(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError) as raised:
            chat_request(case["responses_params"])
        assert f"ValueError: {raised.value}" == case["error"]
    else:
        assert chat_request(case["responses_params"]) == case["chat_params"]


@pytest.mark.parametrize("case", env_cases("responses_chat_conversion", "assistant_message_to_items"))
def test_sampled_message_as_items(case: dict[str, Any]) -> None:
    items = assistant_items(case["message"])
    for item in items:  # ids of messages and reasoning are free
        item["id"] = re.sub(r"^(msg|rs)_.*", r"\1_*", item["id"])
    assert items == case["items"]


@pytest.mark.parametrize("case", env_cases("retokenization"))
def test_prefix_replacement(case: dict[str, Any]) -> None:
    seen, prefix, template = (tuple(case[key]) for key in ("model_prefix", "template_prefix", "template"))
    if case["error"]:
        with pytest.raises(PrefixError, match=r"the prompt has \d+ end tokens"):
            replace_prefix(seen, prefix, template, eos=case["eos"])
    else:
        assert list(replace_prefix(seen, prefix, template, eos=case["eos"])) == case["result"]
