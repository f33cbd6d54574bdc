"""Harnesses: how a coding agent's tools look to the model, each one a file in `harnesses/`.

A harness names its tools and their arguments, and says which primitive of ours each one is and what every argument
means to it. Prompts and the forms of answers stand in the same file. So adding a harness needs no code:
`harnesses/README.md` says what a file holds, `SCHEMA` and `_problems` check it.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from recipes.errors import ConfigError, Problem, suggestion

HARNESSES = Path(__file__).resolve().parents[1] / "harnesses"

# primitive -> meanings that its arguments must have, and may have
PRIMITIVES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "shell": (frozenset({"command"}), frozenset({"seconds", "directory"})),
    "view": (frozenset({"path"}), frozenset({"range", "first", "count"})),
    "create": (frozenset({"path", "text"}), frozenset()),  # refuses a file that is there
    "write": (frozenset({"path", "text"}), frozenset()),  # replaces a file that is there
    "replace": (frozenset({"path", "old", "new"}), frozenset({"everywhere"})),
    "insert": (frozenset({"path", "line", "new"}), frozenset()),
    "undo": (frozenset({"path"}), frozenset()),
    "note": (frozenset(), frozenset()),  # does nothing
    "finish": (frozenset(), frozenset()),
    "program": (frozenset(), frozenset()),  # the shell command `runs`, with the tool's arguments in quotes
}
KINDS: Mapping[str, str] = {  # meaning -> type of its argument
    "command": "string or array",
    "seconds": "number or integer",
    "directory": "string",
    "path": "string",
    "range": "array",
    "first": "integer",
    "count": "integer",
    "line": "integer",
    "text": "string",
    "old": "string",
    "new": "string",
    "everywhere": "boolean",
}
# form of an answer -> fields that it may show
FORMS: Mapping[str, frozenset[str]] = {
    "shell": frozenset({"output", "status"}),
    "late": frozenset({"output", "seconds"}),  # a command that was interrupted
    "line": frozenset({"number", "text"}),  # of a file that is shown
    "view": frozenset({"path", "text"}),
    "edited": frozenset({"path", "text"}),  # text: the lines around the change
    "written": frozenset({"path"}),
    "noted": frozenset(),
    "error": frozenset({"error"}),
}
_TEXT = {"type": "string", "minLength": 1}
_PARAMETER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type", "description"],
    "properties": {
        "type": {"enum": ["string", "integer", "number", "boolean", "array"]},
        "description": _TEXT,
        "is": _TEXT,
        "optional": {"type": "boolean"},
        "scale": {"type": "number", "exclusiveMinimum": 0},
    },
}
_TOOL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "description", "does", "parameters"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z][a-zA-Z0-9_]*$"},
        "other_names": {"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z][a-zA-Z0-9_]*$"}},
        "description": _TEXT,
        "does": {
            "anyOf": [
                {"enum": sorted(PRIMITIVES)},
                {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 1,
                    "additionalProperties": {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": {"enum": sorted(PRIMITIVES)},
                    },
                },
            ]
        },
        "runs": _TEXT,
        "parameters": {"type": "object", "additionalProperties": _PARAMETER},
    },
}
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["agent_class", "system", "task", "without_call", "max_characters", "answers", "tools"],
    "properties": {
        "agent_class": _TEXT,
        "system": _TEXT,
        "task": _TEXT,
        "without_call": {"type": ["string", "null"]},
        "max_characters": {"type": "integer", "minimum": 100, "maximum": 200_000},
        "answers": {
            "type": "object",
            "additionalProperties": False,
            "required": sorted(FORMS),
            "properties": {form: {"type": "string"} for form in FORMS},
        },
        "tools": {"type": "array", "minItems": 1, "items": _TOOL},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a tool."""

    name: str
    kind: str  # its JSON type
    description: str
    means: str  # to the primitive; "" for an argument that is not read
    is_optional: bool
    scale: float  # factor on a number: 0.001 for milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTool:
    """One tool that the model is offered."""

    name: str
    other_names: tuple[str, ...]
    description: str
    chooser: str | None  # the argument that chooses the primitive; None: there is one primitive, under ""
    primitives: Mapping[str, str]  # value of the chooser -> primitive
    runs: str  # of `program`
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One way in which a coding agent's tools and prompts look."""

    name: str
    agent_class: str  # NeMo Gym's name of it
    system: str
    task: str  # with {workspace} and {problem}
    without_call: str | None  # what a turn without a call is answered; None: such a turn ends the work
    max_characters: int  # of one answer
    answers: Mapping[str, str]
    tools: tuple[HarnessTool, ...]


@cache
def harnesses() -> Mapping[str, Harness]:
    """Return all harnesses by name; raises `ConfigError` with every problem of their files."""
    problems: list[Problem] = []
    found = {}
    for path in sorted(HARNESSES.glob("*.yaml")):
        try:
            found[path.stem] = load_harness(path)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def load_harness(path: Path) -> Harness:
    """Return the harness of a file; raises `ConfigError` with everything that is wrong with it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        wrong = f"this file cannot be read ({' '.join(str(error).split())})"
        raise ConfigError(Problem(where=str(path), wrong=wrong, fix="write a YAML file in UTF-8")) from error
    if problems := [*_schema_problems(path, document)] or [*_problems(path, document)]:
        raise ConfigError(problems)
    return Harness(
        name=path.stem,
        **{key: document[key] for key in ("agent_class", "system", "task", "without_call", "max_characters")},
        answers=document["answers"],
        tools=tuple(_tool(tool) for tool in document["tools"]),
    )


def _tool(tool: Mapping[str, Any]) -> HarnessTool:
    chooser, primitives = _choice(tool)
    return HarnessTool(
        name=tool["name"],
        other_names=tuple(tool.get("other_names", ())),
        description=tool["description"],
        chooser=chooser,
        primitives=primitives,
        runs=tool.get("runs", ""),
        parameters=tuple(
            Parameter(
                name=name,
                kind=node["type"],
                description=node["description"],
                means=node.get("is", ""),
                is_optional=node.get("optional", False),
                scale=float(node.get("scale", 1)),
            )
            for name, node in tool["parameters"].items()
        ),
    )


def _choice(tool: Mapping[str, Any]) -> tuple[str | None, Mapping[str, str]]:
    does = tool["does"]
    return (None, {"": does}) if isinstance(does, str) else next(iter(does.items()))


def _schema_problems(path: Path, document: object) -> Iterator[Problem]:
    from jsonschema import Draft202012Validator

    for error in sorted(Draft202012Validator(SCHEMA).iter_errors(document), key=lambda error: error.json_path):
        wrong = error.message if len(error.message) < 300 else error.message[:300] + " ..."
        fix = "correct the file; harnesses/README.md says what it holds"
        yield Problem(where=f"{path}: {error.json_path}", wrong=wrong, fix=fix)


def _problems(path: Path, document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what a schema cannot see: fields of texts, meanings of arguments, names, a way to finish."""
    texts = {"task": (document["task"], frozenset({"workspace", "problem"}))}
    texts |= {f"answers.{form}": (document["answers"][form], fields) for form, fields in FORMS.items()}
    for where, (text, fields) in texts.items():
        yield from _field_problems(f"{path}: {where}", text, fields)
    names: list[str] = []
    does: set[str] = set()
    for tool in document["tools"]:
        names += sorted({tool["name"], *tool.get("other_names", ())})
        does |= set(_choice(tool)[1].values())
        yield from _tool_problems(f"{path}: tool {tool['name']}", tool)
    plain = [name.replace("_", "").lower() for name in names]  # what is left of a name in camel case
    if twice := [name for name, same in zip(names, plain, strict=True) if plain.count(same) > 1]:
        wrong = f"two tools have the name {twice[0]}, or one that differs in underscores and case only"
        yield Problem(where=f"{path}: tools", wrong=wrong, fix="rename one")
    if document["without_call"] is not None and "finish" not in does:
        wrong = "the model cannot end its work: no tool does finish, and a turn without a call is answered"
        yield Problem(where=f"{path}: tools", wrong=wrong, fix="add such a tool, or set without_call to null")


def _tool_problems(where: str, tool: Mapping[str, Any]) -> Iterator[Problem]:
    chooser, primitives = _choice(tool)
    parameters = tool["parameters"]
    meanings = {node["is"]: node["type"] for node in parameters.values() if "is" in node}
    if chooser is not None and (chooser not in parameters or parameters[chooser]["type"] != "string"):
        fix = f"declare the parameter {chooser} as a string"
        yield Problem(where=where, wrong=f"the parameter {chooser} chooses what the tool does", fix=fix)
    is_program = "program" in primitives.values()
    if is_program != ("runs" in tool):
        fix = "write runs, with does: program"
        yield Problem(where=where, wrong="a tool has runs exactly when it does program", fix=fix)
    if is_program:
        yield from _field_problems(f"{where}: runs", tool.get("runs", ""), frozenset(parameters))
        return
    known = {meaning for primitive in primitives.values() for group in PRIMITIVES[primitive] for meaning in group}
    for primitive in sorted(set(primitives.values())):
        for missing in sorted(PRIMITIVES[primitive][0] - meanings.keys()):
            fix = f"add a parameter with is: {missing}"
            yield Problem(where=where, wrong=f"{primitive} needs an argument that is {missing}", fix=fix)
    given = [node["is"] for node in parameters.values() if "is" in node]
    for meaning in sorted({meaning for meaning in given if given.count(meaning) > 1}):
        yield Problem(where=where, wrong=f"two parameters are {meaning}", fix="leave one of them out")
    for meaning, kind in sorted(meanings.items()):
        if meaning not in known:
            fix = suggestion(meaning, known) if known else "leave it out"
            yield Problem(where=where, wrong=f"no primitive of the tool reads an argument that is {meaning}", fix=fix)
        elif kind not in KINDS[meaning].split(" or "):
            yield Problem(where=f"{where}: {meaning}", got=kind, expected=KINDS[meaning], fix="correct the type")


def _field_problems(where: str, text: str, fields: frozenset[str]) -> Iterator[Problem]:
    """Yield the fields of a text that nothing fills; a brace that is text is written twice."""
    try:
        used = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as error:
        yield Problem(where=where, wrong=f"the text is no format: {error}", fix="write a brace that is text twice")
        return
    for field in sorted(used - fields):
        known = ", ".join(f"{{{name}}}" for name in sorted(fields)) or "no field"
        yield Problem(where=where, got=f"{{{field}}}", expected=known, fix="correct it; write a brace of text twice")
