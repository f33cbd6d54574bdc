"""Multiple-choice questions. Reward 1.0 for the expected letter, else 0.0.

Each row, or the whole server, says how the letter is read from the answer (`grading_mode`). A row may bring patterns
of its own (`template_metadata.output_regex`), which are tried first.

Kept from the reference, because rewards depend on it:

* What a pattern finds last is the answer, also a letter that is not offered. So a row with a pattern needs no options.
* The strict mode reads the last box, and there a capital only; where that box is not closed there is no answer.
* `lenient_answer_colon` reads the first line that says "answer:", the markdown mode the last one with a letter. In the
  markdown mode the answer may begin after at most two asterisks, underscores, spaces and ends of lines; `_C_` is then C
  where it leads, and no letter further on.

Decided otherwise: of a pattern with several groups the first one that is not empty counts; the reference fails there. A
row without options and without a pattern, which no answer could solve, is refused. Of a long answer a pattern reads the
last EXPRESSION_CHARACTERS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from recipes.environments.contract import (
    EXPRESSION_CHARACTERS,
    Response,
    Row,
    Verdict,
    Verifier,
    all_text,
    one_of,
    optional_object,
    optional_str,
    wrong,
)

STRICT = "strict_single_letter_boxed"
LENIENT_BOXED = "lenient_boxed"
ANSWER_COLON = "lenient_answer_colon"
ANSWER_COLON_MARKDOWN = "lenient_answer_colon_md"
ROW_MODES = (STRICT, LENIENT_BOXED, ANSWER_COLON)
SERVER_MODES = (*ROW_MODES, ANSWER_COLON_MARKDOWN)

# Letters that stand for A to D in Arabic, Bengali and full-width text; the space makes them stand alone.
FOREIGN = ("\u0623\u0628\u062c\u062f", "\u0985\u09ac\u09a1\u09a2", "\uff21\uff22\uff23\uff24")
FOREIGN_LETTERS = {ord(char): f" {latin}" for letters in FOREIGN for char, latin in zip(letters, "ABCD", strict=True)}
ALONE = r"(?<![A-Za-z0-9])[A-Za-z](?![A-Za-z0-9])"
LIST_SIGNS = frozenset("/|&,;")  # between letters offered as a list; so are the words below, and mere space
LIST_WORDS = frozenset({"or", "and"})
WRAPPER = "\\text{"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A multiple-choice question."""

    grading_mode: (
        Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"] | None
    ) = None
    """how the letter is read; null = as the row says"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question: what is offered, what is right, and how the answer is read."""

    options: tuple[tuple[str, str], ...]  # (letter, text)
    answer: str  # upper-cased; "" when the row has none
    grading_mode: str
    patterns: tuple[str, ...] = ()

    @property
    def letters(self) -> frozenset[str]:
        """The letters that may be answered."""
        return frozenset(letter for letter, _ in self.options)


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `options`, `expected_answer`, `grading_mode` and `template_metadata`; a server mode wins over the row's."""
    patterns = _patterns(optional_object(row, "template_metadata").get("output_regex"))
    mode: str | None = settings.grading_mode
    if mode is None:
        mode = one_of("grading_mode", row.get("grading_mode") or STRICT, ROW_MODES)
    return Task(
        options=() if any(map(_is_readable, patterns)) and row.get("options") is None else _options(row),
        answer=(optional_str(row, "expected_answer") or "").strip().upper(),
        grading_mode=mode,
        patterns=patterns,
    )


def unsolvable(row: Row) -> str | None:
    """Return why no answer to a row that can be read is right, or None. A pattern finds letters that nobody offers."""
    answer = str(row.get("expected_answer") or "").strip().upper()
    patterns = _patterns(optional_object(row, "template_metadata").get("output_regex"))
    if any(map(_is_readable, patterns)):
        is_letter = len(answer) == 1 and answer.isalpha()
        return None if is_letter else f"field 'expected_answer': got {answer!r}, expected one letter"
    letters = sorted(letter for letter, _ in _options(row))
    return None if answer in letters else f"field 'expected_answer': got {answer!r}, not one of {', '.join(letters)}"


def is_cheap(task: Task) -> bool:
    """Return whether the row brings no pattern of its own, which could backtrack for ever."""
    return not task.patterns


def score(response: Response, task: Task) -> Verdict:
    """Compare the letter read from the answer with the expected one."""
    text = all_text(response).strip()
    if not text:
        return _verdict(0.0, "the answer is empty", None)
    letter = next((found for pattern in task.patterns if (found := _by_pattern(text, pattern, task))), None)
    if letter is None:
        letter = READERS[task.grading_mode](text, task)
    if letter is None:
        return _verdict(0.0, f"no letter could be read ({task.grading_mode})", None)
    return _verdict(float(letter == task.answer), f"answered {letter}, expected {task.answer or 'nothing'}", letter)


def _verdict(reward: float, reason: str, letter: str | None) -> Verdict:
    return Verdict(
        reward=reward,
        reason=reason,
        metrics={"no_answer": float(letter is None)},
        details={"extracted_answer": letter},
    )


def _options(row: Row) -> tuple[tuple[str, str], ...]:
    options = row.get("options")
    if not isinstance(options, list) or not all(isinstance(option, Mapping) for option in options):
        raise wrong("options", options, "a list of {letter: text} objects")
    pairs = ((key, text) for option in options for key, text in option.items() if text is not None)
    return tuple((key.upper(), str(text)) for key, text in pairs if len(key) == 1 and key.isalpha())


def _patterns(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(pattern, str) for pattern in values):
        raise wrong("template_metadata.output_regex", value, "a string or a list of strings")
    return tuple(values)


def _is_readable(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _normal(text: str) -> str:
    return " ".join(text.lower().split())


def _without_wrappers(text: str) -> str:
    r"""Remove outer `\text{...}` around the whole text, in one pass however deep they are."""
    text = text.strip()
    start, end = 0, len(text)
    while end - start > len(WRAPPER) and text.startswith(WRAPPER, start) and text[end - 1] == "}":
        start, end = start + len(WRAPPER), end - 1
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
    return text[start:end]


def _last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{` holds; None when there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position]
    return None


def _by_pattern(text: str, pattern: str, task: Task) -> str | None:
    """Return the last match of a row's own pattern, as a letter."""
    try:
        found = re.findall(pattern, text[-EXPRESSION_CHARACTERS:], re.IGNORECASE)
    except (re.error, OverflowError, RecursionError):
        return None
    if not found:
        return None
    last = found[-1] if isinstance(found[-1], str) else next((group for group in found[-1] if group), "")
    answer = last.translate(FOREIGN_LETTERS).strip().upper()
    if len(answer) == 1 and answer.isalpha():
        return answer  # also a letter that was not offered: it is then simply wrong
    return _by_option_text(last, task)


def _by_option_text(text: str, task: Task) -> str | None:
    text = _normal(text)
    return next((letter for letter, option in task.options if text and _normal(option) == text), None)


def _strict(text: str, task: Task) -> str | None:
    boxed = _last_boxed(text)
    if boxed is None:
        return None
    boxed = _without_wrappers(boxed)
    match = re.fullmatch(r"[^A-Za-z]*([A-Z])[^A-Za-z]*", boxed) or re.match(r"([A-Z])\s*[:).-]", boxed)
    return match.group(1) if match and match.group(1) in task.letters else None


def _lenient_boxed(text: str, task: Task) -> str | None:
    if letter := _strict(text, task):
        return letter
    boxed = _normal(_without_wrappers(_last_boxed(text) or ""))
    matching = [letter for letter, option in task.options if _normal(option) and _normal(option) in boxed]
    return matching[0] if len(matching) == 1 else None


def _answer_colon(text: str, task: Task) -> str | None:
    match = re.search(r"answer\s*:\s*(.*)", text, re.IGNORECASE)
    if match is None:
        return None
    answer = _without_wrappers(match.group(1))
    if len(answer) == 1 and answer.upper() in task.letters:
        return answer.upper()
    return _by_option_text(answer, task)


def _answer_colon_markdown(text: str, task: Task) -> str | None:
    lines = re.findall(r"answer[*_]{0,2}\s*:[*_\s]{0,2}([^\n]+)", text, re.IGNORECASE)
    return next((letter for line in reversed(lines) if (letter := _letter_of_line(line, task.letters))), None)


def _letter_of_line(line: str, letters: frozenset[str]) -> str | None:
    """Return the letter a line leads with, else its last capital that stands alone; None when it lists several."""
    line = line.translate(FOREIGN_LETTERS).strip("*_`.,;: \t\r")
    named = [match for match in re.finditer(ALONE, line) if match.group().upper() in letters]
    for left, right in pairwise(named):
        between = line[left.end() : right.start()]
        if left.group().upper() != right.group().upper() and _separates(between):
            return None
    capitals = re.findall(r"\b[A-Z]\b", line)
    leading = re.match(ALONE, line)
    letter = leading.group().upper() if leading else capitals[-1] if capitals else None
    return letter if letter in letters else None


def _separates(between: str) -> bool:
    """Return whether what stands between two letters makes them a list."""
    words = re.findall(r"\w+", between)
    if words:
        return len(words) == 1 and words[0].lower() in LIST_WORDS
    return between.isspace() or not LIST_SIGNS.isdisjoint(between)


READERS = {
    STRICT: _strict,
    LENIENT_BOXED: _lenient_boxed,
    ANSWER_COLON: _answer_colon,
    ANSWER_COLON_MARKDOWN: _answer_colon_markdown,
}


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="MCQAResourcesServer",
    settings=Settings,
    is_cheap=is_cheap,
)
