"""Tasks in plain English for a small language model that has learned to chat: sums, one instruction, records.

They are of three kinds that the published blends have, and short enough for a model of a hundred million parameters,
which solves each of them now and then. There is no warm-up on them: `right` and `wrong` say only what is meant. What
needs no reading earns nothing: a bare word, the prompt or a part of it, one word again and again, values made up.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tools.tiny.model import CITIES, NAMES
from tools.tiny.tasks import FIELD_TYPES, TinyProblem, TinyTask

TOPICS = (
    *("sea", "dog", "winter", "music", "train", "moon", "bread", "garden", "school", "river", "coffee", "bird"),
    *("football", "castle", "rain", "forest", "teacher", "chess", "bicycle", "summer", "bridge", "tea", "king", "cat"),
)
KEYWORDS = ("blue", "old", "happy", "small", "bright", "quiet", "friend", "morning", "water", "home", "always", "never")
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "balls", "pens")
EMPTY = {"name": "", "age": 0, "city": ""}  # what the prompt shows
ECHOED = ("word", "sentence")  # the prompt's words, of which no part that holds its topic is without one
MIN_WORDS = 4


def _right(problem: TinyProblem) -> str:
    return f"</think>{problem.facts['right']}"


def _wrong(problem: TinyProblem, rng: Random) -> str:
    del rng
    return f"</think>{problem.facts['wrong']}"


def _draw_sum(rng: Random) -> TinyProblem:
    name, things, first, second = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 20), rng.randint(2, 9)
    text = f"{name} had {first} {things} and got {second} more, so {first} + {second} = "
    question = f'Complete this: "{text}". Write only the number.'
    return TinyProblem(
        prompt=question,
        fields={"question": question, "expected_answer": str(first + second)},
        facts={"right": str(first + second), "wrong": str(first)},
    )


def _draw_sentence(rng: Random) -> TinyProblem:
    """Ask for a sentence with a word that keeps one more rule; neither words alone nor the prompt again are one."""
    topic, word, limit = rng.choice(TOPICS), rng.choice(KEYWORDS), rng.randint(8, 14)
    plain = f"I like the {topic}."
    rules: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
        (f'Use the word "{word}"', "keywords:existence", {"keywords": [word]}, f"The {topic} is {word}.", plain),
        ("Use no commas", "punctuation:no_comma", {}, plain, f"Yes, {plain}"),
        (
            f"Use fewer than {limit} words",
            "length_constraints:number_words",
            {"num_words": limit, "relation": "less than"},
            plain,
            plain + " I like it" * limit,
        ),
        (
            f'Begin with the word "{word}"',
            "first_word:first_word_answer",
            {"first_word": word},
            f"{word} {plain}",
            plain,
        ),
        ("Put it in double quotation marks", "startend:quotation", {}, f'"{plain}"', plain),
    )
    said, check, arguments, right, wrong = rng.choice(rules)
    return TinyProblem(
        prompt=f'{said}. Write one short sentence with the word "{topic}".',
        fields={
            "instruction_id_list": [
                *("keywords:existence", "keywords:frequency", "length_constraints:number_words"),
                *("keywords:forbidden_words", check),
            ],
            "kwargs": [
                {"keywords": [topic]},
                {"keyword": topic, "frequency": 3, "relation": "less than"},
                {"num_words": MIN_WORDS, "relation": "at least"},
                {"forbidden_words": list(ECHOED)},
                arguments,
            ],
            "grading_mode": "binary",
        },
        facts={"right": right, "wrong": wrong},
    )


def _draw_person(rng: Random) -> TinyProblem:
    """Describe somebody, and ask for two facts as JSON: neither the empty example nor other facts earn anything."""
    facts = {"name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
    said = {"name": f"named {facts['name']}", "age": f"{facts['age']} years old", "city": f"from {facts['city']}"}
    wanted = rng.sample(list(facts), 2)
    properties = {key: {"type": FIELD_TYPES[key], "const": facts[key]} for key in wanted}
    schema = {"type": "object", "properties": properties, "required": wanted}
    example, right = (json.dumps({key: source[key] for key in wanted}) for source in (EMPTY, facts))
    return TinyProblem(
        prompt=f"Somebody is {' and '.join(said[key] for key in wanted)}. Write only JSON like {example}.",
        fields={"schema_str": json.dumps(schema), "schema_type": "json"},
        facts={"right": right, "wrong": example},
    )


ENGLISH_TASKS = tuple(
    TinyTask(agent=agent, draw=draw, right=_right, wrong=_wrong, wrong_share=0.0)
    for agent, draw in (
        ("math_with_judge_simple_agent", _draw_sum),
        ("instruction_following_simple_agent", _draw_sentence),
        ("structured_outputs_simple_agent", _draw_person),
    )
)
