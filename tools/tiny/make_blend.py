"""A tiny blend: rows of its tasks in turn, each question once.

The math rows are placeholders, as in the published blends: their questions are in two generated data sets with the
hub's layout, and the fill step of the published blends restores them.

The tiny blends: which tasks each mixes, and how many rows it has.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from recipes.files import write_atomically
from tools.data.files.manifest import TOOL_VERSION, changes, describe, write_manifest
from tools.data.placeholders import PLACEHOLDER
from tools.tiny import english_tasks, judged_tasks, program_tasks, repositories, text_tasks, tool_tasks
from tools.tiny.tasks import TASKS, Fields, TinyProblem, TinyTask, make_row


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
SWE2 = TinyBlend(name="tiny-swe2", tasks=(repositories.REPOSITORIES,), train_rows=128, val_rows=32)
ENGLISH = TinyBlend(name="english", tasks=english_tasks.ENGLISH_TASKS, train_rows=960, val_rows=60)
TOOLS = TinyBlend(name="tiny-tools", tasks=(tool_tasks.OFFERED_CALLS,), train_rows=576, val_rows=64)
RLHF = TinyBlend(name="tiny-rlhf", tasks=(judged_tasks.PREFERENCE, tool_tasks.CALLS), train_rows=320, val_rows=64)


BLEND, SOURCES = "blend.jsonl", "placeholders.yaml"
INSTRUCTION = ". Answer in \\boxed{}"
TEMPLATES: dict[str, object] = {"dapo": {"prefix": "", "suffix": INSTRUCTION}, "skywork": "{question}" + INSTRUCTION}


def draw_problems(
    count: int, *, seed: int, tasks: Sequence[TinyTask] = TASKS
) -> Iterator[tuple[TinyTask, TinyProblem]]:
    """Yield `count` problems of the tasks in turn; each prompt occurs once."""
    rng, seen = Random(seed), set()
    for index in range(count):
        task = tasks[index % len(tasks)]
        problem = task.draw(rng)
        while problem.prompt in seen:
            problem = task.draw(rng)
        seen.add(problem.prompt)
        yield task, problem


def make_blend(directory: Path, *, num_rows: int, seed: int, tasks: Sequence[TinyTask] = TASKS) -> Path:
    """Write the blend, and for its math rows their sources, unless they are up to date; return the blend."""
    known = {"tool": "make_blend", "tool_version": TOOL_VERSION, "parameters": {"rows": num_rows, "seed": seed}}
    blend, manifest_file = directory / BLEND, directory / "blend.manifest.json"
    questions: dict[str, list[Fields]] = {style: [] for style in TEMPLATES}
    lines = []
    for index, (task, problem) in enumerate(draw_problems(num_rows, seed=seed, tasks=tasks)):
        row = make_row(task, problem)
        if task.is_hidden:
            style = ("dapo", "skywork")[index // len(tasks) % 2]
            row = _hide(row, style, questions[style])
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    content = "".join(lines).encode()
    reasons = changes(manifest_file, known)
    if not reasons and blend.read_bytes() == content:
        print(f"blend: {blend} is up to date")
        return blend
    hidden = {style: records for style, records in questions.items() if records}
    for style, records in hidden.items():
        _write_source(directory / _source_name(style), records)
    if hidden:
        write_atomically(directory / SOURCES, _sources_file(hidden).encode())
    write_atomically(blend, content)
    sources = [describe(directory / SOURCES)] if hidden else []
    write_manifest(manifest_file, {**known, "outputs": [describe(blend, rows=num_rows), *sources]})
    print(f"blend: {blend} ({', '.join(reasons) or 'the tasks changed'}): {num_rows} rows")
    return blend


def _source_name(style: str) -> str:
    return f"tiny_math_{style}"


def _hide(row: Fields, style: str, questions: list[Fields]) -> Fields:
    """Move the question of a math row into its source; return the placeholder row."""
    question, answer = row["question"], row["expected_answer"]
    if style == "dapo":  # such a source wraps its questions in instructions of its own
        question = f"Solve this problem step by step.\n\n{question}\n\nWrite the answer on its own line."
        truth = answer
    else:  # a skywork source holds answers as JSON text
        truth = json.dumps([answer])
    questions.append(
        {
            "prompt": [{"content": question, "role": "user"}],
            "reward_model": {"ground_truth": truth, "style": "rule"},
        }
    )
    return {
        "agent_ref": row["agent_ref"],
        "dataset": _source_name(style),
        PLACEHOLDER: {"row": len(questions) - 1, "question_template": TEMPLATES[style]},
    }


def _write_source(directory: Path, records: list[Fields]) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), content)
    write_atomically(directory / "data" / "train-00000-of-00001.parquet", content.getvalue())


def _sources_file(styles: Iterable[str]) -> str:
    import yaml

    sources: dict[str, Any] = {
        _source_name(style): {
            "path": _source_name(style),
            "split": "train",
            "style": style,
            "question": ["prompt", 0, "content"],
            "answer": ["reward_model", "ground_truth"],
        }
        for style in styles
    }
    return "# Written by tools/tiny: the sources of the questions of the tiny blend.\n" + yaml.safe_dump(
        {"sources": sources}
    )
