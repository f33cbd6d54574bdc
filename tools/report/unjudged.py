"""The table of prompts that never earned a verdict: which they are, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from tools.report.ledger import Unjudged
from tools.report.samples import visible

MAX_SHOWN = 50
_MAX_REASON = 300  # characters; a reason may quote what a model wrote


def unjudged_table(prompts: Sequence[Unjudged], rows_file: str) -> str:
    """Return the table of prompts without a verdict; nothing when every prompt has one."""
    if not prompts:
        return ""
    shown = prompts[:MAX_SHOWN]
    names = _names(Path(rows_file), {one.line for one in shown}) if rows_file else {}
    rows = "".join(
        f"<tr><td>{one.line}</td><td class='reason'>{visible(names.get(one.line, one.prompt_id))}</td>"
        f"<td class='reason'>{visible(one.reason[:_MAX_REASON])}</td></tr>"
        for one in shown
    )
    kinds = Counter(one.reason.partition(":")[0][:_MAX_REASON] for one in prompts).most_common(5)
    counted = ", ".join(f"{visible(kind)} {count}" for kind, count in kinds)
    more = f"; the first {MAX_SHOWN} are shown, the ledger has all" if len(prompts) > MAX_SHOWN else ""
    return (
        f"<section><h2>Prompts without a verdict</h2><p class='note'>{len(prompts)} of {escape(rows_file)}: "
        f"{counted}{more}</p><div class='scroll'><table class='numbers'><thead><tr><th>line</th>"
        "<th class='reason'>prompt</th><th class='reason'>why</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _names(rows_file: Path, lines: set[int]) -> Mapping[int, str]:
    """Return what rows call their task, by line; empty where the file is gone or a row has no name."""
    names: dict[int, str] = {}
    try:
        with rows_file.open("rb") as rows:
            for number, text in enumerate(islice(rows, max(lines)), start=1):
                if number in lines and (name := _instance(json.loads(text))):
                    names[number] = name
    except (OSError, ValueError, RecursionError):
        return names
    return names


def _instance(row: Any) -> str:
    """Return the `instance_id` of a row, in whichever of its objects it is; "" without one."""
    objects = [row, *(_member(row, key) for key in ("metadata", "verifier_metadata", "responses_create_params"))]
    objects.append(_member(objects[-1], "metadata"))
    names = (_member(one, "instance_id") for one in objects)
    return next((name for name in names if isinstance(name, str)), "")


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
