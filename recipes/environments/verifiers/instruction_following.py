"""Instructions that a program can check. Reward 1.0 when all are followed (`binary`), or their share (`fraction`).

Only the text of the last output item is graded. Decided as NeMo Gym's verifier has it, because published rewards
depend on it:

* An answer that is empty or was cut off is checked like any other: it follows "no commas". With the setting
  `refuse_empty_answers` one without text earns 0.0. A binary row without instructions earns 1.0.
* An instruction without arguments of its own (the list of arguments is shorter) is not checked.
* An unknown instruction, and one whose arguments do not fit, counts as not followed.

The checks are our own (`checks/instructions.py`). They differ from the published ones in two things, for which those
use trained data that is not installed here. The language is told by script and frequent words, not by langdetect; and
sentences and words are split by rules, not by NLTK's punkt. Arguments that a row leaves out are never chosen at random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.checks.instructions import CHECKS
from recipes.environments.contract.responses import last_item_text
from recipes.environments.contract.rows import one_of, optional_object, wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row

BINARY, FRACTION = "binary", "fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The instructions of one row."""

    instructions: tuple[tuple[str, str], ...]  # (name, arguments as JSON text)
    grading_mode: str
    refuses_empty: bool = False


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `instruction_id_list`, `kwargs` and `grading_mode`, from `verifier_metadata` or from the row itself."""
    fields = {**row, **optional_object(row, "verifier_metadata")}
    names, arguments = fields.get("instruction_id_list"), fields.get("kwargs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong("instruction_id_list", names, "a list of strings")
    if not isinstance(arguments, list) or not all(given is None or isinstance(given, Mapping) for given in arguments):
        raise wrong("kwargs", arguments, "a list of objects or nulls")
    mode = one_of("grading_mode", fields.get("grading_mode") or BINARY, (BINARY, FRACTION))
    given = [{key: value for key, value in (one or {}).items() if value is not None} for one in arguments]
    return Task(
        instructions=tuple((name, json.dumps(one)) for name, one in zip(names, given, strict=False)),
        grading_mode=mode,
        refuses_empty=bool(settings.get("refuse_empty_answers", False)),
    )


def score(response: Response, task: Task) -> Verdict:
    """Check every instruction."""
    text = last_item_text(response)
    if task.refuses_empty and not text.strip():
        return Verdict(reward=0.0, reason="the answer is empty", metrics={"num_followed": 0.0})
    followed = [_follows(text, name, json.loads(arguments)) for name, arguments in task.instructions]
    missed = [name for (name, _), is_followed in zip(task.instructions, followed, strict=True) if not is_followed]
    share = sum(followed) / len(followed) if followed else 0.0
    reward = float(not missed) if task.grading_mode == BINARY else share
    reason = f"not followed: {', '.join(missed)}"[:200] if missed else f"all {len(followed)} instructions are followed"
    return Verdict(reward=reward, reason=reason, metrics={"num_followed": float(sum(followed))})


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
    class_name="InstructionFollowingResourcesServer",
    rewards=(0.0, 1.0),
    agents={"instruction_following_simple_agent": Agent(kind="single_turn", server="instruction_following")},
    settings=frozenset({"refuse_empty_answers"}),
)
