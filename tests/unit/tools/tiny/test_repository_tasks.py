"""The tiny repositories: their rows, the one operator that solves each, and the turns that the warm-up shows."""

from __future__ import annotations

import json
from random import Random
from types import SimpleNamespace

import pytest

from recipes.environments.agents.coding.agent import request_of
from recipes.environments.agents.coding.calls import offered_names
from recipes.environments.agents.coding.settings import coding_settings
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.swe.task import parse_task
from tools.tiny.model import build_tokenizer
from tools.tiny.repositories import (
    INPUTS,
    KINDS,
    REPOSITORIES,
    TinyRepository,
    apply_operator,
    draw_repository,
    repository_of,
    write_module,
)
from tools.tiny.sft import IGNORED, Demonstration, _ids_and_labels, conversations, wide_settings
from tools.tiny.tasks import make_row

PROBLEMS = [draw_repository(Random(seed)) for seed in range(20)]


def test_only_the_right_operator_solves_a_repository():
    for first in KINDS.values():
        for second in KINDS.values():
            results = [[apply_operator(operator, a, b) for a, b in INPUTS] for operator in (first, second)]
            assert (results[0] == results[1]) is (first == second)
    for problem in PROBLEMS:
        repository = problem.facts["repository"]
        assert repository.planted != repository.right
        for operator, is_right in ((repository.right, True), (repository.planted, False)):
            space: dict[str, object] = {}
            exec(write_module(operator), space)
            results = [space["f"](a, b) for a, b in INPUTS]  # type: ignore[operator]
            assert (str(results) in repository.new_test) is is_right


def test_rows_are_tasks_whose_problem_says_nothing_of_the_fix():
    for problem in PROBLEMS:
        row = make_row(REPOSITORIES, problem)
        task, repository = parse_task(json.loads(json.dumps(row))), problem.facts["repository"]
        assert row["responses_create_params"]["input"] == []
        assert (task.base_commit, task.gold_patch) == (repository.history.commits[0], repository.patch)
        assert repository.history.commits[1] not in json.dumps(row)
        assert not any("return a" in text for text in task.public.values())
        assert len(task.fail_to_pass) == len(task.pass_to_pass) == 1
        assert repository_of(row["responses_create_params"]["metadata"]) == repository


def test_a_row_of_another_repository_is_refused():
    metadata = make_row(REPOSITORIES, PROBLEMS[0])["responses_create_params"]["metadata"]
    with pytest.raises(ValueError, match="instance_id"):
        repository_of({**metadata, "golden_patch": "another"})


def test_the_warm_up_copies_the_wrong_operator_and_draws_the_new_one():
    rng, repository = Random(0), TinyRepository(module="TomRome", kind="sum", planted="%")
    problem = next(p for p in (draw_repository(rng) for _ in range(10_000)) if p.facts["repository"] == repository)
    drawn = [REPOSITORIES.wrong(problem, rng) for _ in range(300)]
    assert all("<parameter=old>a % b</parameter>" in turns[2] for turns in drawn)
    for operator in "+-*":
        assert 70 < sum(f"<parameter=new>a {operator} b<" in turns[2] for turns in drawn) < 130
    assert REPOSITORIES.wrong_share == 0.75  # so every second demonstration has the right operator


def test_the_warm_up_has_no_problem_that_is_held_out():
    held_out = {problem.prompt for problem in PROBLEMS}
    batch = next(conversations(wide_settings(seed=1), held_out))
    assert sum("repository" in conversation.problem.facts for conversation in batch) == 6
    assert not {conversation.prompt for conversation in batch} & held_out


def test_the_agents_request_is_what_the_warm_up_shows(tmp_path):
    tokenizer = build_tokenizer(wide_settings(seed=1).more_words)
    tokenizer.save_pretrained(tmp_path)
    codec = ChatCodec(tmp_path)
    choice = coding_settings("x", {"agent_prompt_overrides": [{"harness": "tiny"}]}).choices[0]
    offered = offered_names(choice.harness, seed="", is_diverse=False, is_camel=False)
    for problem in PROBLEMS[:3]:
        row = make_row(REPOSITORIES, problem)
        episode = SimpleNamespace(params=row["responses_create_params"])
        request = request_of(episode, parse_task(row), choice, offered)  # type: ignore[arg-type]
        ids, labels = _ids_and_labels(tokenizer, Demonstration(problem, REPOSITORIES.right(problem)))
        start = next(place for place, label in enumerate(labels) if label != IGNORED)
        assert list(codec.encode(request)) == ids[:start]
        assert len(ids) < 80  # of a context of 256
