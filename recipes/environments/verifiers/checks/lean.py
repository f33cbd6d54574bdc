"""Proofs in Lean 4: a proof out of an answer, the file to compile, and what the compiler's answer means.

Only the proof is taken from an answer. The statement comes from the row, so that it cannot be altered; whatever else
the answer has before its theorem is lost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FENCE = "```"
TAGS = ("lean4", "lean3", "lean", "")  # of a fenced block, the one that is looked for first in front
HEAD = re.compile(r"\s*(theorem|example)\b")
SORRY = re.compile(r"\bsorry\b")
# The project in the image of NeMo-Skills; its compiler names a file in it at the start of each message.
PROJECT = "/lean4/my_project"
MESSAGE = re.compile(r":(\d+):(\d+): error:(.*)", re.DOTALL)
COMPLETED, HAS_SORRY, TIMEOUT = "completed", "has_sorry", "timeout"
MAX_ERRORS = 8
LINES_BEFORE, LINES_AFTER = 4, 1  # of context around an error
MAX_RAW_CHARACTERS = 2000
SHOWN_CHARACTERS = 1000  # of each of the compiler's streams
CUT = "<output cut>"
NAMED = re.compile(r"\b(?:theorem|lemma)\s+([^\s:({\[⦃]+)")
USED = re.compile(r"depends on axioms: \[([^\]]*)\]")
UNUSED = "does not depend on any axioms"
AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})  # those of Lean's own library
# What runs code with input and output while a file is compiled. Such code can print anything, and end the compiler.
RUNS_CODE = re.compile(
    r"(?<![\w.'])(?:run_tac|run_cmd|run_elab|run_meta|by_elab|#eval|elab|elab_rules|macro|macro_rules|simproc|dsimproc"
    r"|simproc_decl|initialize|builtin_initialize|unsafe|implemented_by|extern|delab|app_delab|term_elab|command_elab"
    r"|println!|include_str)(?![\w'])|\b(?:IO|Lean|Elab|Meta|System)\.\w"
)
OPENS = frozenset({"open", "namespace", "export"})
CODE_SPACES = frozenset({"IO", "Lean", "Elab", "Meta", "System"})
END_OF_LINE = re.compile(r"\r\n|\r|\n")  # no form feed or line separator ends one: it may stand in a comment
WORD = re.compile(r"[\w.']+")
REST_OF_LINE = re.compile(r"--[^\n]*")
# Where none of these stands, two dashes begin a comment: no text, name in quotes or block can hold them. A notation of
# the proof's own, of which they may be a part, is written in quotes.
MAY_HOLD_DASHES = ('"', "«", "/-", "-/")
CHECKS_OFF = ("warn.sorry", "skipKernelTC")  # options with which a proof could hide a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerError:
    """One message; the line counts from 1, the column from 0."""

    line: int
    column: int
    text: str


def whole_proof(answer: str, header: str, statement: str) -> str:
    """Return the file to compile: header and statement of the row, then the proof of the answer."""
    return f"{header}{statement}{proof_part(code_in(answer))}"


def code_in(answer: str) -> str:
    """Return the last fenced block, of the first tag that has one; else the answer without fences at its ends."""
    for tag in TAGS:
        blocks = list(_blocks(answer, FENCE + tag))
        if blocks and blocks[-1]:
            return blocks[-1]
        if blocks:
            break
    text = answer.strip()
    if text.startswith(FENCE):
        text = text.removeprefix(FENCE)
        tag = next(tag for tag in TAGS if text.startswith(tag))
        text = text.removeprefix(tag).lstrip()
    return text.removesuffix(FENCE).strip()


def _blocks(text: str, opening: str) -> Iterator[str]:
    """Yield what stands between an opening and the next fence, again and again."""
    place = 0
    while (start := text.find(opening, place)) >= 0:
        start += len(opening)
        end = text.find(FENCE, start)
        if end < 0:
            return
        yield text[start:end].strip()
        place = end + len(FENCE)


def proof_part(code: str) -> str:
    """Return what follows `:=` of the first theorem or example, without a `by` in front; all of it without one."""
    lines = END_OF_LINE.split(code.strip())
    head = next((number for number, line in enumerate(lines) if HEAD.match(line)), None)
    if head is None:
        return code.strip()
    start = next((number for number in range(head, len(lines)) if ":=" in lines[number]), None)
    if start is None:
        return code.strip()
    after = lines[start].split(":=", 1)[1].strip()
    proof = ([after] if after else []) + lines[start + 1 :]
    if proof:
        first = proof[0].lstrip()
        if first == "by":
            proof = proof[1:]
        elif first.startswith("by "):
            proof[0] = first.removeprefix("by ")
    return "\n".join(proof).rstrip()


def status_of(reply: Mapping[str, Any]) -> str:
    """Return how a compilation ended: the sandbox's status, or `has_sorry` where the compiler accepted a gap."""
    status = str(reply.get("process_status", "unknown"))
    said = f"{reply.get('stdout') or ''}\n{reply.get('stderr') or ''}".lower()
    return HAS_SORRY if status == COMPLETED and SORRY.search(said) else status


def is_whole(reply: Mapping[str, Any]) -> bool:
    """Return whether a sandbox kept all that a compiler wrote: what was cut off may be the warning of a gap."""
    return not any(str(reply.get(name) or "").endswith(CUT) for name in ("stdout", "stderr"))


def check_turned_off(code: str) -> str | None:
    """Return the option by which a file turns a check of the compiler off, None when it has none of them."""
    plain = code.replace("«", "").replace("»", "")
    return next((option for option in CHECKS_OFF if option in plain), None)


def code_run(proof: str) -> str | None:
    """Return the word by which a proof would run code while it is compiled, None when it has none of them.

    The words of a comment are not looked at, where it is certain that it is one.
    """
    if not any(sign in proof for sign in MAY_HOLD_DASHES):
        proof = REST_OF_LINE.sub("", proof)
    plain = proof.replace("«", "").replace("»", "")
    if found := RUNS_CODE.search(plain):
        return found[0]
    words: list[str] = WORD.findall(plain)
    is_opened = False
    for word in words:
        is_opened = is_opened or word in OPENS
        if is_opened and CODE_SPACES & set(word.split(".")):
            return word
    return None


def with_end(code: str, given: str) -> str:
    """Return a file that reports, after its proof, which axioms the theorem uses, between two words of its own.

    `given` is what the row has of the file: its last theorem is the one to be proven. The words follow from the file,
    so an answer cannot know them. Code that runs in the compiler could read them.
    """
    first, last = _end_words(code)
    names = NAMED.findall(given)
    root = "" if "namespace" in given else "_root_."  # a theorem alike in a namespace of the proof is not meant
    lines = [f'#print "{first}"', *(f"#print axioms {root}{name}" for name in names[-1:]), f'#print "{last}"']
    return "\n\n".join([code, *lines]) + "\n"


def end_fault(reply: Mapping[str, Any], code: str, given: str) -> str | None:
    """Return what is wrong with the report at a file's end, None when it is there and names no axiom beyond Lean's."""
    first, last = _end_words(code)
    _, begins, rest = str(reply.get("stdout") or "").rpartition(first)
    report, ends, _ = rest.partition(last)
    if not begins or not ends:
        return "The compiler did not come to the end of the file."
    if NAMED.search(given) is None or UNUSED in report:
        return None
    used = USED.search(report)
    if used is None:
        return "The compiler did not say which axioms the theorem uses."
    others = sorted({axiom.strip() for axiom in used[1].split(",")} - AXIOMS - {""})
    return f"The proof must not use the axioms {', '.join(others)}." if others else None


def _end_words(code: str) -> tuple[str, str]:
    words = hashlib.blake2b(code.encode(errors="replace")).hexdigest()
    return words[:32], words[32:64]


def shown(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a compiler's answer with as much of each stream as the model is shown."""
    texts = {name: str(reply.get(name) or "") for name in ("stdout", "stderr")}
    long = {name: text[:SHOWN_CHARACTERS] + CUT for name, text in texts.items() if len(text) > SHOWN_CHARACTERS}
    return {**reply, **texts, **long}


def errors_in(said: str) -> list[CompilerError]:
    """Return the errors that a compiler wrote; its other messages are left out."""
    errors = []
    for message in said.split(f"{PROJECT}/")[1:]:
        found = MESSAGE.search(message)
        if found:
            line, column, text = found.groups()
            errors.append(CompilerError(line=int(line[:9]), column=int(column[:9]), text=text.strip()))
    return errors


def feedback(reply: Mapping[str, Any], code: str) -> str:
    """Return what the model is told of a compilation that failed; "" where the compiler said nothing."""
    if reply.get("process_status") == TIMEOUT:
        return "The compilation timed out. Please simplify your proof or use more efficient tactics."
    stdout, stderr = str(reply.get("stdout") or ""), str(reply.get("stderr") or "")
    if errors := errors_in(stderr):
        return _explained(errors, code.split("\n"))
    said = f"{stdout}\n{stderr}"
    if not said.strip():
        return ""
    cut = "\n... [Truncated]" if len(said) > MAX_RAW_CHARACTERS else ""
    return f"Compilation output:\n{said[:MAX_RAW_CHARACTERS]}{cut}"


def _explained(errors: Sequence[CompilerError], lines: Sequence[str]) -> str:
    """Return each error with the lines around it, the part from its column to the end of its line marked."""
    parts = []
    for number, error in enumerate(errors[:MAX_ERRORS], start=1):
        index = error.line - 1
        if not 0 <= index < len(lines):
            continue
        line = lines[index]
        marked = f"{line[: error.column]}<error>{line[error.column :]}</error>"
        around = [*lines[max(0, index - LINES_BEFORE) : index], marked, *lines[index + 1 : index + 1 + LINES_AFTER]]
        shown = "".join(f"{each}\n" for each in around)
        parts.append(f"\nError {number}:\n\nCorresponding Code:\n```lean4\n{shown}\n```\n")
        parts.append(f"\nError Message: {error.text}\n")
    if len(errors) > MAX_ERRORS:
        parts.append(f"\n... [Omitted {len(errors) - MAX_ERRORS} more errors] ...\n")
    return "".join(parts)
