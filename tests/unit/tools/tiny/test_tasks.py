"""Rows of the tiny tasks against the real verifiers: what a right demonstration earns, and what a wrong one does."""

from __future__ import annotations

import itertools
import json
import re
from random import Random
from typing import Any

import pytest

from recipes.environments.contract.verifier import message_item, response_object
from recipes.environments.instances import AGENTS, VERIFIERS
from tools.tiny.english_tasks import ENGLISH_TASKS
from tools.tiny.tasks import TASKS, TinyTask, demonstrate, make_row


def reward(task: TinyTask, row: dict[str, Any], reply: str) -> float:
    verifier = VERIFIERS[AGENTS[task.agent].server]
    answer = reply.split("</think>", 1)[1]
    return verifier.score(response_object([message_item(answer)]), verifier.parse_task(row, verifier.settings())).reward


@pytest.mark.parametrize("task", [*TASKS, *ENGLISH_TASKS], ids=lambda task: task.agent)
def test_right_demonstrations_earn_everything_and_wrong_ones_little(task: TinyTask) -> None:
    rng = Random(3)
    wrong = []
    for _ in range(25):
        problem = task.draw(rng)
        row = make_row(task, problem)
        assert reward(task, row, task.right(problem)) == 1.0
        wrong.append(reward(task, row, task.wrong(problem, rng)))
    assert sum(wrong) / len(wrong) < 0.5
    assert min(wrong) == 0.0


def unread(prompt: str) -> list[str]:
    """Return answers that need no reading: words, values that somebody made up, the prompt and every part of it."""
    words, quoted = prompt.split(), re.findall(r'"([a-z]+)"', prompt)
    parts = [" ".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    bare = [*(" ".join(quoted[::step]) for step in (1, -1)), *(" ".join([word] * 6) for word in quoted)]
    made_up = itertools.combinations((("name", "John"), ("age", 1), ("city", "New York")), 2)
    return [*parts, *bare, *(json.dumps(dict(pair)) for pair in made_up), "0", "1", "{}", "", "Sure!", "I do not know."]


@pytest.mark.parametrize("task", ENGLISH_TASKS, ids=lambda task: task.agent)
def test_what_needs_no_reading_earns_nothing(task: TinyTask) -> None:
    rng = Random(7)
    for _ in range(5):
        problem, other = task.draw(rng), task.draw(rng)
        wanted = problem.fields.get("kwargs", [{"keywords": [problem.facts["right"]]}])[0]["keywords"][0]
        while set(re.findall(r"\w+", wanted)) <= set(re.findall(r"\w+", other.facts["right"])):
            other = task.draw(rng)
        row = make_row(task, problem)
        for text in (*unread(problem.prompt), other.facts["right"]):
            assert reward(task, row, f"</think>{text}") == 0.0, (problem.prompt, text)


def test_rows_have_the_production_format() -> None:
    rng = Random(4)
    for task in TASKS:
        row = make_row(task, task.draw(rng))
        [message] = row["responses_create_params"]["input"]
        assert message["role"] == "user"
        assert row["agent_ref"] == {"type": "responses_api_agents", "name": task.agent}
    assert {task.agent for task in TASKS} <= AGENTS.keys()


def test_demonstrations_have_the_declared_share_of_flaws() -> None:
    rng = Random(5)
    for task in TASKS:
        flawed = 0
        for _ in range(400):
            problem = task.draw(rng)
            flawed += demonstrate(task, problem, rng) != task.right(problem)
        by_chance = 0.25 if task.wrong_share == 1.0 else 0.0  # a random option is sometimes the right one
        assert abs(flawed / 400 - task.wrong_share + by_chance) < 0.1


def test_the_rule_of_the_choice_is_not_in_the_demonstrations() -> None:
    """Each of the four digits is picked equally often, so imitation cannot tell which one is right."""
    rng = Random(6)
    task = next(task for task in TASKS if task.agent == "mcqa_simple_agent")
    ranks = [0, 0, 0, 0]
    for _ in range(2000):
        problem = task.draw(rng)
        ranks[sorted(problem.facts["digits"]).index(demonstrate(task, problem, rng)[0])] += 1
    assert all(abs(count / 2000 - 0.25) < 0.04 for count in ranks)
