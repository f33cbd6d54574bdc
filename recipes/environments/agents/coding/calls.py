"""From a harness to the tools of a request, and from a model's call back to a primitive with its arguments.

A call is hostile text: whatever is wrong with it is a `ValueError` whose message the model is shown.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.agents.coding.harness import PRIMITIVES, Harness, HarnessTool, Parameter
from recipes.environments.contract.rows import shown

MAX_DIGITS = 12  # of a number that the model writes as text


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveCall:
    """What a model asked for, in our words."""

    primitive: str
    arguments: Mapping[str, Any]  # meaning -> value


def offered_names(harness: Harness, *, seed: str, is_diverse: bool, is_camel: bool) -> dict[str, HarnessTool]:
    """Return the tools of a harness by the names that the model sees; `seed` draws among a tool's names."""
    draw = random.Random(seed)
    named = {}
    for tool in harness.tools:
        name = draw.choice((tool.name, *tool.other_names)) if is_diverse else tool.name
        named[camel_case(name) if is_camel else name] = tool
    return named


def camel_case(name: str) -> str:
    """Return `a_tool_name` as `aToolName`."""
    return re.sub(r"_+([a-zA-Z0-9])", lambda found: found[1].upper(), name)


def request_tools(offered: Mapping[str, HarnessTool]) -> list[dict[str, Any]]:
    """Return the tools in the form of a Responses request."""
    return [
        {
            "type": "function",
            "name": name,
            "description": tool.description.strip(),
            "parameters": {
                "type": "object",
                "properties": {parameter.name: _schema(tool, parameter) for parameter in tool.parameters},
                "required": [parameter.name for parameter in tool.parameters if not parameter.is_optional],
            },
        }
        for name, tool in offered.items()
    ]


def _schema(tool: HarnessTool, parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind, "description": parameter.description.strip()}
    if parameter.name == tool.chooser:
        schema["enum"] = list(tool.primitives)
    if parameter.kind == "array":
        schema["items"] = {"type": "string" if parameter.means == "command" else "integer"}
    return schema


def read_call(tool: HarnessTool, arguments: Mapping[str, Any]) -> PrimitiveCall:
    """Return what a call asks for; raises `ValueError` that says what is wrong with its arguments."""
    known = {parameter.name: parameter for parameter in tool.parameters}
    for name in arguments:
        if name not in known:
            raise ValueError(f"unknown argument {shown(name)}; the arguments are: {', '.join(known) or 'none'}")
    values: dict[str, Any] = {}
    for name, parameter in known.items():
        value = arguments.get(name)
        if value is not None:
            values[name] = _READERS[parameter.kind](name, value)
        elif not parameter.is_optional:
            raise ValueError(f"the argument '{name}' is missing")
    choice = values[tool.chooser] if tool.chooser is not None else ""
    if choice not in tool.primitives:
        raise ValueError(
            f"argument '{tool.chooser}': got {shown(choice)}, expected one of {', '.join(tool.primitives)}"
        )
    primitive = tool.primitives[choice]
    if primitive == "program":
        quoted = {name: shlex.quote(_plain(values.get(name, ""))) for name in known}
        return PrimitiveCall(primitive="shell", arguments={"command": tool.runs.format_map(quoted)})
    meant = {known[name].means: _scaled(value, known[name].scale) for name, value in values.items()}
    for parameter in tool.parameters:  # an argument that other values of the chooser need
        if parameter.means and parameter.means not in meant and parameter.means in PRIMITIVES[primitive][0]:
            raise ValueError(f"the argument '{parameter.name}' is missing")
    return PrimitiveCall(primitive=primitive, arguments={key: value for key, value in meant.items() if key})


def _scaled(value: Any, scale: float) -> Any:
    return value * scale if scale != 1 else value


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"argument '{name}': got {shown(value)}, expected a string")
    return value


def _number(name: str, value: object) -> float:
    is_text = isinstance(value, str) and 0 < len(value) <= MAX_DIGITS
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # one of the three
            if math.isfinite(number):
                return number
    raise ValueError(f"argument '{name}': got {shown(value)}, expected a number")


def _integer(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(name, value)
    if number != int(number):
        raise ValueError(f"argument '{name}': got {shown(value)}, expected an integer")
    return int(number)


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"argument '{name}': got {shown(value)}, expected true or false")
    return value


def _array(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(part, str | int) for part in value):
        raise ValueError(f"argument '{name}': got {shown(value)}, expected a list of strings or of integers")
    return value


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "string": _string,
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "array": _array,
}
