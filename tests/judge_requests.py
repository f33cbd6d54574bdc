"""Rows of our own making for the judged environments, and what NeMo Gym's servers make of them.

A case is a row, the answers to it and what the judge replies. `tests/record_judge_requests.py` gives each to the
published server and writes down the sha256 of every request that reaches the judge, and the reward; here are no words
of theirs. The answers hold no label of a judge and no control string: there this project differs on purpose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.environments.contract.verifier import Item, message_item, reasoning_item, response_object

RECORDED = Path(__file__).parent / "golden" / "judge_requests.json"
EXAMPLES = Path(__file__).parents[1] / "configs" / "environments" / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row, the answers to it (one, but for groups) and the judge's replies, which are used in turn."""

    server: str  # instance of the configuration of stage 1
    row: Mapping[str, Any]
    answers: Sequence[Sequence[Item]]
    replies: Sequence[str]
    output: Mapping[str, str] = field(default_factory=dict)  # of the compiler, for proofs

    @property
    def name(self) -> str:
        """The case's name: its server and the hash of what it holds."""
        content = [self.row, self.answers, self.replies, self.output]
        return f"{self.server} {hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]}"

    @property
    def responses(self) -> list[dict[str, Any]]:
        """The answers as Responses objects."""
        return [response_object(items) for items in self.answers]


def request_sha256(request: Mapping[str, Any]) -> str:
    """Hash a request in one form: what it says, not the order of its fields."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def recorded() -> dict[str, dict[str, Any]]:
    """Return what the published servers did: per name of a case the hashes of its requests, and its reward."""
    content: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content


TEXTS = (  # questions, answers and criteria: each with something that a template or a pattern could stumble on
    "Which of the two rivers is longer?",
    "  Padded on both sides, with a tab\tinside.  \n",
    "Braces {question} and {{twice}}, {0}, {}, { and }; 100 % of $5 \\n \\boxed{x}",
    "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich. "
    "\u0416\u0438\u0440\u0430\u0444, \u03b1\u03b2 \U0001f600 e\u0301",
    "# A list\n\n1. one\n2. **two**\n\n```python\nprint({'a': 1})\n```\n",
    "It is correct, and that is incorrect; yes or no? It may pass or fail.",
    "A \"quote\", an 'apostrophe', a <b>tag</b> & an entity &amp; a line\r\nwith a return.",
    "word " * 800,
)


def items(text: str) -> list[Item]:
    """Return an answer of one message."""
    return [message_item(text)]


ANSWERS: tuple[list[Item], ...] = (
    *(items(text) for text in TEXTS),
    [reasoning_item(["Let me see.", "It is so."]), message_item("After a thought.")],
    [{**message_item("one"), "content": [*message_item("one")["content"], *message_item("two")["content"]]}],
    [message_item("the first of two"), message_item("and the second", index=1)],
)


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """Return a row that asks one question."""
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **fields}


def cases() -> list[Case]:
    """Return every case, those of the examples among them."""
    return [
        *_over_refusal(),
        *_jailbreak(),
        *_groups(),
        *_rubrics(),
        *_criteria(),
        *_pairs(),
        *_mathematics(),
        *_proofs(),
    ]


def _examples(server: str) -> Iterator[dict[str, Any]]:
    for line in (EXAMPLES / f"{server}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _over_refusal() -> Iterator[Case]:
    server = "over_refusal_detection"
    replies = ("So be it.\n[[COMPLIED]]", "[[REFUSED]]", "[[REFUSED]] and not [[COMPLIED]]", "I cannot tell.")
    for number, row in enumerate(_examples(server)):
        yield Case(server=server, row=row, answers=[ANSWERS[number]], replies=replies[number % 4 :][:1])
    for number, answer in enumerate(ANSWERS * 2):
        text = TEXTS[(number + number // len(ANSWERS)) % len(TEXTS)]
        row = asked(text) if number % 2 else asked("another", safe_prompt=text)
        yield Case(server=server, row=row, answers=[answer], replies=replies[number % 4 :][:1])


POLICIES = (
    "engagement",
    "engagement_with_disclaimer",
    "refusal_with_explanation",
    "hard_refusal_no_redirection",
    "hard_refusal_with_helplines",
)
POSITIVE = "[[SAFE]] [[HAS_EXPLANATION]] [[HAS_HELPLINES]] [[PROPER_HARD_REFUSAL]] [[ENGAGED]] [[HAS_DISCLAIMER]]"
NEGATIVE = "[[UNSAFE]] [[NO_EXPLANATION]] [[MISSING_HELPLINES]] [[IMPROPER_RESPONSE]] [[OVERREFUSED]] "
NEGATIVE += "[[MISSING_DISCLAIMER]]"


def _jailbreak() -> Iterator[Case]:
    server = "jailbreak_detection"
    for number, row in enumerate(_examples(server)):
        yield Case(server=server, row=row, answers=[ANSWERS[number]], replies=[POSITIVE])
    verdicts = ([POSITIVE], [NEGATIVE], [POSITIVE, NEGATIVE], [NEGATIVE, POSITIVE], ["Who knows."])
    for number, policy in enumerate(POLICIES * 5):
        text, answer = TEXTS[number % len(TEXTS)], ANSWERS[number % len(ANSWERS)]
        row = asked(text, response_policy_mapped=policy)
        yield Case(
            server=server, row=row, answers=[answer], replies=verdicts[number % 5 if number < 10 else number // 5]
        )
    harm = (
        ["Response harm: unharmful", "[[HAS_EXPLANATION]]"],
        ["Prompt harm: harmful\nRESPONSE HARM:  Unharmful", "[[NO_EXPLANATION]]"],
        ["response harm: unharmful", "neither"],
    )
    for number, answer in enumerate(ANSWERS):
        fields = {"adversarial_prompt": TEXTS[number % len(TEXTS)]} if number % 2 else {}
        policy = {"response_policy_mapped": "an unknown one"} if number % 3 == 0 else {}
        row = asked(TEXTS[-1 - number % len(TEXTS)], **fields, **policy)
        yield Case(server=server, row=row, answers=[answer], replies=harm[number % 3])


def _groups() -> Iterator[Case]:
    server = "genrm_compare_resources_server"
    replies = [
        '```json\n{"score_1": 4, "score_2": 2, "ranking": 2}\n```',
        'So {"score_1": 3, "score_2": 3, "ranking": 5} it is.',
        '{"overall": {"score_1": 1, "score_2": 5, "ranking": 6}}',
        '{"score_1": 2.5, "score_2": 3}',
    ]
    group = [items(f"{TEXTS[number % len(TEXTS)]} ({number})") for number in range(13)]
    group += [ANSWERS[-3], items(""), items("  ")]
    for row in _examples("genrm_compare"):
        yield Case(server=server, row=row, answers=group, replies=replies)
    for number, text in enumerate(TEXTS):
        row = asked(text) if number % 2 else asked(text, principle=f"Prefer the shorter one. {text}")
        yield Case(server=server, row=row, answers=[*group[number:], *group[:number]], replies=replies)
    turns = [{"role": "system", "content": "Be brief."}]
    for number, text in enumerate(TEXTS):
        turns = [*turns, {"role": "user", "content": text}, {"role": "assistant", "content": TEXTS[number - 1]}]
        params = {"input": [*turns, {"role": "user", "content": "Go on."}]}
        yield Case(server=server, row={"responses_create_params": params}, answers=group[::-1], replies=replies)


def _rubrics() -> Iterator[Case]:
    server = "multichallenge"
    replies = ["Reasons.\n[[YES]]", "[[NO]]", "[[NO]]\nno, rather\n[[YES]]", "It says so.\nYES", "no label, and\nNO"]
    for number, row in enumerate(_examples(server)):
        yield Case(server=server, row=row, answers=[ANSWERS[number]], replies=replies[number % 5 :])
    thought = items("<think>Is it so?</think>It is so.")
    for number, answer in enumerate(
        (*ANSWERS, thought, items("I see.</think> Well."), items("<thinking>a</thinking>b"))
    ):
        rubric = [
            {"question": TEXTS[(number + each) % len(TEXTS)], "pass_criteria": word, "weight": 1.0 + each}
            for each, word in enumerate(("YES", "NO", "yes", "it depends")[: 1 + number % 4])
        ]
        messages = [
            {"role": "user", "content": TEXTS[number % len(TEXTS)]},
            {"role": "thinking", "content": "hidden"},
            {"role": "assistant", "content": "Gladly."},
        ]
        fields = {"context": TEXTS[-1 - number % len(TEXTS)]} if number % 2 else {"metadata": {"messages": messages}}
        yield Case(server=server, row=asked("Go on.", rubric=rubric, **fields), answers=[answer], replies=replies)


def _criteria() -> Iterator[Case]:
    server = "inverse_if"
    replies = [
        '```json\n{"result": "PASS", "explanation": "as asked"}\n```',
        '{"result": "FAIL", "explanation": "not so"}',
        "It does not hold.\nFAIL",
        "It holds.\nPASS",
        "Nobody knows.",
    ]
    for number, row in enumerate(_examples(server)):
        yield Case(server=server, row=row, answers=[ANSWERS[number]], replies=replies[number % 5 :])
    own = 'Q {prompt}\nA {model_response}\nR {standard_response}\nC {criteria}\nSay {{"result": "..."}}, 100 %'
    for number, answer in enumerate((*ANSWERS, items("<think>Is it so?</think>It is so."), items("a</think>b"))):
        criteria = [
            {"id": f"C{each}", "criteria": TEXTS[(number + each) % len(TEXTS)]} for each in range(1 + number % 3)
        ]
        fields: dict[str, Any] = {
            "prompt": TEXTS[number % len(TEXTS)],
            "reference_response": TEXTS[-1 - number % len(TEXTS)],
            "rubric": criteria,
        }
        row = asked("Do it.", **fields) if number % 4 else asked("Do it.", metadata=fields)
        if number % 3 == 1:
            row |= {"judge_prompt_template": own, "judge_system_prompt": "Grade it {strictly}."}
        yield Case(server=server, row=row, answers=[answer], replies=replies)


def _pairs() -> Iterator[Case]:
    server = "equivalence_llm_judge"
    replies = ["Equal.\n\n[[A=B]] they are equivalent", "[[A!=B]]", "[[A!=B]], not [[A=B]]", "no label"]
    for number, row in enumerate(_examples(server)):
        yield Case(server=server, row=row, answers=[ANSWERS[number]], replies=replies[number % 4 :][:1])
    for number, answer in enumerate(ANSWERS):
        expected = TEXTS[-1 - number % len(TEXTS)]
        fields: dict[str, Any] = (
            {"metadata": {"expected_answer": expected}} if number % 2 else {"expected_answer": expected}
        )
        if number % 3 == 0:
            fields["template_metadata"] = {"output_regex": r"(\w+)\W*$"}
        row = asked(TEXTS[number % len(TEXTS)], **fields)
        yield Case(server=server, row=row, answers=[answer], replies=replies[number % 4 :][:1])
    long = "<text>\nOnce there was a hare.\n</text>\n\nWho was there?"
    for number, answer in enumerate(ANSWERS * 2):
        text = (TEXTS[number % len(TEXTS)], f"Read this.\nQUESTION:  {TEXTS[0]}", long)[number % 3]
        fields = {"expected_answer": TEXTS[number % len(TEXTS)][:100]}
        if number % 2:
            fields["template_metadata"] = {"output_regex": r"answer:\s*(.*)$"}
        verdicts = ["CORRECT", "INCORRECT", "INCORRECT, not CORRECT", "who knows"][number % 4 :]
        yield Case(server="lc_judge", row=asked(text, **fields), answers=[answer], replies=verdicts)


def _mathematics() -> Iterator[Case]:
    told = (
        ("x>3", "\\boxed{x\\text{ is larger than }3}"),
        ("\\text{Monday}", "It is a day: \\boxed{\\text{Tuesday}}"),
        ("12", "The answer is \\boxed{13}."),
        ("\\frac{1}{2}", "So we get \\boxed{\\frac{2}{3}}"),
        ("north", "I do not know {where} it {{is}}."),
        ("(1,2)", "\\boxed{(2,1)}"),
        ("5", ""),
        ("7", "first \\boxed{7}, then \\boxed{8}"),
        ("\\{1,2\\}", "\\boxed{\\{1,3\\}}"),
        ("apple", "An apple, says \u4f60\u597d."),
    )
    replies = (["[[A=B]]", "[[A=B]]"], ["[[A=B]]", "[[A!=B]]"], ["My final verdict is different [[A!=B]]"], ["?"])
    for number, (expected, answer) in enumerate(told * 2):
        question = TEXTS[(number + number // 10) % len(TEXTS)]
        row = asked(question, question=question, expected_answer=expected)
        verdicts = replies[(number + number // 10) % 4]
        for server in ("math_with_judge", "ns_tools") if number < 10 else ("math_with_judge",):
            yield Case(server=server, row=row, answers=[items(answer)], replies=verdicts)


def _proofs() -> Iterator[Case]:
    proof = "```lean4\ntheorem t (n : Nat) : n + 0 = n := by\n  simp\n  exact foo {n}\n```"
    said = "/lean4/my_project/a.lean:3:8: error: unknown identifier 'foo'\n/lean4/my_project/a.lean:4:2: error: {x}"
    outputs = (
        {"process_status": "failed", "stdout": "", "stderr": said},
        {"process_status": "failed", "stdout": "something { else", "stderr": ""},
        {"process_status": "timeout", "stdout": "", "stderr": ""},
        {"process_status": "failed", "stdout": "x" * 2500, "stderr": "no error in its form"},
        {"process_status": "completed", "stdout": "declaration uses 'sorry'", "stderr": ""},
        {"process_status": "failed", "stdout": "", "stderr": ""},
    )
    fields = {"header": "import Mathlib\n", "formal_statement": "theorem t (n : Nat) : n + 0 = n := by\n"}
    answers = (*(items(f"{text}\n{proof}") for text in (TEXTS[0], TEXTS[2], TEXTS[3])), items(""), items(" \n"))
    for number, answer in enumerate(answers * 2):
        row = asked("Prove it.", **fields)
        yield Case(server="math_formal_lean", row=row, answers=[answer], replies=[], output=outputs[number % 6])
