"""Sampled rollouts as cards: held-out prompts before and after training, then training prompts early and late.

The text comes from a model: it is escaped, special tokens are marked, control characters are shown by their code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tools.report.axis import format_number
from tools.report.load import RunData

MAX_PAIRS = 4
MAX_TRAIN = 3  # of the first and of the last step each
MAX_CHARACTERS = 3000  # of one text; its end is kept, where the final answer usually is
SPECIAL_TOKEN = re.compile(r"&lt;/?(?:\|[\w .:-]{1,40}\||think|tools?|tool_call|tool_response|s|pad|unk|bos|eos)&gt;")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

Sample = Mapping[str, Any]


def samples(run: RunData) -> str:
    """Return the cards, or nothing when no rollout was sampled."""
    pairs = before_and_after(run.rollouts.get("val", ()))
    parts = []
    if pairs:
        parts.append("<h3>Held-out prompts, before and after</h3>")
        parts.extend(_pair(*pair) for pair in pairs[:MAX_PAIRS])
    train = run.rollouts.get("train", ())
    if train:
        first, last = min(one["step"] for one in train), max(one["step"] for one in train)
        for step in [first] if first == last else [first, last]:
            mine = _varied([one for one in train if one["step"] == step])[:MAX_TRAIN]
            cards = "".join(_card(one, with_prompt=True) for one in mine)
            parts.append(f'<h3>Training rollouts of step {step}</h3><div class="cards">{cards}</div>')
    return f"<section><h2>Sample rollouts</h2>{''.join(parts)}</section>" if parts else ""


def before_and_after(rollouts: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return (first, last) rollout of each prompt sampled at two steps: agents in turn, changed rewards first."""
    by_prompt: dict[str, list[Sample]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(str(rollout.get("prompt_id")), []).append(rollout)
    pairs = []
    for mine in by_prompt.values():
        first = min(mine, key=lambda one: one["step"])
        last = max(mine, key=lambda one: one["step"])
        if first["step"] < last["step"]:
            pairs.append((first, last))
    pairs.sort(key=lambda pair: pair[0].get("reward") == pair[1].get("reward"))
    return _agents_in_turn(pairs)


def visible(text: str) -> str:
    """Escape `text` for HTML, with special tokens marked and control characters written as their code."""
    if len(text) > MAX_CHARACTERS:
        cut = len(text) - MAX_CHARACTERS
        head, tail = text[: MAX_CHARACTERS // 3], text[-(MAX_CHARACTERS - MAX_CHARACTERS // 3) :]
        return f'{visible(head)}<span class="tok">{cut} more characters</span>{visible(tail)}'
    marked = SPECIAL_TOKEN.sub(lambda found: f'<span class="tok">{found[0]}</span>', escape(text))
    return CONTROL.sub(lambda found: f'<span class="tok">U+{ord(found[0]):04X}</span>', marked)


def _agents_in_turn(pairs: Iterable[tuple[Sample, Sample]]) -> list[tuple[Sample, Sample]]:
    queues: dict[str, list[tuple[Sample, Sample]]] = {}
    for pair in pairs:
        queues.setdefault(str(pair[0].get("agent")), []).append(pair)
    ordered: list[tuple[Sample, Sample]] = []
    while any(queues.values()):
        ordered.extend(queue.pop(0) for queue in queues.values() if queue)
    return ordered


def _varied(rollouts: Sequence[Sample]) -> list[Sample]:
    """Order rollouts so that the first ones differ: a best, a worst, one without a verdict, then the rest."""
    scored = sorted((one for one in rollouts if one.get("reward") is not None), key=lambda one: -float(one["reward"]))
    failed = [one for one in rollouts if one.get("reward") is None]
    picked = [*scored[:1], *scored[:0:-1][:1], *failed[:1]]
    return [*picked, *(one for one in rollouts if not any(one is mine for mine in picked))]


def _pair(first: Sample, last: Sample) -> str:
    return (
        f'<div class="pair"><p class="prompt"><span class="agent">{escape(str(first.get("agent")))}</span>'
        f"{visible(str(first.get('prompt_text', '')))}</p>"
        f'<div class="cards two">{_card(first)}{_card(last)}</div></div>'
    )


def _card(one: Sample, *, with_prompt: bool = False) -> str:
    reward = one.get("reward")
    style = "bad" if reward is None or reward <= 0 else "good" if reward >= 1 else "warn"
    shown = "no verdict" if reward is None else f"reward {format_number(float(reward))}"
    status = str(one.get("status", ""))
    facts = [f"step {one['step']}", f"{one.get('num_generated_tokens', '?')} tokens", _versions(one)]
    if status != "completed":
        facts.append(status)
    prompt = ""
    if with_prompt:
        prompt = (
            f'<p class="prompt"><span class="agent">{escape(str(one.get("agent")))}</span>'
            f"{visible(str(one.get('prompt_text', '')))}</p>"
        )
    output = visible(str(one.get("output_text", ""))) or '<span class="tok">empty</span>'
    return (
        f'<article class="card"><div class="cardhead"><b class="status {style}">{escape(shown)}</b>'
        f"<span>{escape(' · '.join(facts))}</span></div>{prompt}<pre>{output}</pre>"
        f'<p class="why"><b>why</b> {visible(str(one.get("reason", "")))}</p></article>'
    )


def _versions(one: Sample) -> str:
    versions = one.get("versions") or []
    if not versions:
        return "no tokens"
    return f"weights {versions[0]}" if len(versions) == 1 else f"weights {versions[0]} to {versions[-1]}"
