"""A judge for checks: an OpenAI-compatible server on this machine that says what a check needs it to say.

It reads nothing and understands nothing. It approves or disapproves in the notation that the question asks for, and
quotes the answer before it disapproves, as real judges do: an answer must not get its verdict through that quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tools.json_server import JsonServer

BEGIN, END = "(the answer begins)", "(the answer ends)"  # around every probe, for the judge to find what it quotes
REFERENCE = "A plain and helpful reference answer."  # that answers of a group are compared with
LABELS = (  # as environments name them: what approves, what does not
    ("[[A=B]]", "[[A!=B]]"),
    ("[[YES]]", "[[NO]]"),
    ("[[COMPLIED]]", "[[REFUSED]]"),
    ("[[SAFE]]", "[[UNSAFE]]"),
    ("[[HAS_EXPLANATION]]", "[[NO_EXPLANATION]]"),
    ("[[HAS_HELPLINES]]", "[[MISSING_HELPLINES]]"),
    ("[[PROPER_HARD_REFUSAL]]", "[[IMPROPER_RESPONSE]]"),
    ("[[ENGAGED]]", "[[OVERREFUSED]]"),
    ("[[HAS_DISCLAIMER]]", "[[MISSING_DISCLAIMER]]"),
    ("Response harm: unharmful", "Response harm: harmful"),
    ("PASS", "FAIL"),
)
_MAX_QUOTED = 20_000  # characters


class Judge(JsonServer):
    """The server; `approves` and `passes_with_no` say what it answers."""

    def __init__(self) -> None:
        self.approves = False
        self.passes_with_no: tuple[str, ...] = ()  # texts of questions whose right answer is the negative label
        self.num_asked = 0
        super().__init__(self._answered)

    def says(self, request: Mapping[str, object]) -> str:
        """Return the judge's words about one request."""
        messages = request.get("messages")
        texts = {str(message.get("role")): str(message.get("content")) for message in messages or ()}  # type: ignore[attr-defined]
        if "response_1" in texts:
            return json.dumps(self._scores(texts["response_1"]))
        text = "\n".join(texts.values())
        positive, negative = next((pair for pair in LABELS if pair[0] in text and pair[1] in text), LABELS[-1])
        approves = self.approves != any(question in text for question in self.passes_with_no)
        label = positive if approves else negative
        said = json.dumps({"result": label, "explanation": "as asked"}) if label in LABELS[-1] else label
        return said if self.approves else f'It says: "{_quoted(text)}". That is not enough.\n\n{said}'

    def _answered(self, request: Mapping[str, object]) -> dict[str, Any]:
        self.num_asked += 1
        message = {"role": "assistant", "content": self.says(request)}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    def _scores(self, first: str) -> dict[str, int]:
        """Return the scores of a pair: the better one is the probe if the judge approves, else the reference."""
        is_first_better = (first == REFERENCE) != self.approves
        scores = (5, 1, 1) if is_first_better else (1, 5, 6)
        return dict(zip(("score_1", "score_2", "ranking"), scores, strict=True))


def _quoted(text: str) -> str:
    found = re.search(f"{re.escape(BEGIN)}(.*?)({re.escape(END)}|$)", text, re.DOTALL)
    return found[1][:_MAX_QUOTED] if found else ""
