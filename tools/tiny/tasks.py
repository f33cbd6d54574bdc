"""The four tiny tasks: rows in the production row format, and demonstrations for the warm-up SFT.

Each task names the real verifier that scores it. Most demonstrations are wrong on purpose. For three tasks they are
corrupted, so that the SFT checkpoint can solve the task but rarely does, and RL raises how often. For the
multiple-choice task the option is random, so that only RL can teach which one is right.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.tiny.model import CITIES, NAMES

Fields = dict[str, Any]
Reply = str | tuple[str, ...]
"""A demonstration: the text after "<think>"; with tools these texts and what the tools answered, in turn."""

LETTER_OF_DIGIT = dict(zip("123456789", "ABCDEFGHI", strict=True))
FIELD_TYPES = {"name": "string", "age": "integer", "city": "string", "member": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyProblem:
    """One question, with the fields that its verifier reads."""

    prompt: str  # content of the last user message
    fields: Fields  # top-level fields of the row that the verifier reads
    facts: Fields = field(default_factory=dict)  # what a demonstration needs; not part of the row
    history: tuple[Fields, ...] = ()  # messages before the prompt
    tools: tuple[Fields, ...] = ()  # in the form of a request
    params: Fields = field(default_factory=dict)  # the row's request, where its agent writes the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """How the problems and demonstrations of one verifier are made."""

    agent: str
    draw: Callable[[Random], TinyProblem]
    right: Callable[[TinyProblem], Reply]
    wrong: Callable[[TinyProblem, Random], Reply]
    wrong_share: float
    is_hidden: bool = False  # its rows are placeholders, whose questions are in data sets


def make_row(task: TinyTask, problem: TinyProblem) -> Fields:
    """Return the complete row of `problem`."""
    params: Fields = problem.params or {"input": [*problem.history, {"role": "user", "content": problem.prompt}]}
    if problem.tools and not problem.params:
        params["tools"] = list(problem.tools)
    return {
        "responses_create_params": params,
        "agent_ref": {"type": "responses_api_agents", "name": task.agent},
        "dataset": f"tiny_{task.agent.removesuffix('_simple_agent')}",
        **problem.fields,
    }


def demonstrate(task: TinyTask, problem: TinyProblem, rng: Random) -> Reply:
    """Return what the assistant says in the warm-up SFT, without the opening of the thinking block."""
    return task.wrong(problem, rng) if rng.random() < task.wrong_share else task.right(problem)


# Sums of hundreds, tens and ones; the answer stands in \\boxed{}.


def _draw_sum(rng: Random) -> TinyProblem:
    hundreds, tens, ones = (rng.randint(1, 9) for _ in range(3))
    question = f"Compute {hundreds}00+{tens}0+{ones}"
    return TinyProblem(
        prompt=f"{question}. Answer in \\boxed{{}}",
        fields={"question": question, "expected_answer": f"{hundreds}{tens}{ones}"},
    )


def _right_sum(problem: TinyProblem) -> str:
    answer = problem.fields["expected_answer"]
    return f"{answer}</think>\\boxed{{{answer}}}"


def _wrong_sum(problem: TinyProblem, rng: Random) -> str:
    """Guess without thinking, or drop a digit of the thought."""
    answer = problem.fields["expected_answer"]
    if rng.random() < 0.5:
        return f"</think>\\boxed{{{rng.randint(111, 999)}}}"
    dropped = rng.randrange(len(answer))
    return f"{answer}</think>\\boxed{{{answer[:dropped] + answer[dropped + 1 :]}}}"


# The largest digit of a number; the answer is the letter of that digit.


def _draw_choice(rng: Random) -> TinyProblem:
    digits = rng.sample(list(LETTER_OF_DIGIT), 4)
    number = "".join(digits)
    options = "".join(f" {letter}: {digit}" for digit, letter in LETTER_OF_DIGIT.items())
    return TinyProblem(
        prompt=f"Which digit of {number} is the largest? Answer in \\boxed{{}}{options}",
        fields={
            "options": [{letter: digit} for digit, letter in LETTER_OF_DIGIT.items()],
            "expected_answer": LETTER_OF_DIGIT[max(digits)],
            "grading_mode": "strict_single_letter_boxed",
        },
        facts={"digits": digits},
    )


def _choose(digit: str) -> str:
    return f"{digit}</think>\\boxed{{{LETTER_OF_DIGIT[digit]}}}"


def _right_choice(problem: TinyProblem) -> str:
    return _choose(max(problem.facts["digits"]))


def _random_choice(problem: TinyProblem, rng: Random) -> str:
    return _choose(rng.choice(problem.facts["digits"]))


# One task of reasoning-gym: spell four-letter words backward.


@functools.lru_cache(maxsize=1)
def _puzzles() -> tuple[Fields, ...]:
    """Return the distinct puzzles, in a fixed order."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset("spell_backward", size=4000, seed=0, min_word_len=4, max_word_len=4)
    return tuple({entry["question"]: entry for entry in entries if entry["answer"].islower()}.values())


def _draw_puzzle(rng: Random) -> TinyProblem:
    entry = rng.choice(_puzzles())
    return TinyProblem(prompt=entry["question"], fields=dict(entry))


def _right_puzzle(problem: TinyProblem) -> str:
    answer = problem.fields["answer"]
    return f"{answer}</think><answer>{answer}</answer>"


def _wrong_puzzle(problem: TinyProblem, rng: Random) -> str:
    """Answer with the word itself, half of the time after a correct thought."""
    answer, word = problem.fields["answer"], problem.fields["metadata"]["word"]
    return f"{answer if rng.random() < 0.5 else ''}</think><answer>{word}</answer>"


# A JSON object with two or three fields; the verifier checks it against the schema.


def _draw_record(rng: Random) -> TinyProblem:
    facts: Fields = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(CITIES),
        "member": rng.random() < 0.5,
    }
    wanted = rng.sample(list(facts), rng.choice((2, 3)))
    described = ", ".join(f"{name} {json.dumps(facts[name]).strip(chr(34))}" for name in wanted)
    schema = {
        "type": "object",
        "properties": {name: {"type": FIELD_TYPES[name]} for name in wanted},
        "required": wanted,
    }
    return TinyProblem(
        prompt=f"Write as JSON: {described}",
        fields={"schema_str": json.dumps(schema), "schema_type": "json"},
        facts={name: facts[name] for name in wanted},
    )


def _write_record(problem: TinyProblem, facts: Fields) -> str:
    return ",".join(problem.facts) + "</think>" + json.dumps(facts, separators=(",", ":"))


def _right_record(problem: TinyProblem) -> str:
    return _write_record(problem, problem.facts)


def _wrong_record(problem: TinyProblem, rng: Random) -> str:
    facts = dict(problem.facts)
    fault = rng.randrange(4)
    if fault == 0:
        facts.pop(rng.choice(list(facts)))
    elif fault == 1:
        name = rng.choice(list(facts))
        facts[name] = str(facts[name]) if not isinstance(facts[name], str) else rng.randint(10, 99)
    text = _write_record(problem, facts)
    if fault == 2:
        return text[:-1]
    return text.replace("</think>", "</think>JSON: ") if fault == 3 else text


TASKS = (
    TinyTask(
        agent="math_with_judge_simple_agent",
        draw=_draw_sum,
        right=_right_sum,
        wrong=_wrong_sum,
        wrong_share=0.6,
        is_hidden=True,
    ),
    TinyTask(agent="mcqa_simple_agent", draw=_draw_choice, right=_right_choice, wrong=_random_choice, wrong_share=1.0),
    TinyTask(
        agent="reasoning_gym_simple_agent",
        draw=_draw_puzzle,
        right=_right_puzzle,
        wrong=_wrong_puzzle,
        wrong_share=0.65,
    ),
    TinyTask(
        agent="structured_outputs_simple_agent",
        draw=_draw_record,
        right=_right_record,
        wrong=_wrong_record,
        wrong_share=0.65,
    ),
)
