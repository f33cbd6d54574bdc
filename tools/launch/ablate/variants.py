"""The variants of an ablation: what each changes of a stage. Each differs from the stage in one choice.

The runs of an ablation: one per variant and seed, named after both, started and resumed by `super_launch.sh`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from recipes.errors import ConfigError, LaunchError, Problem
from recipes.stop import EXIT_RESUME
from tools.doctor.examine import examine
from tools.draft.findings import Finding, errors
from tools.draft.launch import ROOT, Launch, read_launch
from tools.launch.sequence import is_finished, run_forwarding


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRun:
    """One variant with one seed."""

    variant: Variant
    seed: int
    variables: Mapping[str, str]  # besides the user's
    overrides: tuple[str, ...]
    launch: Launch

    @property
    def run_dir(self) -> Path:
        return self.launch.run_dir or self.launch.root / "results" / self.variables["EXP_NAME"]

    @property
    def is_finished(self) -> bool:
        return is_finished(self.run_dir, self.launch)


def make_runs(
    stage: str, name: str, variants: Sequence[Variant], seeds: Sequence[int], common: Sequence[str]
) -> list[VariantRun]:
    """Return all runs, every variant with the first seed first: what an early stop leaves can be compared."""
    runs = []
    for seed in seeds:
        for variant in variants:
            variables = {"EXP_NAME": f"{name}-{variant.slug}-seed{seed}", "SEED": str(seed)}
            overrides = (*common, *variant.overrides)
            launch = read_launch(stage, overrides, {**os.environ, **variables}, ROOT)
            runs.append(VariantRun(variant=variant, seed=seed, variables=variables, overrides=overrides, launch=launch))
    return runs


def refusals(runs: Sequence[VariantRun], *, is_only_input: bool = False) -> list[str]:
    """Return what the doctor has against the variants, each finding once with the variants that have it.

    With `is_only_input` the doctor looks at variables and configuration alone: files need not be there yet.
    """
    where: dict[Finding, list[str]] = {}
    for run in runs:
        if run.seed == runs[0].seed and not run.is_finished:
            for finding in run.launch.findings if is_only_input else examine(run.launch):
                where.setdefault(finding, []).append(run.variant.name)
    return [f"{', '.join(where[finding])}: {finding}" for finding in errors(where)]


def start(run: VariantRun, stage: str) -> int:
    """Run it here, or submit it; returns the status of the launcher."""
    words = [str(ROOT / "super_launch.sh"), stage, *run.overrides]
    return run_forwarding(words, {**os.environ, **run.variables})


def should_go_on(status: int) -> bool:
    """Whether the next run may begin: not after a stop, which is meant for all of them."""
    return status != EXIT_RESUME and status < 128


def require_distinct(seeds: Sequence[int]) -> None:
    """Raise `LaunchError` for a seed that is given twice."""
    if len(set(seeds)) < len(seeds):
        given = " ".join(map(str, seeds))
        raise LaunchError(Problem(where="SEEDS", got=given, expected="different numbers", fix="leave one out"))


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
