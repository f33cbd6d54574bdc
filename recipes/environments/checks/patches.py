"""Patches out of answers: SEARCH/REPLACE blocks applied to files and written as a git diff, and new test scripts.

A block is a fence, a line `### path`, and two texts between `<<<<<<< SEARCH`, `=======` and `>>>>>>> REPLACE`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

FENCE, THINK_START, THINK_END = "```", "<think>", "</think>"
SOLUTION, SOLUTION_END = "<solution>", "</solution>"
HEAD = re.compile(r"\n### ([^\n]*)\n\s*<<<<<<< SEARCH\n")
DIVIDER = "\n=======\n"
TAIL = re.compile(r"\n>>>>>>> REPLACE\n*```")
SCRIPT = "```python\n"
CONTEXT_LINES = 3


class PatchError(ValueError):
    """An answer that no patch can be made of; the message says why."""


def patch_in(answer: str, files: Mapping[str, str], *, drops_first_part: bool, is_relaxed: bool) -> str:
    """Return the diff that an answer's blocks make of some files, by path; raises `PatchError` for none.

    Only what `<solution>` encloses is read, after the last `</think>`; relaxed, all of it where there is no solution.
    The first part of each path is left out of the diff where it names the repository.
    """
    has_solution = SOLUTION in answer and SOLUTION_END in answer
    if not has_solution and not is_relaxed:
        raise PatchError("no <solution> that ends with </solution>")
    if THINK_START in answer and THINK_END in answer:
        answer = answer.rpartition(THINK_END)[2].strip()
    if has_solution and (SOLUTION in answer or not is_relaxed):
        if SOLUTION not in answer:
            raise PatchError("no <solution> after the last </think>")
        answer = answer.split(SOLUTION, 2)[1].split(SOLUTION_END, 1)[0].strip()
    diffs = []
    for path, edits in edits_in(answer).items():
        before = files.get(path, "")
        diffs.append(diff_of(before, edited(before, edits), path.split("/", 1)[-1] if drops_first_part else path))
    patch = "\n".join(diff for diff in diffs if diff)
    if not patch:
        raise PatchError("no block that changes a file")
    return patch


def edits_in(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of a text by path, as (search, replace); equal ones count once."""
    edits: dict[str, list[tuple[str, str]]] = {}
    for path, search, replace in _blocks(text):
        of_path = edits.setdefault(path, [])
        if (search, replace) not in of_path:
            of_path.append((search, replace))
    return edits


def _blocks(text: str) -> Iterator[tuple[str, str, str]]:
    place = 0
    while head := HEAD.search(text, place):
        place = head.end()
        line_start = text.rfind("\n", 0, head.start()) + 1
        if FENCE not in text[line_start : head.start()]:
            continue
        divider = text.find(DIVIDER, head.end())
        tail = TAIL.search(text, divider + len(DIVIDER)) if divider >= 0 else None
        if tail is None:
            return
        yield head.group(1), text[head.end() : divider], text[divider + len(DIVIDER) : tail.start()]
        place = tail.end()


def edited(content: str, edits: list[tuple[str, str]]) -> str:
    """Return a file after its edits, the last place first; raises `PatchError` for a search that finds nothing.

    A search matches from the start of a line. An empty one matches at the start of the file.
    """
    text, found = f"\n{content}", []
    for search, replace in edits:
        if search == replace:
            raise PatchError("a search block equals its replacement")
        place = text.find(f"\n{search}")
        if place < 0:
            raise PatchError(f"a search block is not in the file: {search[:80]!r}")
        found.append((place, search, replace))
    for place, search, replace in sorted(found, key=lambda edit: edit[0], reverse=True):
        text = f"{text[:place]}\n{replace}{text[place + 1 + len(search) :]}"
    return text[1:]


def diff_of(before: str, after: str, path: str) -> str:
    """Return a git diff of one file, empty when nothing changed.

    A last line without an end is written as one that has it: data sets cut that end off the files that they show.
    """
    lines = difflib.unified_diff(_lines(before), _lines(after), "old", "new", lineterm="", n=CONTEXT_LINES)
    body = "\n".join(lines)
    return f"diff --git a/{path} b/{path}\n{body}\n" if body else ""


def _lines(text: str) -> list[str]:
    """Return the lines of a text. Only "\\n" ends one, as in git: no form feed or line separator does."""
    return text.removesuffix("\n").split("\n") if text else []


def script_in(answer: str) -> tuple[str, str]:
    """Return name and text of the last Python block, named by how many there are; raises `PatchError` for none."""
    blocks, place = [], 0
    while (start := answer.find(SCRIPT, place)) >= 0:
        start += len(SCRIPT)
        end = answer.find("\n```", start)
        if end < 0:
            break
        blocks.append(answer[start:end])
        place = end + len("\n```")
    if not blocks:
        raise PatchError("no block of Python")
    return f"reproduce_bug_{len(blocks)}.py", blocks[-1]
