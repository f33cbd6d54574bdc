"""Calls of test frameworks in a shell command: what `run_tests.py` can run, so that nothing printed is believed.

A command is taken apart where it is made of simple commands joined by `&&`, `;` or newlines, and ends with a call of a
framework: `cd x && A=b python -W ignore -m pytest tests/*.py 2>&1 | tee log`. The shell still expands the words of a
call. A command with a loop, a condition, a subshell, or something after its last call is left whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

WORD = r"""(?:'[^']*'|"(?:[^"\\`$]|\\.|\$(?!\())*"|\\[^\n]|\$\([^()'"`]*\)|&>|>&|[^\s'"\\`|&;()<#]|(?<=\S)\#)+"""
TOKEN = re.compile(
    rf"(?P<space>[ \t\r]+|\\\n|(?<!\S)\#[^\n]*)|(?P<operator>&&|\|\||\||&(?!>)|;(?!;)|\n)|(?P<word>{WORD})"
)
REDIRECTION = re.compile(r"(?:\d*|&)>{1,2}&?(.*)", re.DOTALL)
# A shell's own words, of commands that are not simple; and what only a script of its own has.
NOT_SIMPLE = frozenset(
    (
        *("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "select"),
        *("function", "{", "}", "!", "[[", "exec"),
    )
)
OF_SCRIPT = re.compile(r"\$\{?[0-9@*#]|BASH_SOURCE")
FILTERS = frozenset(("cat", "grep", "head", "sed", "tail", "tee"))
ENDS_ON_FAILURE = re.compile(r"set +(?:-o +errexit|-[a-z]*e)")
ASSIGNMENT = r"""\w+=(?:'[^']*'|"[^"]*"|[^\s'"])* """
WRAPPER = (
    r"(?:command|env|nice|stdbuf|time|timeout|xvfb-run|(?:pdm|pipenv|poetry|uv) run) "
    rf"""(?:{ASSIGNMENT}|(?:-[^\s'"]+|\d\S*|'[^']*'|"[^"]*") )*"""
)
OPTION = r" (?:-[BEORbdqsuv]+|-[WX] ?[^\s-]\S*)"
PYTHON = rf"(?:[\w./-]*/)?python[\d.]*(?:{OPTION})*"
CALL = re.compile(
    rf"(?P<before>(?:{ASSIGNMENT})*(?:{WRAPPER})*)"
    rf"(?:(?P<python>{PYTHON}) -m (?P<module>pytest|unittest)"
    r"|(?P<place>(?:[\w./-]*/)?)(?:pytest|py\.test)"
    rf"|(?:(?P<runs>{PYTHON}) )?(?:\./)?(?P<script>tests/runtests\.py|bin/test))(?P<words>(?: .*)?)",
    re.DOTALL,
)
FRAMEWORK_OF_SCRIPT = {"tests/runtests.py": "django", "bin/test": "sympy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkCall:
    """A call of a test framework. Its texts are for the shell."""

    framework: str  # pytest, unittest, django or sympy
    program: str  # that starts Python, with what stands before it: `A=b timeout 60 .venv/bin/python -W ignore`
    words: str  # after the framework's name; of a script, with the script
    before: str = ""  # commands that come first; the call is made only if they end with status 0
    needs_last: bool = False  # whether the call is made only if the last one ended with status 0


@dataclass(frozen=True, slots=True)
class _Simple:
    words: tuple[str, ...]
    start: int
    end: int
    joined: str  # operator before it; empty for the first


def calls_in(command: str) -> tuple[FrameworkCall, ...]:
    """Return the calls that a command is made of; none for a command that is left whole."""
    commands = _simple_commands(command)
    if not commands or OF_SCRIPT.search(command):
        return ()
    ends_on_failure = any(ENDS_ON_FAILURE.match(" ".join(simple.words)) for simple in commands)
    calls: list[FrameworkCall] = []
    before: list[_Simple] = []  # since the last call
    may_pipe = goes_on = False  # after a call: into a filter; in the list that it stands in
    for simple in commands:
        begins_list = simple.joined in ("", ";", "\n", "&")
        if may_pipe and not before and simple.joined == "|" and simple.words[0] in FILTERS:
            continue
        call = _call_of(simple)
        is_cut = goes_on and begins_list and bool(before)  # commands after a call whose list ends without another
        is_odd = simple.joined in ("||", "|") and call is not None
        is_odd = is_odd or (simple.joined in ("||", "|", "&") and may_pipe and not before)
        if is_cut or is_odd:
            return ()
        goes_on = goes_on and not begins_list
        if call is None:
            before.append(simple)
            continue
        text = _text_before(command, before, simple)
        needs_last = bool(calls) and (goes_on or ends_on_failure)
        calls.append(replace(call, before=text, needs_last=needs_last))
        before, may_pipe, goes_on = [], True, True
    return () if before or command.rstrip().endswith("&") else tuple(calls)


def _text_before(command: str, before: list[_Simple], simple: _Simple) -> str:
    """Return the shell text of commands before a call; its status is that of those which the call is joined to."""
    if not before:
        return ""
    text = command[before[0].start : before[-1].end]
    if simple.joined == "&&":
        return text
    return f"{text}{' &' if simple.joined == '&' else ''}\n:"


def _call_of(simple: _Simple) -> FrameworkCall | None:
    """Return the call that a command is, without what redirects its output; None for another command."""
    words: list[str] = []
    is_target = False
    for word in simple.words:
        redirection = REDIRECTION.fullmatch(word)
        if redirection is None and not is_target:
            words.append(word)
        is_target = redirection is not None and not redirection[1]
    match = CALL.fullmatch(" ".join(words))
    if match is None:
        return None
    before, words_after = match["before"], match["words"].strip()
    if script := match["script"]:
        program, words_after = f"{before}{match['runs'] or 'python'}", f"{script} {words_after}".strip()
        return FrameworkCall(framework=FRAMEWORK_OF_SCRIPT[script], program=program, words=words_after)
    program = before + (match["python"] or f"{match['place']}python")
    return FrameworkCall(framework=match["module"] or "pytest", program=program, words=words_after)


def _simple_commands(command: str) -> list[_Simple]:
    """Return the simple commands of a shell command; none where it is made of others, too."""
    found: list[_Simple] = []
    words: list[str] = []
    start = end = place = 0
    joined = ""
    while place < len(command):
        token = TOKEN.match(command, place)
        if token is None:
            return []
        place = token.end()
        if token["word"]:
            start, end = (start if words else token.start()), token.end()
            words.append(token["word"])
        elif token["operator"] and words:
            found.append(_Simple(tuple(words), start, end, joined))
            words, joined = [], token["operator"]
        elif token["operator"] and token["operator"] != "\n":
            return []  # nothing between two operators
    if words:
        found.append(_Simple(tuple(words), start, end, joined))
    elif joined in ("&&", "||", "|"):
        return []
    return [] if any(simple.words[0] in NOT_SIMPLE for simple in found) else found
