"""How a verifier asks a judge model or runs a program while it scores, without doing any input or output itself.

A verifier that needs nobody else is a function: `score(response, task) -> Verdict`. One that needs a judge, or a
sandbox, is a generator: it yields the requests that may be made at the same time, all of one kind, is sent one reply
for each, and returns its verdict. Who drives it decides how judges and sandboxes are reached; a test sends fixed
replies.

    def score(response: Response, task: Task) -> Scoring:
        (reply,) = yield [JudgeQuestion(messages=(("user", "Is it right? [[YES]] or [[NO]]"),))]
        is_right = first_label(last_part_text(reply), "[[YES]]", "[[NO]]") == "[[YES]]"
        return Verdict(reward=float(is_right), reason="the judge says yes" if is_right else "the judge says no")

A generator never sees a judge or a sandbox that failed: its driver gives up and reports no verdict, so that no failure
becomes a number. A reply that arrives and says nothing usable is the verifier's to read; each states what it means
there.

Scoring is pure, so a driver may keep no generator between two requests: `advance` starts it again and sends it all
replies so far. That is how a scoring process, which keeps nothing, scores with a judge.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.responses import last_message_text, output_items
from recipes.environments.contract.verdict import Response, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeQuestion:
    """One call of a judge model."""

    messages: tuple[tuple[str, str], ...]  # (role, text) in order
    params: Mapping[str, Any] = field(default_factory=dict)  # over those of the server: temperature, top_p, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One program to run in a sandbox.

    Its reply has `process_status` (completed, error, failed or timeout), `stdout` and `stderr`.
    """

    language: str  # as the sandbox names it: python3, shell, lean4
    code: str
    seconds: float  # on the clock, once it has started
    stdin: str = ""
    max_characters: int = 1000  # kept of each of stdout and stderr
    image: str = ""  # file of a container image in which it runs; "" = the sandbox
    preparation: str = ""  # in an image: script that ends, with status 0, before the program begins
    network: bool = False  # in an image: whether it has this machine's network, its loopback too


Scoring = Generator[Sequence[JudgeQuestion] | Sequence[Execution], Sequence[Response], Verdict]
"""A verdict in progress. Replies are one per request, in the order of the requests: of a judge a Responses object."""


Requests = list[JudgeQuestion] | list[Execution]


Replies = Sequence[Sequence[Response]]
"""What a scoring was answered so far, one sequence per time that it asked."""


def advance(scored: Verdict | Scoring, replies: Replies) -> Verdict | Requests:
    """Return the verdict of what a verifier's `score` returned, or what it requests after these replies."""
    if isinstance(scored, Verdict):
        return scored
    try:
        requests = next(scored)
        for answers in replies:
            requests = scored.send(answers)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
    finally:
        scored.close()
    return list(requests)  # type: ignore[return-value]  # all are of one kind


NO_LABELS: Mapping[str, str] = {}


class SilentJudgeError(Exception):
    """A judge's reply holds no text, such as one that was cut off while it thought: there is no verdict."""


def require_text(reply: Response) -> str:
    """Return the text of a reply's last message; raises `SilentJudgeError` for a reply without text.

    For a judge whose silence would earn something.
    """
    text = last_message_text(reply)
    if not text:
        raise SilentJudgeError("the judge's reply holds no text; let it write more tokens")
    return text


def last_part_text(reply: Response) -> str:
    """Return the last text part of the last output item; "" when that is no message, as after cut-off reasoning."""
    items = output_items(reply)
    if not items or items[-1].get("type") != "message":
        return ""
    content = items[-1].get("content")
    parts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return parts[-1] if parts and isinstance(parts[-1], str) else ""


def first_label(text: str, *labels: str) -> str | None:
    """Return the label that stands first in a text, None when none does. The longer one wins at the same place."""
    places = [(text.find(label), -len(label), label) for label in labels if label in text]
    return min(places)[2] if places else None


def without_labels(text: str, *labels: str) -> str:
    """Return a text for a judge to read, in which every label is broken by a space.

    A judge may quote what it judges, or the question, before it says its label: the quote must not be read as its
    verdict.
    """
    pattern = "|".join(re.escape(label) for label in labels if label) or "(?!)"
    return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text, flags=re.IGNORECASE)


def filled(template: str, values: Mapping[str, str], *, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Replace each `{name}` of a template by its value, in one pass: braces within values stay as they are.

    `labels` are values, too: those by which a judge answers, which are broken in all others (`without_labels`).
    """
    texts = list(labels.values())
    values = {**{name: without_labels(value, *texts) for name, value in values.items()}, **labels} if labels else values
    parts = template.split("{")
    out = [parts[0]]
    for part in parts[1:]:
        name, closing, rest = part.partition("}")
        out.append(values[name] + rest if closing and name in values else "{" + part)
    return "".join(out)
