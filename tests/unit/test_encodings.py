"""Text has one encoding, UTF-8, whatever the locale of the machine is.

Ruff's PLW1514 sees the calls whose receiver it knows to be a path; these are the others, and programs that are read.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for place in ("recipes", "tools", "containers") for path in (ROOT / place).rglob("*.py"))
READERS, WRITERS, OPENERS = {"read_text"}, {"write_text"}, {"open", "fdopen"}
TEXT_MODES = {"r", "w", "a", "x", "r+", "w+", "a+", "rt", "wt", "at"}


def by_locale(source: str) -> list[int]:
    """Return the lines of calls that read or write text in the encoding of the locale."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and not names_encoding(node) and is_text(node)
    ]


def names_encoding(call: ast.Call) -> bool:
    return any(keyword.arg in ("encoding", None) for keyword in call.keywords)


def is_text(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    texts = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    is_program = any(
        keyword.arg in ("text", "universal_newlines") and getattr(keyword.value, "value", None) is True
        for keyword in call.keywords
    )
    if name in READERS:  # a name that is given is an encoding, or a file of an installed distribution
        return not call.args
    if name in WRITERS:
        return len(call.args) < 2
    return is_program or (name in OPENERS and bool(texts & TEXT_MODES))


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    wrong = {path.relative_to(ROOT): by_locale(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {str(path): lines for path, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "a.b.read_text()",
        "(a / b).read_text(errors='replace')",
        "a.b.write_text(text)",
        "a.b.open('w')",
        "os.fdopen(1, 'w')",
        "subprocess.run(words, text=True)",
        "subprocess.Popen(words, universal_newlines=True)",
    ],
)
def test_a_call_by_the_locale_is_found(source):
    assert by_locale(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "a.b.read_text('utf-8')",
        "a.b.write_text(text, encoding='utf-8')",
        "a.b.open('wb')",
        "subprocess.run(words, encoding='utf-8')",
        "row(text=text)",
        "router.open(0)",
    ],
)
def test_others_are_not(source):
    assert by_locale(source) == []
