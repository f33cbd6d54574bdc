"""Placeholder rows, which a blend publishes without their question: how question, prompt and answer are restored.

`_hf_placeholder` holds the number of a row in a source and a template. There are two styles of template. `dapo`: the
source wraps its question in instructions of its own; they are replaced by {prefix, suffix}. `skywork`: a string with
`{question}`. Answers stay strings: the verifier would refuse the number 42 where it expects "42".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PLACEHOLDER = "_hf_placeholder"
BLANK_LINE = "\n\n"


def dapo_prompt(question: str, template: object) -> str:
    """Return the prompt of a DAPO question: the template's prefix and suffix replace its first and last paragraph."""
    if not isinstance(template, Mapping):
        return question
    paragraphs = question.split(BLANK_LINE)
    if len(paragraphs) >= 3:
        paragraphs = paragraphs[1:-1]
    core = BLANK_LINE.join(paragraphs).strip()
    return f"{template.get('prefix', '')}{core}{template.get('suffix', '')}".rstrip("\n")


def skywork_prompt(question: str, template: object) -> str:
    """Return the prompt of a Skywork question."""
    if not isinstance(template, str) or "{question}" not in template:
        return question
    return template.replace("{question}", question)


def restore_answer(raw: object) -> str | None:
    """Return the expected answer as text, or None when the source has none.

    A source holds an answer as plain text, as JSON text, or as a JSON list or object whose first value is the answer.
    """
    if raw is None:
        return None
    if not isinstance(raw, str):
        return json.dumps(raw, ensure_ascii=False)
    try:
        value = json.loads(raw)
        as_written = json.loads(raw, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, str):
        return value
    if not isinstance(value, list | dict) or not value:
        return raw
    first, text = (next(iter(v.values() if isinstance(v, dict) else v)) for v in (value, as_written))
    return text if isinstance(text, str) else json.dumps(first, ensure_ascii=False)


def nested(record: object, path: Sequence[str | int]) -> object:
    """Return the value at `path` inside a record, or None when there is no such place."""
    for step in path:
        if isinstance(record, Mapping) and isinstance(step, str):
            record = record.get(step)
        elif isinstance(record, list) and isinstance(step, int) and -len(record) <= step < len(record):
            record = record[step]
        else:
            return None
    return record


def restore_row(row: Mapping[str, Any], *, style: str, question: str, answer: str) -> dict[str, Any]:
    """Return the complete row: the placeholder's other fields, the question, the answer and the request."""
    template = row[PLACEHOLDER].get("question_template")
    prompt = dapo_prompt(question, template) if style == "dapo" else skywork_prompt(question, template)
    kept = {key: value for key, value in row.items() if key != PLACEHOLDER}
    return kept | {
        "question": prompt if style == "dapo" else question,
        "expected_answer": answer,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
    }
