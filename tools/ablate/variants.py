"""The variants of an ablation: what each changes of a stage. Each differs from the stage in one choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from recipes.errors import ConfigError, Problem

AS_IS = "as the stage"
MAX_SLUG = 60  # characters of a variant in the name of its runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One choice to compare."""

    question: str  # the section of the page; empty for the stage as it is
    name: str
    overrides: tuple[str, ...]  # KEY=VALUE

    @property
    def slug(self) -> str:
        """The variant's part of the names of its runs."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")[:MAX_SLUG].rstrip("-.")


BASELINE = Variant(question="", name=AS_IS, overrides=())


def variants_of(words: Sequence[str]) -> list[Variant]:
    """Return one variant per value of `KEY=VALUE,VALUE` words, after the stage as it is; raises `ConfigError`.

    A comma within brackets, braces or quotes belongs to its value.
    """
    variants, problems = [BASELINE], []
    for word in words:
        key, equals, values = word.partition("=")
        choices = [value.strip() for value in _split(values)]
        if not (key and equals and all(choices)):
            fix = "write each choice in that form, such as grpo.use_dynamic_sampling=true"
            problems.append(Problem(where="ARGS", got=word, expected="KEY=VALUE,VALUE,...", fix=fix))
            continue
        short = key.rpartition(".")[2]
        variants += [Variant(question=key, name=f"{short}={value}", overrides=(f"{key}={value}",)) for value in choices]
    if problems:
        raise ConfigError(problems)
    return distinct(variants, "ARGS")


def variants_in(path: Path) -> list[Variant]:
    """Return the variants of a file (`configs/ablations.yaml`), after the stage as it is; raises `ConfigError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fix = "give --file a file in the form of configs/ablations.yaml"
        raise ConfigError(Problem(where=str(path), wrong=f"it cannot be read: {error}", fix=fix)) from error
    variants = [BASELINE]
    for question, named in _mapping(content, str(path)).items():
        for name, changes in _mapping(named, f"{path}: {question}").items():
            keys = _mapping(changes, f"{path}: {question}: {name}")
            overrides = tuple(f"{key}={orjson.dumps(value).decode()}" for key, value in keys.items())
            variants.append(Variant(question=str(question), name=str(name), overrides=overrides))
    return distinct(variants, str(path))


def distinct(variants: Sequence[Variant], where: str) -> list[Variant]:
    """Return the variants; raises `ConfigError` where two would share the names of their runs."""
    by_slug: dict[str, Variant] = {}
    problems = []
    for variant in variants:
        other = by_slug.setdefault(variant.slug, variant)
        if other is not variant or not variant.slug:
            wrong = f"'{variant.name}' and '{other.name}' give runs of one name, {variant.slug!r}"
            problems.append(Problem(where=where, wrong=wrong, fix="leave one out, or give it another name in a file"))
    if problems:
        raise ConfigError(problems)
    return list(variants)


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping) or not value:
        fix = "write it as configs/ablations.yaml does"
        raise ConfigError(Problem(where=where, got=repr(value)[:60], expected="a mapping with an entry", fix=fix))
    return value


def _split(text: str) -> list[str]:
    """Split at commas that stand outside brackets, braces and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]
