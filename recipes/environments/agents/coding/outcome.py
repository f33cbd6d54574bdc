"""How the work on a task becomes a verdict, and which verdicts are kept out of the loss.

    hidden tests pass                                  1.0
    the same, but the agent ran out of turns or room   1.0, kept out of the loss: it did not know that it was done
    the agent, or the tests, ran out of time or memory 0.0, kept out of the loss
    the tests fail, there is no patch, a loop          0.0
    a container or the tests themselves failed         no verdict

These are NeMo Gym's rules, of its agent `swe_agents`.

What the log keeps of a coding agent's work: every turn in order, the patch, and what the hidden tests said.

A trajectory of 200 turns is longer than a log should be. So each text is cut in its middle, the more texts the shorter,
and of very many items only the first and the last are kept; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract.verifier import Item, NoVerdict, Verdict, env_failed
from recipes.environments.swe.contract import AgentEnd, Evaluation

MAX_CHARACTERS = 60_000  # of the texts of all items together
MAX_TEXT = 4_000  # characters of one text
MAX_ITEMS = 600  # half of them from the beginning
MAX_PATCH = 20_000  # characters


def note_trajectory(
    instance: str, items: Sequence[Item], *, end: AgentEnd, patch: str, evaluation: Evaluation | None
) -> dict[str, Any]:
    """Return a trajectory as JSON: its instance, its items in order, and how it ended.

    An item has a `role` and a `text`; a call has its `name`, too, and its text is its arguments.
    """
    half = MAX_ITEMS // 2
    dropped = max(0, len(items) - MAX_ITEMS)
    kept = [*items[:half], *items[-half:]] if dropped else list(items)
    limit = min(MAX_TEXT, MAX_CHARACTERS // max(1, len(kept)))
    shown = [_entry(item, limit) for item in kept]
    if dropped:
        shown.insert(half, {"role": "left out", "text": f"{dropped} items"})
    tests = None
    if evaluation is not None:
        tests = {"resolved": evaluation.resolved, "reason": shortened(evaluation.failed or evaluation.reason, MAX_TEXT)}
    return {
        "instance": instance[:MAX_TEXT],
        "items": shown,
        "end": str(end),
        "patch": shortened(patch, MAX_PATCH),
        "tests": tests,
    }


def shortened(text: str, limit: int) -> str:
    """Return a text of about `limit` characters: a longer one without its middle, and how much that was."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def _entry(item: Item, limit: int) -> dict[str, str]:
    kind = item.get("type")
    if kind == "function_call":
        text = shortened(str(item["arguments"]), limit)
        return {"role": "call", "name": str(item["name"])[:100], "text": text}
    if kind == "function_call_output":
        return {"role": "tool", "text": shortened(str(item["output"]), limit)}
    if kind == "reasoning":
        return {"role": "reasoning", "text": shortened(_joined(item.get("summary")), limit)}
    content = item.get("content")
    text = content if isinstance(content, str) else _joined(content)
    return {"role": str(item.get("role", "assistant")), "text": shortened(text, limit)}


def _joined(parts: Any) -> str:
    texts = [part.get("text") for part in parts or () if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


_OUT_OF_MEANS = (AgentEnd.MAX_TURNS, AgentEnd.CONTEXT)
_MASKED = {AgentEnd.TIME: "the agent ran out of its time", AgentEnd.MEMORY: "the agent used too much memory"}
_MARKS = (
    ("maximum iteration", AgentEnd.MAX_TURNS),
    ("contextwindow", AgentEnd.CONTEXT),
    ("stuck in a loop", AgentEnd.STUCK),
    ("stuckinloop", AgentEnd.STUCK),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an agent left when its work ended."""

    end: AgentEnd
    patch: str = ""
    no_patch: str = "the agent changed nothing"  # why there is no patch
    evaluation: Evaluation | None = None  # None: nothing was tested


def error_kind(error: str | None) -> AgentEnd | None:
    """Return the kind of an error that an agent elsewhere reports as text; None without one."""
    if not error:
        return None
    text = error.lower()
    spaceless = text.replace(" ", "")
    return next((kind for mark, kind in _MARKS if mark in text or mark in spaceless), AgentEnd.OTHER)


def verdict_on(work: Work) -> Verdict | NoVerdict:
    """Return the verdict on a piece of work, with its metrics."""
    found = work.evaluation
    if found is not None and found.failed:
        return env_failed(f"the evaluation failed: {found.failed}")
    metrics = metrics_of(work)
    if work.end in _MASKED:
        return Verdict(reward=0.0, reason=_MASKED[work.end], is_flagged=True, metrics=metrics)
    if found is None:
        return Verdict(reward=0.0, reason=f"no patch: {work.no_patch}", metrics=metrics)
    if found.is_late or found.out_of_memory:
        what = "ran out of their time" if found.is_late else "used too much memory"
        reason = f"the hidden tests {what}: {found.reason}"
        return Verdict(reward=0.0, reason=reason, is_flagged=True, metrics=metrics)
    if not found.resolved:
        return Verdict(reward=0.0, reason=found.reason or "the hidden tests fail", metrics=metrics)
    is_flagged = work.end in _OUT_OF_MEANS
    reason = f"resolved, but the agent ended by {work.end}" if is_flagged else "resolved"
    return Verdict(reward=1.0, reason=reason, is_flagged=is_flagged, metrics=metrics)


def metrics_of(work: Work) -> dict[str, float]:
    """Return 0 or 1 per kind of end and of evaluation, so that their means are shares."""
    found = work.evaluation
    return {
        **{f"ended/{kind}": float(work.end is kind) for kind in AgentEnd},
        "has_patch": float(bool(work.patch)),
        "resolved": float(found is not None and found.resolved),
        "tests/late": float(found is not None and found.is_late),
        "tests/oom": float(found is not None and found.out_of_memory),
        "tests/peak_memory_mib": found.peak_memory_mib if found is not None else 0.0,
    }
