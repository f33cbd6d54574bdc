"""Load one stage's configuration: files and overrides in, a checked dataclass tree out. No torch, under a second.

    base <- stage <- scale or platform overlay <- command line     (one `defaults:` parent per file)

Every problem of every layer is found in one pass; nothing is started before the list is empty.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from recipes.config import merge
from recipes.config.check import schema_problems
from recipes.config.keys.schema import (
    CONFIG_DIR,
    UNSET,
    KeyProblem,
    declared,
    describe,
    lookup,
    refused_keys,
    show,
)
from recipes.config.rules.all import REFUSALS, RULES
from recipes.config.rules.environments import undecided_keys
from recipes.config.tree import Config, NemoGymConfig
from recipes.config.yaml_files import leaves, read_yaml
from recipes.errors import ConfigError, Problem

BASE = CONFIG_DIR / merge.BASE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A resolved configuration with where each value came from and everything that is wrong with it."""

    path: Path
    files: tuple[str, ...]  # the `defaults:` chain, base first
    tree: Mapping[str, Any]  # resolved plain data
    raw: Mapping[str, Any]  # the same before interpolation
    sources: Mapping[str, str]  # dotted key -> file or "command line"
    problems: tuple[Problem, ...]
    config: Config | None  # None exactly when there are problems
    repaired: Config | None  # the same with the base's value for wrong keys, for further checks; None without the base


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load, merge, resolve and check one configuration file; problems are collected, never raised."""
    path = Path(path)
    chain, problems = merge.read_chain(path)
    layers = merge.Layers()
    for _, document in chain:
        layers.add(document.data, document.name)
    for override in overrides:
        merge.apply_override(layers, override)
    merge.lay_instances(layers, chain[0][0].parent)
    problems.extend(layers.problems)

    tree, failures = merge.resolve(layers.tree)
    files = tuple(document.name for _, document in chain)
    config = None
    if chain[0][0].name == merge.BASE_NAME:  # without the base every key would be missing
        trapped = {problem.where.rpartition(": ")[2] for problem in problems}
        found, config = _check(layers.tree, tree, failures, trapped)
        base = chain[0][1].name
        found.extend(problem for problem in undecided_keys(config) if layers.source_of(problem.key) == base)
        known = {problem.where for problem in problems}
        further = [problem.found_in(layers.source_of(problem.key) or files[-1]) for problem in found]
        problems.extend(problem for problem in further if problem.where not in known)  # a YAML trap says it better

    return LoadedConfig(
        path=path,
        files=files,
        tree=tree,
        raw=layers.tree,
        sources=layers.sources,
        problems=tuple(problems),
        config=None if problems else config,
        repaired=config,
    )


def require_valid(loaded: LoadedConfig) -> Config:
    """Return the configuration, or raise `ConfigError` with every problem; `???` may still stand in it."""
    if loaded.config is None:
        raise ConfigError(loaded.problems)
    return loaded.config


def require_runnable(loaded: LoadedConfig) -> Config:
    """Return the configuration of a native run: valid, complete, and without a value that the engine would ignore."""
    known = {problem.where for problem in loaded.problems}
    further = [problem for problem in [*unset(loaded), *refusals(loaded)] if problem.where not in known]
    if further or loaded.config is None:
        raise ConfigError([*loaded.problems, *further])
    return loaded.config


def unset(loaded: LoadedConfig) -> list[Problem]:
    """Return a problem for each value that must be given at launch and was not."""
    problems = []
    for key, value in leaves(loaded.raw).items():
        if value == UNSET and key in declared():
            fix = f"give {key}=...; meaning: {declared()[key]['description']}"
            where = f"{loaded.sources[key]}: {key}"
            problems.append(Problem(where=where, got=UNSET, expected=describe(declared()[key]), fix=fix))
    return problems


def refusals(loaded: LoadedConfig) -> list[Problem]:
    """Return a problem for each value that a native launch would have to ignore, with the reason it is refused."""
    found = [
        KeyProblem(
            key=key,
            got=show(value),
            expected=f"{describe(native['honours'])} (native engine)",
            fix=f"{native['reason']}; change it, or launch with ENGINE=nemo_rl",
        )
        for key, value, native in refused_keys(loaded.tree)
    ]
    if loaded.config is not None:
        found.extend(problem for refuse in REFUSALS for problem in refuse(loaded.config))
    return [problem.found_in(merge.source_of(loaded.sources, problem.key) or loaded.files[-1]) for problem in found]


def _check(
    raw: Mapping[str, Any], tree: Mapping[str, Any], failures: Mapping[str, str], trapped: set[str]
) -> tuple[list[KeyProblem], Config]:
    """Check schema and rules; a wrong value is not reported again for what is made from it or compared with it.

    `failures` are keys whose `${...}` cannot be resolved, with the reason. `trapped` are keys whose values YAML has
    read as something else than what is written; that is reported already.
    """
    problems = [problem for problem in schema_problems(tree) if problem.key not in failures]
    problems.extend(
        KeyProblem(key=key, wrong=f"{show(lookup(raw, key))} cannot be resolved ({reason})", fix="correct it")
        for key, reason in failures.items()
    )
    wrong = {problem.key for problem in problems}
    tainted = merge.tainted_keys(raw, trapped)
    if wrong:
        own = merge.origins(raw, wrong)
        tainted |= merge.tainted_keys(raw, own)
        problems = [problem for problem in problems if problem.key in own]
        tree = _repaired(tree, wrong | tainted)
    config = build(Config, tree)
    for rule in RULES:
        for problem in rule(config):
            if not any(merge.under(key, wrong | tainted) for key in (problem.key, *problem.also)):
                problems.append(problem)
    return problems, config


def _repaired(tree: Mapping[str, Any], wrong: set[str]) -> Mapping[str, Any]:
    """Return a copy with the base's value for every wrong key, so that the rules can look at the others."""
    repaired = copy.deepcopy(dict(tree))
    for key in sorted(wrong):
        merge.drop(repaired, key)
        if key in declared():
            merge.put(repaired, key, copy.deepcopy(lookup(_base_tree(), key)))
    return repaired


@functools.cache
def _base_tree() -> Mapping[str, Any]:
    return merge.resolve(read_yaml(BASE, name=merge.BASE_NAME).data)[0]


def build(cls: Any, data: Mapping[str, Any]) -> Any:
    """Return the dataclass `cls` made from checked data; the further keys of env.nemo_gym become its `instances`."""
    hints = _hints(cls)
    values = {name: _convert(hint, data[name]) for name, hint in hints.items() if name in data}
    if cls is NemoGymConfig:
        values["instances"] = {name: value for name, value in data.items() if name not in hints}
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _convert(hint: Any, value: Any) -> Any:
    arguments = get_args(hint)
    if NoneType in arguments:
        return None if value is None else _convert(next(kind for kind in arguments if kind is not NoneType), value)
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return tuple(value)
    if hint in (int, float):
        return hint(value)
    return copy.deepcopy(value)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a dataclass tree with its value."""
    for field in fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from walk(value, f"{key}.")
        else:
            yield key, value
