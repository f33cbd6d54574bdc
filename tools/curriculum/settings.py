"""The settings of a curriculum: configs/data/curriculum.yaml with overrides, checked before any row is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from recipes.config.keys.schema import describe, show
from recipes.config.merge import display_name, put
from recipes.config.yaml_files import parse_value, read_yaml
from recipes.errors import DataError, Problem

DEFAULT_SETTINGS = Path(__file__).resolve().parents[2] / "configs" / "data" / "curriculum.yaml"

SHARE = {"type": "number", "minimum": 0, "maximum": 1}
NAMES = {"type": "array", "items": {"type": "string"}}


def block(**keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a block with exactly these keys."""
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


SCHEMA = block(
    seed={"type": "integer"},
    filter=block(max_pass_rate={"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    gaussian=block(
        prompts_per_step={"type": "integer", "minimum": 1},
        first_mean=SHARE,
        last_mean=SHARE,
        std={"type": "number", "exclusiveMinimum": 0},
    ),
    domains={"type": "object", "additionalProperties": NAMES},
    shares={"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}},
    low_effort=block(share=SHARE, domains=NAMES, marker={"type": "string", "minLength": 1}),
    reasoning=block(
        strip=SHARE,
        truncate=SHARE,
        budgets={"type": "array", "items": {"type": "integer", "minimum": 1}},
    ),
)


def load_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings; raises `DataError` with every problem of the file and the overrides."""
    document = read_yaml(path, name=display_name(path))
    settings, problems = document.data, document.problems
    if not problems:
        for text in overrides:
            problems += _override(settings, text)
        problems += [] if problems else [*_wrong_values(document.name, settings)]
        problems += [] if problems else [*_wrong_together(document.name, settings)]
    if problems:
        raise DataError(problems)
    return settings


def _override(settings: dict[str, Any], text: str) -> list[Problem]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        return [Problem(where="overrides", got=text, expected="KEY=VALUE", fix="write e.g. gaussian.std=0.1")]
    parsed, problems = parse_value(value, where=key)
    put(settings, key, parsed)
    return problems


def _wrong_values(name: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    for error in Draft202012Validator(SCHEMA).iter_errors(settings):
        where = f"{name}: {'.'.join(map(str, error.absolute_path))}".removesuffix(": ")
        node: Any = error.schema
        got, expected = show(error.instance), describe(node)
        if error.validator in ("additionalProperties", "required"):
            got, expected = error.message, f"the keys {', '.join(node['properties'])}"
        yield Problem(where=where, got=got, expected=expected, fix="correct the file or the override")


def _wrong_together(name: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    agents = [agent for members in settings["domains"].values() for agent in members]
    for agent in sorted({agent for agent in agents if agents.count(agent) > 1}):
        yield Problem(where=f"{name}: domains", got=f"{agent} twice", expected="each agent once", fix="remove one")
    if settings["reasoning"]["truncate"] and not settings["reasoning"]["budgets"]:
        yield Problem(where=f"{name}: reasoning.budgets", got="[]", expected="numbers of tokens", fix="give some")
    if (both := settings["reasoning"]["strip"] + settings["reasoning"]["truncate"]) > 1:
        where, expected = f"{name}: reasoning", "strip and truncate that sum to at most 1"
        yield Problem(where=where, got=f"{both:g}", expected=expected, fix="no row can be both; lower one")
