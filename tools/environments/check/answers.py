"""Right and wrong answers to rows: those that a row names itself, else those that its fields give away.

A row may say `env_check: {golden: ..., wrong: ...}`, each a text or a whole Responses object. The key is for the checks
alone and is never sent. Without it a right answer is derived for the environments below; candidates are tried in turn,
for a row may ask for a notation that only its prompt describes.

A value that satisfies a JSON schema as strict verifiers read it, and its text in a format.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from recipes.environments.contract.verifier import function_call_item, message_item, reasoning_item, response_object
from recipes.environments.verifiers.calendar import minutes
from recipes.exact_json import loads

MAX_DEPTH = 40
MAX_TEXT = 100_000  # characters: a schema may ask for any number, and an answer that long scores nothing
TEXTS = {
    "date": "2024-01-31",
    "date-time": "2024-01-31T10:00:00Z",
    "email": "a@b.org",
    "time": "10:00:00Z",
    "uri": "https://a.org",
    "uuid": "12345678-1234-1234-1234-123456789abc",
}


def instance_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """Return a value that satisfies the common part of JSON Schema: types, enumerations, bounds, references.

    Raises `ValueError` for a schema that refers to itself without end, `KeyError` for a reference to nothing.
    """
    root = schema if root is None else root
    if depth > MAX_DEPTH:
        raise ValueError("the schema refers to itself without end")
    if not isinstance(schema, Mapping):
        return "x"
    if schema.get("enum") or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if (inner := _inner(schema, root)) is not None:
        return instance_of(inner, root, depth + 1)
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        return {key: instance_of(value, root, depth + 1) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance_of(schema.get("items", {}), root, depth + 1)] * max(1, schema.get("minItems", 1))
    return _plain(kind, schema)


def _inner(schema: Mapping[str, Any], root: Any) -> Any:
    """Return the schema that this one refers to or the first that it offers, None where it stands for itself."""
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return found
    return next((schema[name][0] for name in ("anyOf", "oneOf", "allOf") if schema.get(name)), None)


def _plain(kind: str, schema: Mapping[str, Any]) -> Any:
    """Return a value without parts."""
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        most = schema.get("maximum", least)
        number = min(max(least, 1), most) if "minimum" not in schema else least
        return number if kind == "integer" else float(number)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    text = TEXTS.get(str(schema.get("format")), "word")
    text = text.ljust(min(int(schema.get("minLength", 0)), MAX_TEXT), "x")
    return text[: int(schema["maxLength"])] if "maxLength" in schema else text


def as_text(value: Any, form: str) -> str:
    """Return a value as JSON, YAML, TOML, CSV or XML text; raises `ValueError` for one that the format cannot hold."""
    if form == "yaml":
        return str(yaml.safe_dump(value))
    if form == "toml":
        return _toml(value)
    if form == "csv":
        rows = value if isinstance(value, list) else [value]
        if any(isinstance(part, list | dict) for row in rows for part in row.values()):
            raise ValueError("CSV holds plain values only")
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    if form == "xml":
        import xmltodict

        root = value if isinstance(value, dict) and len(value) == 1 else {"root": value}
        return str(xmltodict.unparse(root))
    return json.dumps(value)


def _toml(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise ValueError("TOML holds an object only")
    return "".join(f"{json.dumps(key)} = {_toml_value(part)}\n" for key, part in value.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value)


KEY = "env_check"  # of a row, for the checks alone
PLAIN_WRONG = "I do not know."
LONGEST_VALUE = 60  # characters of an answer that is changed a little
STEP_MINUTES = 15  # between the starts that are tried for an event
MAX_STARTS = 200_000  # tried in all, so that a row cannot hold the checks up


def said(text: str) -> dict[str, Any]:
    """Return a response that is one message, after some reasoning."""
    return response_object([reasoning_item(["Let me think."]), message_item(text)])


def called(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a response of function calls."""
    items = [
        function_call_item(call["name"], call["arguments"], call_id=f"call_{number}")
        for number, call in enumerate(calls)
    ]
    return response_object(items)


def goldens(name: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return candidates for a right answer to a row, none when there is no way to derive one.

    Raises what a derivation raises on a row without its fields.
    """
    given = (row.get(KEY) or {}).get("golden")
    if given is not None:
        return [given if isinstance(given, dict) else said(str(given))]
    derive = DERIVED.get(name)
    return list(derive(row)) if derive else []


def value_of(row: Mapping[str, Any]) -> str:
    """Return the right answer of a row where it is a short text, "" where it is none."""
    found = (row.get(KEY) or {}).get("golden") or row.get("expected_answer") or row.get("answer")
    return found.strip() if isinstance(found, str) and len(found) <= LONGEST_VALUE and "\n" not in found else ""


def is_said_in(value: str, text: str) -> bool:
    """Return whether a text holds a right answer as words of its own, so that it may be right by chance."""
    wanted, lowered = value.lower(), text.lower()
    return wanted in lowered and bool(value) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", lowered) is not None


def wrongs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return answers of which at least one is wrong: text where a call is right, a call where text is."""
    given = (row.get(KEY) or {}).get("wrong")
    if given is not None:
        return [given if isinstance(given, dict) else said(str(given))]
    return [said(PLAIN_WRONG), called([{"name": "no_such_tool", "arguments": "{}"}])]


def _mcqa(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    letter = str(row["expected_answer"])
    text = next((option[letter] for option in row["options"] if letter in option), letter)
    forms = ("\\boxed{%s}", "Answer: %s", "**Answer:** %s", "answer is %s", "(%s)", "<answer>%s</answer>", "%s")
    yield from (said(form % shown) for shown in (letter, text) for form in (*forms, "**Final Answer: %s**"))


def _mathematics(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield said(f"The answer is \\boxed{{{row['expected_answer']}}}.")


def _reasoning_gym(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if row.get("answer") is not None:
        yield said(f"<answer>{row['answer']}</answer>")


def _structured_outputs(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    value = instance_of(loads(row["schema_str"]))
    if row.get("response_mode") == "tool_call":
        key = row.get("tool_payload_key")
        payload = json.dumps({key: value} if key else value)
        yield called([{"name": row.get("tool_name") or "tool", "arguments": payload}])
    else:
        yield said(as_text(value, row.get("schema_type") or "json"))


def _keystrokes(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield said(row["expected_answer"])


def _expected_action(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    action = row["expected_action"]
    if action["type"] == "message":
        yield said("All done.")
    else:
        yield called(action["calls"] if action["type"] == "function_call_batch" else [action])


def _ground_truth(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    calls = called(row["ground_truth"])
    yield {**calls, "output": [*calls["output"], message_item("Done.")]}


def _calendar(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    events = sorted(row["exp_cal_state"].values(), key=lambda event: len(_starts(event)))  # few places first
    placed = _placed(events, [], itertools.count())
    if placed is not None:
        entries = [
            {
                "event_id": event["event_id"],
                "start_time": f"{at // 60:02d}:{at % 60:02d}",
                "duration": event["duration"],
            }
            for event, at in zip(events, placed, strict=True)
        ]
        yield said(json.dumps(entries))


def _placed(events: Sequence[Mapping[str, Any]], starts: list[int], tried: Iterator[int]) -> list[int] | None:
    """Return a start in minutes for every event, by trying; None when there is none."""
    if len(starts) == len(events):
        return starts
    event = events[len(starts)]
    for start in _starts(event):
        if next(tried) > MAX_STARTS:
            return None
        others = zip(starts, events, strict=False)
        if all(start >= at + other["duration"] or at >= start + event["duration"] for at, other in others):
            found = _placed(events, [*starts, start], tried)
            if found is not None:
                return found
    return None


def _starts(event: Mapping[str, Any]) -> list[int]:
    """Return the starts in minutes that an event may have by itself."""
    first, duration = minutes(event["min_time"]), event["duration"]
    starts = range(first, int(minutes(event["max_time"]) - duration) + 1, STEP_MINUTES)
    constraint = str(event.get("constraint") or "")
    return [start for start in starts if _is_allowed(start, start + duration, constraint)]


def _is_allowed(start: int, end: int, constraint: str) -> bool:
    kind, _, rest = constraint.partition(" ")
    times = [minutes(time) for time in rest.split(" and ")] if rest else []
    rules: dict[str, Callable[[], bool]] = {
        "before": lambda: end <= times[0],
        "after": lambda: start >= times[0],
        "between": lambda: start >= times[0] and end <= times[1],
        "at": lambda: start == times[0],
    }
    return rules[kind]() if kind in rules else True


def _code_gen(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a program that knows the tests by heart."""
    tests = row["verifier_metadata"]["unit_tests"]
    known = dict(zip(tests["inputs"], tests["outputs"], strict=False))
    if tests.get("fn_name"):
        table = {json.dumps([json.loads(line) for line in given.split("\n")]): known[given] for given in known}
        body = f"import json\nKNOWN = {table!r}\ndef {tests['fn_name']}(*given):\n"
        body += "    return json.loads(KNOWN[json.dumps(list(given))])"
        yield said(f"```python\n{body}\n```")
        method = body.partition("def ")[2].replace("(*given)", "(self, *given)").replace("\n", "\n    ")
        yield said(f"```python\nimport json\nKNOWN = {table!r}\nclass Solution:\n    def {method}\n```")
    else:
        stripped = {given.strip(): output for given, output in known.items()}
        yield said(f"```python\nimport sys\nprint({stripped!r}[sys.stdin.read().strip()])\n```")


def _judged(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield any answer: whether it is right is what the judge says."""
    answer = str(row.get("expected_answer") or row.get("reference_response") or "A helpful answer.")
    forms = ("%s", "\\boxed{%s}", "Final Answer: %s", "Answer: %s", "The final answer is: **%s**")
    yield from (said(form % answer) for form in forms)


DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]]] = {
    "calendar": _calendar,
    "code_gen": _code_gen,
    "equivalence_llm_judge": _judged,
    "genrm_compare": _judged,
    "inverse_if": _judged,
    "jailbreak_detection": _judged,
    "math_with_judge": _mathematics,
    "mcqa": _mcqa,
    "multichallenge": _judged,
    "ns_tools": _mathematics,
    "over_refusal_detection": _judged,
    "reasoning_gym": _reasoning_gym,
    "single_step_tool_use_with_argument_comparison": _expected_action,
    "structured_outputs": _structured_outputs,
    "terminal_pivot": _keystrokes,
    "workplace_assistant": _ground_truth,
}
