"""A message says what was expected as a value, or what is missing or impossible, and always what to do about it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in ("recipes", "tools") for path in (ROOT / package).rglob("*.py"))
# Texts that name no value which could stand in place of the wrong one.
SAYS_NOTHING = re.compile(
    r"(?:it|its|that|this|those|ones?|any|some|all|another|anything|something)"
    r"(?:[,:;(].*| (?:of (?:it|them|these|those)|for (?:it|every|each)|here|there|that)\b.*)?"
    r"|(?:no|none|nothing|not)\b.*",
    re.IGNORECASE,
)

# The verbs of instructions; `did` of "did you mean", and `meaning` of a key whose accepted values stand before it.
VERBS = re.compile(
    r"""accept|add|ask|build|change|check|choose|compare|copy|correct|create|declare|decompress|delete|did|end|export|fetch
    |fill|finish|free|git|give|import|install|launch|leave|let|list|load|lower|make|meaning|move|name|pip|print|profile|put|quote
    |raise|record|remove|rename|repair|report|restore|resume|run|say|scancel|see|set|start|submit|sysctl|take|train|try
    |undo|unset|use|wait|write""",
    re.VERBOSE | re.IGNORECASE,
)
GOT_NOTHING = re.compile(r"(no|none|nothing|not)\b", re.IGNORECASE)


def text_of(node: ast.expr) -> str:
    """Return a literal text, an f-string with {} for each value; empty for what only runs know."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def branches(node: ast.expr) -> Iterator[str]:
    """Return the texts of both sides of `X if ... else Y`, or the one text."""
    if isinstance(node, ast.IfExp):
        yield from branches(node.body)
        yield from branches(node.orelse)
    else:
        yield text_of(node)


def assigned(function: ast.AST, name: str) -> Iterator[str]:
    """Return the texts that a function gives to a variable."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield from branches(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for place, value in zip(target.elts, node.value.elts, strict=True):
                    if isinstance(place, ast.Name) and place.id == name:
                        yield from branches(value)


def tells_what_to_do(text: str) -> bool:
    """Return whether one part of a text, between commas, colons and semicolons, begins with a verb; {} may hold one."""
    parts = [part.strip() for part in re.split(r"[;:,]| or | and ", text)]
    words = (re.match(r"\W*(\w+)", part) for part in parts)
    return "{}" in parts or any(word is not None and VERBS.fullmatch(word[1]) for word in words)


@functools.cache
def arguments(path: Path) -> list[tuple[ast.AST, int, ast.keyword]]:
    """Return the arguments of all calls in functions that have the name of a part of a message."""
    return [
        (function, call.lineno, keyword)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in ("got", "expected", "fix")
    ]


def given(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of everything that calls get as this part of a message."""
    for function, line, keyword in arguments(path):
        if keyword.arg == name:
            value = keyword.value
            texts = assigned(function, value.id) if isinstance(value, ast.Name) else branches(value)
            yield from ((line, text) for text in texts if text)


@pytest.mark.parametrize(
    ("text", "says_nothing"),
    [
        ("it", True),
        ("one", True),
        ("one of them", True),
        ("none", True),
        ("nothing", True),
        ("nothing for {} stages", True),
        ("one for every row", True),
        ("no such thing", True),
        ("no secret", True),
        ("all of them", True),
        ("one of {}", False),
        ("one mount for each place", False),
        ("at least {}", False),
        ("a whole number", False),
        ("some, since {} is on", True),
        ("{}", False),
        ("none of {}", True),
        ("nothing new", True),
    ],
)
def test_a_text_that_says_nothing_is_seen(text, says_nothing):
    assert bool(SAYS_NOTHING.fullmatch(text)) == says_nothing


def everywhere(name: str) -> list[tuple[str, str]]:
    """Return place and text of everything that calls in any file get as this part of a message."""
    return [(f"{path.relative_to(ROOT)}:{line}", text) for path in FILES for line, text in given(path, name)]


def test_what_is_expected_is_a_value():
    texts = [(place, text) for place, text in everywhere("expected") if SAYS_NOTHING.fullmatch(text)]
    # `got no file` is no value either.
    texts += [(place, text) for place, text in everywhere("got") if GOT_NOTHING.match(text)]
    assert not texts, "use Problem(where=..., wrong=..., fix=...)"


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("delete this key", True),
        ("the job would end before it saves; lower it", True),
        ("did you mean {}?", True),
        ("vLLM's EP is DP * TP", False),
        ("e.g. 4:00:00", False),
        ("`sinfo` lists them", False),
    ],
)
def test_a_text_that_tells_nothing_to_do_is_seen(text, does):
    assert tells_what_to_do(text) == does


def test_every_fix_tells_what_to_do():
    fixes = everywhere("fix")
    assert len(fixes) > 300
    assert not [(place, text) for place, text in fixes if text.strip("{}") and not tells_what_to_do(text)]


TEXTS = [
    path
    for place in ("recipes", "tools", "configs", "containers", "Makefile", "README.md", "super_launch.sh")
    for path in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")))
    if path.suffix in (".py", ".yaml", ".md", ".sh", ".toml", "") and path.is_file()
]
TO_COME = re.compile(r"not built|(?:no|without) effect|later release|not yet built|still to be built|to be implemented")
# What is said to be missing or idle, with what shows that it is so. A text that is not here was refuted by the code
# before: look whether it is true, then add it.
TRUE_TODAY = {
    "engines with pipeline parallelism are not built yet": "recipes/config/tree/generation.py refuses other values",
    "float16 training is not built": "recipes/config/tree/training.py refuses other values",
    "retries are not built yet": "an example of how a key is declared",
    "without effect where none run then": "recipes/config/tree/grpo.py: requests are drained before a push",
    "# of fields that have no effect": "recipes/environments/agents/by_url/messages.py counts them",
    "sampling fields of a request have no effect": "the same",
    "no effect; NaN is a number": "verifiers/structured_outputs.py: JSON Schema's formats",
    "a field of the profile has no effect here": "tools/draft/profiles.py: fields of another launcher",
    "fields that have no effect here": "the same",
    "{show(value)} has no effect": "the same",
    "WITHOUT_EFFECT": "the same",
    "images are not built by a launch": "the same",
    '"not built yet", "", ""': "tools/dev/stage_table.py: a stage without a file",
    "has no effect while validation is off": "configs/stage1_rlvr.yaml: val_period is -1",
    'f"no effect: {entry': "tools/dev/docs.py: prints that mark",
    "[native: no effect]": "keys with the mark NoEffect, which nothing reads",
}


def test_nothing_is_said_to_be_missing_that_is_not_looked_at() -> None:
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in TEXTS
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if TO_COME.search(line)
    ]
    assert len(lines) > 10
    assert not [line for line in lines if not any(text in line for text in TRUE_TODAY)]


NOT_ON_PATH = re.compile(r"(?<![\w./-])(?:python3?|pip|hf) (?:-m |install |download )")
IN_CONTAINERS = ("hidden_tests.py", "repositories.py")  # commands of a task's image, which has a python


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string but docstrings and the names of programs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "prog"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def test_no_message_gives_a_command_that_a_plain_shell_does_not_find():
    """The virtual environment is not on PATH: a message says a target of make, or `.venv/bin/...`."""
    places = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if path.name not in IN_CONTAINERS
        for line, text in said(path)
        if NOT_ON_PATH.search(text)
    ]
    assert not places, "\n".join(places)


@pytest.mark.parametrize("text", ["python -m tools.x", "fetch it: hf download x", "run `pip install x`"])
def test_a_command_that_is_not_on_the_path_is_seen(text):
    assert NOT_ON_PATH.search(text)
    assert not NOT_ON_PATH.search(
        text.replace("python", ".venv/bin/python").replace("hf", ".venv/bin/hf").replace("pip", "x")
    )
