"""Judges that are asked what is known: one that judges passes, and each way to fail is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from recipes.environments.environments import Environments
from recipes.environments.instances import ALL_VERIFIERS
from recipes.environments.scoring.known_answers import KNOWN, PROBE_SECONDS
from recipes.errors import ConfigError
from recipes.grpo import setup
from tests.configuration import block
from tests.configuration import config as stage_config
from tools.environments.check.judge import Judge
from tools.tiny.rule_judge import RuleServer

RULED = sorted(set(KNOWN) - {"math_with_judge"})  # the rules know no mathematics


@pytest.fixture(scope="module")
def rules() -> Iterator[str]:
    server = RuleServer(0)
    with server.serving():
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="module")
def approving() -> Iterator[str]:
    """A judge that likes everything, and of a pair the second answer."""
    judge = Judge()
    judge.approves = True
    judge.says = lambda request: (  # type: ignore[method-assign]
        json.dumps({"score_1": 1, "score_2": 1, "ranking": 3})
        if "response_1" in str(request)
        else Judge.says(judge, request)
    )
    yield judge.url
    judge.close()


def config_with(url: str) -> Any:
    """Return the configuration of environments whose judges are all at this address."""
    instances: dict[str, Any] = {"the_judge": {"responses_api_models": {"vllm_model": {"base_url": url, "model": "m"}}}}
    for kind in KNOWN:
        name = "genrm" if kind == "genrm_compare" else "judge"
        settings: dict[str, Any] = {f"{name}_model_server": {"type": "responses_api_models", "name": "the_judge"}}
        settings |= {"should_use_judge": True} if kind == "math_with_judge" else {}
        instances[kind] = {"resources_servers": {kind: settings}}
    gym = block(
        "env.nemo_gym", instances=instances, invalid_tool_call_patterns=("<tool_call>",), thinking_tags=("<think>",)
    )
    return block("env", nemo_gym=gym)


def environments(url: str) -> Environments:
    return Environments.from_config(config_with(url), None)  # type: ignore[arg-type]


def problems(url: str, servers: list[str], *, seconds: float = PROBE_SECONDS) -> list[str]:
    made = environments(url)
    try:
        return [str(problem) for problem in made.wrong_judges(servers, seconds=seconds)]
    finally:
        made.close()


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_the_known_task_can_be_read_and_scored(kind: str) -> None:
    verifier = ALL_VERIFIERS[kind]
    settings = verifier.settings(**({"should_use_judge": True} if kind == "math_with_judge" else {}))
    assert verifier.needs_judge(settings)
    verifier.parse_task(KNOWN[kind].row, settings)


def test_every_environment_with_a_judge_has_a_known_task() -> None:
    """`math_with_judge` asks where a setting says so, `ns_tools` the judge of another environment."""
    asking = {kind for kind, verifier in ALL_VERIFIERS.items() if verifier.needs_judge(verifier.settings())}
    assert asking | {"math_with_judge"} == set(KNOWN)


def test_a_judge_that_judges_is_taken(rules: str) -> None:
    assert problems(rules, RULED) == []


def test_a_judge_that_approves_of_everything_is_named(approving: str) -> None:
    found = problems(approving, RULED)
    assert len(found) == len(RULED)
    assert all("env.nemo_gym.the_judge" in text and "worth" in text for text in found)


def test_a_judge_that_does_not_answer_is_named() -> None:
    [found] = problems("http://127.0.0.1:9/v1", ["over_refusal_detection"], seconds=1.0)
    assert "the_judge" in found and "within 1 s" in found


def test_a_judge_that_refuses_is_named_with_its_words(rules: str) -> None:
    [found] = problems(f"{rules}/no_such_path?", ["math_with_judge"])
    assert "no verdict on a known answer" in found and "no rule is for this question" in found


def test_judges_of_other_environments_are_not_asked(approving: str) -> None:
    assert problems(approving, ["mcqa"]) == []


@pytest.mark.parametrize("choice", ["refuse", "warn", "off"])
def test_the_run_does_what_the_key_says(approving: str, caplog: pytest.LogCaptureFixture, choice: str) -> None:
    config = stage_config(env=block("env", judge_probe=choice))
    made = environments(approving)
    made.asked_for.add("multichallenge")
    try:
        if choice == "refuse":
            with pytest.raises(ConfigError, match="the_judge"):
                setup._probe_judges(config, made)
        else:
            setup._probe_judges(config, made)
            assert ("the_judge" in caplog.text) == (choice == "warn")
    finally:
        made.close()


def test_checked_rows_say_which_environments_are_asked() -> None:
    made = environments("http://127.0.0.1:9/v1")
    row = {**KNOWN["multichallenge"].row, "agent_ref": {"name": "multichallenge_simple_agent"}}
    assert made.check_row(row) == [] and made.asked_for == {"multichallenge"}
    made.close()


def test_judges_are_asked_where_they_are_once_they_have_started(approving: str) -> None:
    made = environments("http://127.0.0.1:9/v1")  # where nobody answers
    try:
        made.ask_judges_of(config_with(approving))
        (found,) = made.wrong_judges(["multichallenge"])
    finally:
        made.close()
    assert str(found) == problems(approving, ["multichallenge"])[0]
