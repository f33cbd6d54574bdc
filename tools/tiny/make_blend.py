"""A tiny blend: rows of its tasks in turn, each question once.

The math rows are placeholders, as in the published blends: their questions are in two generated data sets with the
hub's layout, and the fill step of the published blends restores them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from recipes.files import write_atomically
from tools.data.placeholders import PLACEHOLDER
from tools.files.manifest import TOOL_VERSION, changes, describe, write_manifest
from tools.tiny.tasks import TASKS, Fields, TinyProblem, TinyTask, make_row

BLEND, SOURCES = "blend.jsonl", "placeholders.yaml"
MATH_AGENT = "math_with_judge_simple_agent"
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
        if task.agent == MATH_AGENT:
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
