"""One rollout of a coding agent as HTML: what it said, its commands, what they answered, its patch, the hidden tests.

Everything in it comes from a model, a repository or a container: it is escaped, and what a browser would act on is
shown by its code. A text is cut where it is long, and so is a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tools.report.axis import format_number, format_seconds
from tools.report.load import RunData
from tools.report.samples import visible

MAX_ITEMS = 700  # shown of one rollout; a run notes fewer
MAX_SAMPLED = 3  # rollouts in the report of a run
MAX_LINES = 800  # shown of a patch
LINE_STYLES = {"+": "add", "-": "del", "@": "at"}

Sample = Mapping[str, Any]


def trajectories(run: RunData) -> str:
    """Return a few rollouts of the last logged step of a run turn by turn, folded; nothing for a run without any."""
    noted = [one for one in run.rollouts.get("train", ()) if trajectory_of(one)]
    last = [one for one in noted if one["step"] == noted[-1]["step"]]
    by_reward = {one.get("reward"): one for one in reversed(last)}  # one of each reward, then the others
    picked = [*by_reward.values(), *(one for one in last if not any(one is mine for mine in by_reward.values()))]
    folded = [
        f"<details><summary>{visible(instance_of(one))} <small>{escape(reward_words(one))}, step {one['step']}</small>"
        f"</summary>{replayed(one)}</details>"
        for one in picked[:MAX_SAMPLED]
    ]
    note = "<p class='note'>Every logged rollout of an instance: <code>make swe-replay RUN=... INSTANCE=...</code></p>"
    return f"<section><h2>Agents at work</h2>{''.join(folded)}{note}</section>" if folded else ""


def trajectory_of(sample: Sample) -> Mapping[str, Any] | None:
    """Return the trajectory of a logged rollout; None for one without."""
    found = sample.get("trajectory")
    return found if isinstance(found, Mapping) else None


def instance_of(sample: Sample) -> str:
    """Return the instance that a rollout worked on, "" where none was noted."""
    return str((trajectory_of(sample) or {}).get("instance", ""))


def verdict_style(sample: Sample) -> str:
    """Return the style of a rollout's reward."""
    reward = sample.get("reward")
    if not isinstance(reward, int | float):
        return "bad"
    return "good" if reward >= 1 else "warn" if reward > 0 else "bad"


def reward_words(sample: Sample) -> str:
    """Return a rollout's reward in words."""
    reward = sample.get("reward")
    return f"reward {format_number(float(reward))}" if isinstance(reward, int | float) else "no verdict"


def replayed(sample: Sample, *, anchor: str = "") -> str:
    """Return one rollout turn by turn."""
    noted = trajectory_of(sample) or {}
    facts = [str(sample.get("kind", "")), f"step {sample.get('step')}", str(sample.get("status", ""))]
    facts += [f"ended: {noted.get('end', 'unknown')}", f"{sample.get('num_turns', '?')} turns"]
    if isinstance(seconds := sample.get("seconds"), int | float):
        facts.append(format_seconds(seconds))
    head = (
        f"<div class='cardhead'><b class='status {verdict_style(sample)}'>{escape(reward_words(sample))}</b>"
        f"<span>{visible(' · '.join(fact for fact in facts if fact))}</span></div>"
    )
    place = f' id="{escape(anchor)}"' if anchor else ""
    return (
        f"<article class='card replay'{place}>{head}<p class='why'><b>why</b> {visible(str(sample.get('reason', '')))}"
        f"</p>{''.join(_turns(noted.get('items')))}{_patch(noted.get('patch'))}{_tests(noted.get('tests'))}</article>"
    )


def _turns(items: object) -> Iterator[str]:
    """Yield each item; a turn begins with what the model says after somebody else has."""
    listed = [item for item in items if isinstance(item, Mapping)] if isinstance(items, Sequence) else []
    number, was_model = 0, False
    for item in listed[:MAX_ITEMS]:
        role = str(item.get("role", ""))
        is_model = role in ("assistant", "reasoning", "call")
        if is_model and not was_model:
            number += 1
            yield f"<h4>turn {number}</h4>"
        was_model = is_model
        yield _item(role, item)
    if len(listed) > MAX_ITEMS:
        yield f"<p class='note'>{len(listed) - MAX_ITEMS} more items</p>"


def _item(role: str, item: Mapping[str, Any]) -> str:
    text = str(item.get("text", ""))
    if role == "call":
        return f"<div class='said call'><b>{visible(str(item.get('name', '')))}</b>{_arguments(text)}</div>"
    if role in ("system", "user"):
        return f"<details class='said'><summary>{visible(role)}</summary><pre>{visible(text)}</pre></details>"
    shown = visible(text) or '<span class="tok">empty</span>'
    return f"<div class='said {'answer' if role == 'tool' else ''}'><b>{visible(role)}</b><pre>{shown}</pre></div>"


def _arguments(text: str) -> str:
    """Return the arguments of a call: one text each where they are an object, else as they were written."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return f"<pre>{visible(text)}</pre>"
    parts = []
    for name, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"<small>{visible(name)}</small><pre>{visible(shown)}</pre>")
    return "".join(parts)


def _patch(patch: object) -> str:
    if not isinstance(patch, str) or not patch:
        return "<h4>patch</h4><p class='note'>none</p>"
    lines = patch.split("\n")
    shown = "\n".join(_patch_line(line) for line in lines[:MAX_LINES])
    more = f"<p class='note'>{len(lines) - MAX_LINES} more lines</p>" if len(lines) > MAX_LINES else ""
    return f"<h4>patch</h4><pre class='diff'>{shown}</pre>{more}"


def _patch_line(line: str) -> str:
    style = LINE_STYLES.get(line[:1])
    return f"<span class='{style}'>{visible(line)}</span>" if style else visible(line)


def _tests(tests: object) -> str:
    if not isinstance(tests, Mapping):
        return "<h4>hidden tests</h4><p class='note'>not run</p>"
    style, word = ("good", "pass") if tests.get("resolved") else ("bad", "fail")
    return f"<h4>hidden tests</h4><p><b class='status {style}'>{word}</b> {visible(str(tests.get('reason') or ''))}</p>"
