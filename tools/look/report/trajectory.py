"""One rollout of a coding agent as HTML: what it said, its commands, what they answered, its patch, the hidden tests.

Everything in it comes from a model, a repository or a container: it is escaped, and what a browser would act on is
shown by its code. A text is cut where it is long, and so is a list.

Sampled rollouts as cards: held-out prompts before and after training, then training prompts early and late.

The text comes from a model: it is escaped, special tokens are marked, control characters are shown by their code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tools.look.report.chart import HERE, format_number, format_seconds, page, part
from tools.look.report.load import RunData

MAX_PAIRS = 4
MAX_TRAIN = 3  # of the first and of the last step each

Sample = Mapping[str, Any]


def samples(run: RunData) -> Markup | str:
    """Return the cards, or nothing when no rollout was sampled."""
    pairs = before_and_after(run.rollouts.get("val", ()))[:MAX_PAIRS]
    train, steps = run.rollouts.get("train", ()), []
    if train:
        first, last = min(one["step"] for one in train), max(one["step"] for one in train)
        for step in [first] if first == last else [first, last]:
            mine = _varied([one for one in train if one["step"] == step])[:MAX_TRAIN]
            steps.append((step, [_card(one) for one in mine]))
    if not pairs and not steps:
        return ""
    return part("trajectory", "samples", pairs=[(_card(first), _card(last)) for first, last in pairs], steps=steps)


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


def _card(one: Sample) -> dict[str, object]:
    """Return what the card of a rollout shows."""
    status = str(one.get("status", ""))
    facts = [f"step {one['step']}", f"{one.get('num_generated_tokens', '?')} tokens", _versions(one)]
    return {
        "style": verdict_style(one),
        "reward": reward_words(one),
        "facts": facts if status == "completed" else [*facts, status],
        "agent": str(one.get("agent")),
        "prompt": str(one.get("prompt_text", "")),
        "output": str(one.get("output_text", "")),
        "reason": str(one.get("reason", "")),
    }


def _versions(one: Sample) -> str:
    versions = one.get("versions") or []
    if not versions:
        return "no tokens"
    return f"weights {versions[0]}" if len(versions) == 1 else f"weights {versions[0]} to {versions[-1]}"


MAX_BYTES = 64 << 20  # of the rollouts in the page that has them all
_SHOWN = (
    *("step", "prompt", "agent", "prompt_text", "output_text", "reward", "reason", "status", "versions", "num_turns"),
    *("num_generated_tokens", "member", "group_rewards", "group_advantages", "tokens"),
)
_TEXTS = ("prompt", "agent", "prompt_text", "output_text", "reason", "status")


def browser(run: RunData) -> str:
    """Return the page with every logged rollout, the newest first; those beyond its size are counted and left out.

    The rollouts are JSON in which no `<` is written out, and the page runs no script but the one whose hash it names.
    """
    newest = [(kind, one) for kind, mine in run.rollouts.items() for one in mine]
    newest.sort(key=lambda pair: -pair[1]["step"])
    written: list[str] = []
    num_bytes = 0
    for kind, one in newest:
        known: dict[str, Any] = {"versions": []} | {key: one[key] for key in _SHOWN if key in one}
        shown = known | {key: str(known.get(key) or "") for key in _TEXTS} | {"kind": kind}
        line = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
        num_bytes += len(line) + 1
        if num_bytes > MAX_BYTES:
            break
        written.append(line)
    facts = [f"{len(written)} logged rollouts"]
    if left := len(newest) - len(written):
        facts.append(f"{left} older ones are left out; rollouts/*.jsonl has them")
    script = (HERE / "rollouts.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = [
        part("page", "header", title=f"Rollouts of {run.name}", facts=facts),
        part("rollouts", "browser", data=Markup(f"[{','.join(written)}]"), script=Markup(script)),
    ]
    return page(f"{run.name}: rollouts", body, part("rollouts", "head", hash=digest))


MAX_ITEMS = 700  # shown of one rollout; a run notes fewer
MAX_SAMPLED = 3  # rollouts in the report of a run
MAX_LINES = 800  # shown of a patch
LINE_STYLES = {"+": "add", "-": "del", "@": "at"}


def trajectories(run: RunData) -> Markup | str:
    """Return a few rollouts of the last logged step of a run turn by turn, folded; nothing for a run without any."""
    noted = [one for one in run.rollouts.get("train", ()) if trajectory_of(one)]
    last = [one for one in noted if one["step"] == noted[-1]["step"]]
    by_reward = {one.get("reward"): one for one in reversed(last)}  # one of each reward, then the others
    picked = [*by_reward.values(), *(one for one in last if not any(one is mine for mine in by_reward.values()))]
    if not picked:
        return ""
    folded = [(instance_of(one), reward_words(one), one["step"], replayed(one)) for one in picked[:MAX_SAMPLED]]
    return part("trajectory", "trajectories", folded=folded)


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


def replayed(sample: Sample, *, anchor: str = "") -> Markup:
    """Return one rollout turn by turn."""
    noted = trajectory_of(sample) or {}
    facts = [str(sample.get("kind", "")), f"step {sample.get('step')}", str(sample.get("status", ""))]
    facts += [f"ended: {noted.get('end', 'unknown')}", f"{sample.get('num_turns', '?')} turns"]
    if isinstance(seconds := sample.get("seconds"), int | float):
        facts.append(format_seconds(seconds))
    items = noted.get("items")
    listed = [item for item in items if isinstance(item, Mapping)] if isinstance(items, Sequence) else []
    return part(
        "trajectory",
        "replay",
        style=verdict_style(sample),
        words=reward_words(sample),
        facts=[fact for fact in facts if fact],
        reason=str(sample.get("reason", "")),
        turns=_turns(listed[:MAX_ITEMS]),
        num_more_items=max(0, len(listed) - MAX_ITEMS),
        patch=_patch(noted.get("patch")),
        tests=_tests(noted.get("tests")),
        anchor=anchor,
    )


def _turns(items: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[dict[str, object]]]]:
    """Return (number, items) of each turn, which begins with what the model says after somebody else; 0: before it."""
    turns: list[tuple[int, list[dict[str, object]]]] = [(0, [])]
    was_model = False
    for item in items:
        role, text = str(item.get("role", "")), str(item.get("text", ""))
        is_model = role in ("assistant", "reasoning", "call")
        if is_model and not was_model:
            turns.append((turns[-1][0] + 1, []))
        was_model = is_model
        shown: dict[str, object] = {"role": role, "text": text}
        if role == "call":
            shown |= {"name": str(item.get("name", "")), "arguments": _arguments(text)}
        turns[-1][1].append(shown)
    return turns


def _arguments(text: str) -> list[tuple[str, str]]:
    """Return (name, text) of a call's arguments where they are an object, else the text without a name."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return [("", text)]
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in arguments.items()]


def _patch(patch: object) -> dict[str, object]:
    if not isinstance(patch, str) or not patch:
        return {"lines": (), "num_more": 0}
    lines = patch.split("\n")
    shown = [(LINE_STYLES.get(line[:1], ""), line) for line in lines[:MAX_LINES]]
    return {"lines": shown, "num_more": max(0, len(lines) - MAX_LINES)}


def _tests(tests: object) -> dict[str, str] | None:
    if not isinstance(tests, Mapping):
        return None
    style, word = ("good", "pass") if tests.get("resolved") else ("bad", "fail")
    return {"style": style, "word": word, "reason": str(tests.get("reason") or "")}
