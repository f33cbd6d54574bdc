"""A stage in the form of NeMo RL's own GRPO entrypoint, and what that form cannot say. Pure: no files are written.

    our resolved configuration -> rules of configs/engines/nemo_rl.yaml -> NeMo RL's tree, notes, refusals

"Theirs" is NeMo RL's here. `to_theirs` and `to_ours` translate what no table can state, in the two directions;
tools/nemo_rl/importing.py translates back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.config.keys.schema import CONFIG_DIR, INSTANCES, SERVER_KINDS, declared, lookup, show
from recipes.config.load import LoadedConfig
from recipes.config.merge import UNSET_TOKEN, Layers, drop, put, source_of
from recipes.config.text import yaml_lines
from recipes.config.yaml_files import leaves, read_yaml
from recipes.errors import ConfigError, Problem
from tools.nemo_rl.accepted import check, instances_of, is_known

RULES = CONFIG_DIR / "engines" / "nemo_rl.yaml"
SOURCE = f"configs/engines/{RULES.name}"
AGE, IS_ASYNC = "grpo.async_grpo.max_trajectory_age_steps", "grpo.async_grpo.enabled"
EPOCHS, REPEAT = "grpo.max_num_epochs", "data.train.repeat"
VAL_DATA = "data.validation.data_path"
CONFIG_PATHS = f"{INSTANCES}.config_paths"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig:
    """One configuration in NeMo RL's form."""

    tree: Mapping[str, Any]
    sources: Mapping[str, str]  # dotted key of NeMo RL -> the file that set it
    notes: tuple[Problem, ...]  # settings that NeMo RL lacks or treats differently
    problems: tuple[Problem, ...]  # each stops a launch


@functools.cache
def rules() -> Mapping[str, Any]:
    """Return the parsed translation rules."""
    document = read_yaml(RULES, name=SOURCE)
    if document.problems:
        raise ConfigError(document.problems)
    return document.data


def engine() -> str:
    """Return the name of the engine for messages."""
    return f"NeMo RL {rules()['version']}"


def export(loaded: LoadedConfig) -> ExportedConfig:
    """Translate a configuration that has no problems; values given at launch may still be missing in it."""
    layers = Layers()
    notes: list[Problem] = []
    for key, value in leaves(loaded.tree).items():
        instead, different = _missing(key), _different(key, value)
        if instead is not None:
            notes.append(_note(loaded, key, "has no such setting", instead))
        elif key == CONFIG_PATHS:
            layers.add(_nested(key, gym_files(value)), source_of(loaded.sources, key) or SOURCE)
        elif value is not None or key not in rules()["leave_out_null"]:
            mapped = rules()["values"].get(key, {}).get("null" if value is None else str(value), value)
            raw = lookup(loaded.raw, key) if UNSET_TOKEN in str(value) else mapped  # made from what a launch gives
            layers.add(_nested(key, raw), source_of(loaded.sources, key) or SOURCE)
        if different is not None:
            notes.append(_note(loaded, key, "treats it differently", different))
    tree, sources = layers.tree, layers.sources
    for theirs, ours in rules()["copy"].items():
        put(tree, theirs, lookup(loaded.tree, ours))
        sources[theirs] = source_of(loaded.sources, ours) or SOURCE
    to_theirs(tree, sources)
    for further in additions(tree):
        layers.add_under(further, SOURCE)
        for key in [key for key, value in leaves(further).items() if value == {} and lookup(tree, key) is None]:
            put(tree, key, {})
    problems = (*_value_problems(loaded), *_file_problems(loaded), *check(tree, sources))
    return ExportedConfig(tree=tree, sources=sources, notes=tuple(notes), problems=problems)


def gym_files(paths: Iterable[Any]) -> list[str]:
    """Return the files of NeMo Gym that declare what files of ours declare."""
    return list(dict.fromkeys(file for path in paths for file in rules()["gym_files"].get(str(path), [])))


def additions(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what is laid under an exported tree, the more special first."""
    for server, block in rules()["add_with"].items():
        if has_server(tree, server):
            yield block
    yield _programs(tree)
    yield rules()["add"]


def _programs(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program of each server that no file of NeMo Gym declares."""
    found: dict[str, Any] = {}
    listed = lookup(tree, CONFIG_PATHS) or []
    declared_there = {name for path in listed for name in instances_of(path)}
    for name, block in (lookup(tree, INSTANCES) or {}).items():
        if isinstance(block, Mapping) and name not in declared_there and "_copy" not in block:
            for kind in SERVER_KINDS:
                for server in block.get(kind) or {}:
                    put(found, f"{INSTANCES}.{name}.{kind}.{server}.entrypoint", "app.py")
    return found


def _file_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    """Yield a problem for each file of ours without a counterpart in NeMo Gym."""
    paths = lookup(loaded.tree, CONFIG_PATHS) or []
    for path in paths:
        if path not in rules()["gym_files"]:
            yield Problem(
                where=f"{source_of(loaded.sources, CONFIG_PATHS)}: {CONFIG_PATHS}",
                wrong=f"NeMo Gym has no counterpart of {path}",
                fix=f"name one under `gym_files` in {SOURCE}",
            )
    if not gym_files(paths):
        yield Problem(
            where=f"{loaded.files[-1]}: {CONFIG_PATHS}",
            wrong="no environment is listed",
            fix="list the files of its blend's environments, at least environments/policy_model.yaml",
        )


def _missing(key: str) -> str | None:
    """Return what NeMo RL does in place of a key or setting that it lacks; None when it has it."""
    rule = rules()["ours_only"].get(key)
    if rule is None and is_instance(key):
        instead = rules()["ours_only_settings"].get(key.rpartition(".")[2])
        return None if instead is None else str(instead)
    if rule is None and not is_known(key):
        return f"has no rule for it in {SOURCE} either"
    return None if rule is None else str(rule["instead"])


def is_instance(key: str) -> bool:
    """Return whether a key of ours belongs to a server instance."""
    name = key.removeprefix(f"{INSTANCES}.").partition(".")[0]
    return key.startswith(f"{INSTANCES}.") and f"{INSTANCES}.{name}" not in declared()


def _nested(key: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {}
    put(data, key, value)
    return data


def _different(key: str, value: Any) -> str | None:
    """Return what NeMo RL does differently with a key that both have, None when it makes no difference."""
    rule = rules()["differs"].get(key)
    return None if rule is None or value in rule.get("unless", ()) else str(rule["instead"])


def _note(loaded: LoadedConfig, key: str, how: str, instead: str) -> Problem:
    wrong = f"{engine()} {how} (value {show(lookup(loaded.tree, key))}): it {instead}"
    where = f"{source_of(loaded.sources, key)}: {key}"
    return Problem(where=where, wrong=wrong, fix="accept that, or use ENGINE=native")


def _value_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    """Yield a problem for each value with which NeMo RL would train differently."""
    for key, rule in rules()["ours_only"].items():
        value = lookup(loaded.tree, key)
        is_met = "with" not in rule or has_server(loaded.tree, rule["with"])
        if "neutral" in rule and value != rule["neutral"] and is_met:
            yield _refused(loaded, key, rule["neutral"], f"it {rule['instead']}")
    for key, rule in rules()["refused"].items():
        is_met = not rule.get("asynchronous") or _is_asynchronous(loaded.tree)
        if lookup(loaded.tree, key) != rule["only"] and is_met:
            yield _refused(loaded, key, rule["only"], rule["because"])
    for key, value in leaves(loaded.tree).items():
        if not is_instance(key) and key not in rules()["ours_only"] and not is_known(key):
            yield Problem(
                where=f"{source_of(loaded.sources, key)}: {key}",
                wrong=f"{engine()} has no such key, and no rule says how to leave it out (value {show(value)})",
                fix=f"add a rule to {SOURCE}",
            )


def _is_asynchronous(tree: Mapping[str, Any]) -> bool:
    return bool(lookup(tree, IS_ASYNC)) and lookup(tree, AGE) != 0


def _refused(loaded: LoadedConfig, key: str, only: Any, reason: str) -> Problem:
    return Problem(
        where=f"{source_of(loaded.sources, key)}: {key}",
        got=show(lookup(loaded.tree, key)),
        expected=f"{show(only)} ({engine()})",
        fix=f"{reason}; set it to {show(only)}, or use ENGINE=native",
    )


def has_server(tree: Mapping[str, Any], server: str) -> bool:
    """Return whether an instance of the configuration is a server of this type."""
    blocks = [block for block in (lookup(tree, INSTANCES) or {}).values() if isinstance(block, Mapping)]
    return any(server in (block.get(kind) or {}) for block in blocks for kind in SERVER_KINDS)


def to_theirs(tree: dict[str, Any], sources: dict[str, str]) -> None:
    """Bring into NeMo RL's form, in place, what no table can state."""
    if lookup(tree, AGE) == 0:  # ours is synchronous without leaving the one train loop
        put(tree, IS_ASYNC, False)
    epochs = lookup(tree, EPOCHS)
    if isinstance(epochs, int) and epochs > 1:  # asynchronous training there reads its rows once
        put(tree, EPOCHS, 1)
        put(tree, REPEAT, epochs)
        sources[REPEAT] = sources[EPOCHS]
    if lookup(tree, "data.validation") == {"data_path": None}:
        put(tree, "data.validation", None)
        sources["data.validation"] = sources.pop(VAL_DATA)


def to_ours(tree: dict[str, Any]) -> None:
    """Undo `to_theirs`, in place."""
    if lookup(tree, IS_ASYNC) is False:
        put(tree, AGE, 0)
        put(tree, IS_ASYNC, True)
    repeat = lookup(tree, REPEAT)
    if isinstance(repeat, int):
        put(tree, EPOCHS, repeat * (lookup(tree, EPOCHS) or 1))
        drop(tree, REPEAT)
    if "validation" in (lookup(tree, "data") or {}) and lookup(tree, "data.validation") is None:
        put(tree, VAL_DATA, None)


def render_export(loaded: LoadedConfig, exported: ExportedConfig) -> Iterator[str]:
    """Yield the export as YAML with the source of each key; notes and refusals follow as comments."""
    yield f"# {engine()}: {' <- '.join(loaded.files)}, with {SOURCE}"
    yield from yaml_lines(exported.tree, lambda key: source_of(exported.sources, key) or "")
    yield ""
    for note in exported.notes:
        yield f"# not the same: {note}"
    for problem in exported.problems:
        yield f"# refused: {problem}"
