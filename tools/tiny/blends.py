"""The tiny blends: which tasks each mixes, and how many rows it has."""

from __future__ import annotations

from dataclasses import dataclass

from tools.tiny import judged_tasks, program_tasks, repository_tasks, text_tasks, tool_tasks
from tools.tiny.tasks import TASKS, TinyTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyBlend:
    """Rows under data/NAME: those of the tasks in turn, so that each task has equally many."""

    name: str
    tasks: tuple[TinyTask, ...]
    train_rows: int
    val_rows: int


WIDE_TASKS = (
    *TASKS,
    text_tasks.INSTRUCTIONS,
    text_tasks.CALENDAR,
    tool_tasks.CALLS,
    tool_tasks.SCHEMA_CALLS,
    tool_tasks.EMAILS,
    judged_tasks.EQUIVALENCE,
    judged_tasks.OVER_REFUSAL,
    judged_tasks.JAILBREAK,
    judged_tasks.MEMORY,
    judged_tasks.INVERSE,
    judged_tasks.PREFERENCE,
    program_tasks.PROGRAMS,
    program_tasks.REMAINDERS,
)
RLVR = TinyBlend(name="tiny", tasks=TASKS, train_rows=1920, val_rows=200)  # an epoch of 120 steps with 16 prompts each
WIDE = TinyBlend(name="tiny-wide", tasks=WIDE_TASKS, train_rows=60 * len(WIDE_TASKS), val_rows=12 * len(WIDE_TASKS))
SWE1 = TinyBlend(name="tiny-swe1", tasks=(tool_tasks.SWE_CALLS,), train_rows=640, val_rows=64)
SWE2 = TinyBlend(name="tiny-swe2", tasks=(repository_tasks.REPOSITORIES,), train_rows=128, val_rows=32)
RLHF = TinyBlend(name="tiny-rlhf", tasks=(judged_tasks.PREFERENCE, tool_tasks.CALLS), train_rows=320, val_rows=64)
