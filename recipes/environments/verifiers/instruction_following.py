"""Instructions that a program can check. Reward 1.0 when all are followed (`binary`), or their share (`fraction`).

Only the text of the last output item is graded. Decided as NeMo Gym's verifier has it, because published rewards
depend on it:

* An answer that is empty or was cut off is checked like any other: it follows "no commas". With the setting
  `refuse_empty_answers` one without words earns 0.0. A binary row without instructions earns 1.0.
* An instruction without arguments of its own (the list of arguments is shorter) is not checked.
* An unknown instruction, and one whose arguments do not fit, counts as not followed.

The checks are our own (`checks/instructions.py`). They differ from the published ones in two things, for which those
use trained data that is not installed here. The language is told by script and frequent words, not by langdetect; and
sentences and words are split by rules, not by NLTK's punkt. Arguments that a row leaves out are never chosen at random.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract import (
    Response,
    Row,
    Verdict,
    Verifier,
    last_item_text,
    one_of,
    optional_object,
    without_nulls,
    wrong,
)
from recipes.environments.verifiers.checks.instructions import CHECKS, LANGUAGES, RESPONSE_LANGUAGE, why_unanswerable

BINARY, FRACTION = "binary", "fraction"
RIGHT = "a text that follows the instructions is right, whatever it says"
LIMITS = frozenset(  # instructions that forbid something, so that a text which does not try follows them
    (
        *("punctuation:no_comma", "punctuation:punctuation_dot", "punctuation:punctuation_exclamation"),
        *("keywords:forbidden_words", "keywords:exclude_word_harder", "keywords:no_adjacent_consecutive"),
        *("count:count_unique", "count:lowercase_counting", RESPONSE_LANGUAGE),
    )
)
AT_MOST = "less than"  # a relation of arguments
FEWEST_WORDS = 1  # of an answer that is not empty: "!" says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """An answer that must follow checkable instructions."""

    refuse_empty_answers: bool = False
    """an answer without text earns nothing, whatever it is not to say"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The instructions of one row."""

    instructions: tuple[tuple[str, str], ...]  # (name, arguments as JSON text)
    grading_mode: str
    refuses_empty: bool = False


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `instruction_id_list`, `kwargs` and `grading_mode`, from `verifier_metadata` or from the row itself."""
    fields = {**row, **without_nulls(optional_object(row, "verifier_metadata"))}
    names, arguments = fields.get("instruction_id_list"), fields.get("kwargs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong("instruction_id_list", names, "a list of strings")
    if not isinstance(arguments, list) or not all(given is None or isinstance(given, Mapping) for given in arguments):
        raise wrong("kwargs", arguments, "a list of objects or nulls")
    mode = one_of("grading_mode", fields.get("grading_mode") or BINARY, (BINARY, FRACTION))
    given = [without_nulls(one or {}) for one in arguments]
    for number, (name, one) in enumerate(zip(names, given, strict=False)):
        if name == RESPONSE_LANGUAGE and "language" in one:
            one_of(f"kwargs.{number}.language", one["language"], LANGUAGES)
    return Task(
        instructions=tuple((name, json.dumps(one, sort_keys=True)) for name, one in zip(names, given, strict=False)),
        grading_mode=mode,
        refuses_empty=settings.refuse_empty_answers,
    )


def unanswerable(task: Task) -> str | None:
    """Return why no answer to a row can earn a reward, or None: for a share, one instruction to follow is enough."""
    problems = [why_unanswerable(name, json.loads(arguments)) for name, arguments in task.instructions]
    if task.grading_mode == FRACTION and None in problems:
        return None
    return next((f"field 'kwargs.{number}': {problem}" for number, problem in enumerate(problems) if problem), None)


def score(response: Response, task: Task) -> Verdict:
    """Check every instruction."""
    text = last_item_text(response)
    if task.refuses_empty and len(re.findall(r"\w+", text)) < FEWEST_WORDS:
        return Verdict(reward=0.0, reason="the answer has no words", metrics={"num_followed": 0.0})
    followed = [_follows(text, name, json.loads(arguments)) for name, arguments in task.instructions]
    missed = [name for (name, _), is_followed in zip(task.instructions, followed, strict=True) if not is_followed]
    share = sum(followed) / len(followed) if followed else 0.0
    reward = float(not missed) if task.grading_mode == BINARY else share
    reason = f"not followed: {', '.join(missed)}"[:200] if missed else f"all {len(followed)} instructions are followed"
    return Verdict(reward=reward, reason=reason, metrics={"num_followed": float(sum(followed))})


def exempt(task: Task) -> dict[str, str]:
    """Return what a task pays rightly: any text only where each of its instructions forbids or limits something."""
    is_limit = (name in LIMITS or AT_MOST in json.loads(arguments).values() for name, arguments in task.instructions)
    always = {"another row": RIGHT, "said twice": RIGHT}
    return {**always, "any text": RIGHT} if all(is_limit) else always


def _follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    check = CHECKS.get(name)
    try:
        return check is not None and bool(check(text, **arguments))
    except Exception:  # arguments that do not fit, an invalid pattern, a text without the word asked for
        return False


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    settings=Settings,
    exempt=exempt,
)
