"""Harness files: what they offer the model, how one is chosen, and what is said of a wrong one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.environments.agents.coding.calls import camel_case, offered_names, read_call, request_tools
from recipes.environments.agents.coding.harness import HARNESSES, PRIMITIVES, harnesses, load_harness
from recipes.environments.agents.coding.settings import coding_settings
from recipes.environments.chat.messages import chat_tools
from recipes.errors import ConfigError
from tests.recorded import golden

FILES = sorted(HARNESSES.glob("*.yaml"))
README = (HARNESSES / "README.md").read_text(encoding="utf-8")


def choices(**settings: Any) -> list[tuple[str, bool, bool]]:
    found = coding_settings("here", settings).choices
    return [(choice.harness.name, choice.is_diverse, choice.is_camel) for choice in found]


def test_there_are_four_families_that_differ() -> None:
    assert len(harnesses()) >= 4
    classes = [harness.agent_class for harness in harnesses().values()]
    assert {"CodeActAgent", "OpenCodeAgent", "CodexAgent", "Terminus2Agent"} <= {*classes}
    names = [tuple(tool.name for tool in harness.tools) for harness in harnesses().values()]
    assert len({*names}) == len(names)
    assert len({harness.answers["shell"] for harness in harnesses().values()}) == len(names)
    assert all(f"`{primitive}`" in README for primitive in PRIMITIVES)


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_a_family_can_work(name: str) -> None:
    """It can run commands and change files, and every tool is a tool of a request."""
    harness = harnesses()[name]
    done = {primitive for tool in harness.tools for primitive in tool.primitives.values()}
    assert "shell" in done or name == "tiny"  # whose models could write no command
    assert harness.without_call is None or "finish" in done
    offered = offered_names(harness, seed="a", is_diverse=False, is_camel=False)
    assert len(chat_tools({"tools": request_tools(offered)})) == len(harness.tools)
    for tool in request_tools(offered):
        assert set(tool["parameters"]["required"]) <= set(tool["parameters"]["properties"])
        assert "{" not in tool["description"]


def test_names_of_tools_are_drawn_and_camel_cased() -> None:
    harness = harnesses()["codeact"]
    plain = offered_names(harness, seed="a", is_diverse=False, is_camel=False)
    assert list(plain) == ["execute_bash", "str_replace_editor", "think", "finish"]
    assert next(iter(offered_names(harness, seed="a", is_diverse=False, is_camel=True))) == "executeBash"
    drawn = {tuple(offered_names(harness, seed=str(seed), is_diverse=True, is_camel=False)) for seed in range(50)}
    assert len(drawn) > 10
    again = offered_names(harness, seed="7", is_diverse=True, is_camel=False)
    assert again == offered_names(harness, seed="7", is_diverse=True, is_camel=False)
    assert list(again.values()) == list(harness.tools)
    assert [camel_case(name) for name in ("a", "a_b_c", "_a", "a__b1_2")] == ["a", "aBC", "A", "aB12"]


def test_one_family_unless_the_settings_name_more() -> None:
    assert choices() == choices(agent_framework="openhands", agent_prompt_overrides=None) == [("codeact", False, False)]
    assert choices(agent_framework="opencode") == [("opencode", False, False)]
    overrides = [
        {"agent_cls": "CodexAgent", "diversify_tool_names": True},
        {"harness": "terminus", "camel_case_tool_names": True, "user_prompt_template": None},
        {},
    ]
    assert choices(agent_prompt_overrides=overrides) == [
        ("codex", True, False),
        ("terminus", False, True),
        ("codeact", False, False),
    ]


def test_the_choice_is_the_reference_by_task_or_drawn() -> None:
    for case in golden("env/swe_agents_logic.json").get("override_choice", ()):
        overrides = [{"harness": "codex"}] * case["n"]
        overrides[case["index"]] = {"harness": "terminus"}
        settings = coding_settings("here", {"agent_prompt_overrides": overrides})
        assert settings.choose(case["instance_id"]).harness.name == "terminus", case
    both = [{"harness": "codex"}, {"harness": "terminus"}]
    drawn = coding_settings("here", {"agent_prompt_overrides": both, "agent_prompt_override_random": True})
    assert len({drawn.choose("a__b-1").harness.name for _ in range(64)}) == 2


WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "framework": ({"agent_framework": "aider"}, "here.agent_framework: got aider, expected openhands or opencode"),
    "class": ({"agent_prompt_overrides": [{"agent_cls": "CodexAgnt"}]}, "did you mean 'CodexAgent'?"),
    "harness": ({"agent_prompt_overrides": [{"harness": "codx"}]}, "here.agent_prompt_overrides[0].harness: got codx"),
    "key": ({"agent_prompt_overrides": [{"agent_class": "x"}]}, "agent_class: no code reads it; did you mean"),
    "template": (
        {"agent_prompt_overrides": [{"system_prompt_template": "a.j2"}]},
        "a harness file holds its prompts",
    ),
    "no object": ({"agent_prompt_overrides": ["codex"]}, "here.agent_prompt_overrides[0]: got 'codex'"),
    "no list": ({"agent_prompt_overrides": {"a": 1}}, "expected a list"),
    "configuration": ({"agent_config": "a.toml"}, "here.agent_config: the native engine does not read it"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    settings, expected = WRONG_SETTINGS[name]
    with pytest.raises(ConfigError) as error:
        coding_settings("here", settings)
    assert len(error.value.problems) == 1
    assert expected in str(error.value)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(yaml.safe_load((HARNESSES / "codeact.yaml").read_text(encoding="utf-8")))
    change(document)
    return document


WRONG_FILES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a key too many": (lambda d: d.update(colour="red"), "'colour' was unexpected"),
    "a key too few": (lambda d: d.pop("system"), "'system' is a required property"),
    "an answer too few": (lambda d: d["answers"].pop("late"), "'late' is a required property"),
    "a field of an answer": (
        lambda d: d["answers"].update(shell="{outpt}"),
        "got {outpt}, expected {output}, {status}",
    ),
    "a brace": (lambda d: d.update(task="{"), "the text is no format"),
    "a name": (lambda d: d["tools"][0].update(name="a b"), "'a b' does not match"),
    "a name twice": (lambda d: d["tools"][0].update(name="think"), "two tools have the name think"),
    "a name in camel case": (lambda d: d["tools"][0].update(name="fin_ish"), "two tools have the name fin_ish, or one"),
    "a meaning twice": (
        lambda d: d["tools"][0]["parameters"].update(x={"type": "string", "description": "x", "is": "command"}),
        "two parameters are command",
    ),
    "a primitive": (lambda d: d["tools"][0].update(does="fly"), "'fly' is not valid"),
    "a meaning": (lambda d: d["tools"][0]["parameters"]["command"].update({"is": "comand"}), "needs an argument"),
    "a type": (lambda d: d["tools"][0]["parameters"]["command"].update(type="integer"), "got integer, expected string"),
    "no chooser": (lambda d: d["tools"][1]["parameters"].pop("command"), "the parameter command chooses"),
    "a program of nothing": (lambda d: d["tools"][2].update(does="program"), "exactly when it does program"),
    "a field of a program": (
        lambda d: d["tools"][2].update(does="program", runs="ls {where}"),
        "got {where}, expected {thought}",
    ),
    "no end": (lambda d: d["tools"].pop(), "the model cannot end its work"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_says_where_and_what(tmp_path: Path, name: str) -> None:
    change, expected = WRONG_FILES[name]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(changed(change)), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_harness(path)
    assert all(problem.where.startswith(f"{path}: ") for problem in error.value.problems)
    assert any(expected in str(problem) for problem in error.value.problems), str(error.value)


@pytest.mark.parametrize("text", ["a: [", "", "- 1", "\udcff"])
def test_a_file_that_is_no_harness_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_harness(path)


def test_units_and_texts_of_arguments() -> None:
    offered = offered_names(harnesses()["opencode"], seed="", is_diverse=False, is_camel=False)
    call = read_call(offered["bash"], {"command": "ls", "timeout": "5000", "description": "list"})
    assert call.primitive == "shell"
    assert call.arguments == {"command": "ls", "seconds": 5.0}
    call = read_call(offered["edit"], {"file_path": "a", "old_string": "b", "new_string": "", "replace_all": "True"})
    assert call.arguments == {"path": "a", "old": "b", "new": "", "everywhere": True}
