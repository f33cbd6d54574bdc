"""Load one stage's configuration: files and overrides in, a checked dataclass tree out. No torch, under a second.

    base <- stage <- scale or platform overlay <- command line     (one `defaults:` parent per file)

Every problem of every layer is found in one pass; nothing is started before the list is empty.

The stage table configs/stages.yaml as values: which stages there are, in which order, which file each one runs.

Check a resolved configuration against configs/schema.json; report every wrong key, what it accepts, and a fix.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from recipes.config import merge
from recipes.config.keys.schema import (
    CONFIG_DIR,
    INSTANCES,
    SERVER_KINDS,
    UNSET,
    KeyProblem,
    declared,
    describe,
    lookup,
    refused_keys,
    schema,
    server_defaults,
    server_node,
    settings_of,
    show,
    upwards,
)
from recipes.config.keys.upstream import upstream_hint
from recipes.config.merge import display_name, leaves, read_yaml
from recipes.config.rules.all import REFUSALS, RULES
from recipes.config.rules.environments import undecided_keys
from recipes.config.tree import Config, build
from recipes.errors import ConfigError, Problem, nearest

STAGES = CONFIG_DIR / "stages.yaml"
SCALES = ("prod", "small", "tiny")
PLATFORMS = ("h100", "b200")
FOREIGN_KEYS = 3  # as many keys of NeMo RL alone make a file one of its own; an overlay may have one by mistake
CPU = "cpu"  # the platform of scale tiny

_NAME = {"type": "string", "minLength": 1}
_ROW_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "name", "experiment", "configs", "blend", "after", "container", "requires"],
    "properties": {
        "id": {"type": "string", "pattern": r"^[a-z][a-z0-9]*([.-][a-z0-9]+)*$"},
        "name": _NAME,
        "experiment": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
        "configs": {
            "type": "object",
            "propertyNames": {"enum": list(SCALES)},
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"enum": [*PLATFORMS, CPU]},
                "additionalProperties": _NAME,
            },
        },
        "blend": _NAME,
        "after": {"type": ["string", "null"]},
        "container": {"enum": ["training", "swe"]},
        "requires": {"type": "array", "items": {"enum": ["sandbox", "judges", "sif"]}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One row of the stage table."""

    id: str
    name: str
    experiment: str
    configs: Mapping[str, Mapping[str, str]]  # scale -> platform -> file under configs/
    blend: str
    after: str | None  # id of the parent stage; None = the SFT checkpoint
    container: str
    requires: tuple[str, ...]


def load_stages(path: Path = STAGES) -> list[Stage]:
    """Return the stages in order; raises `ConfigError` with everything that is wrong with the table."""
    document = read_yaml(path, name=display_name(path))
    problems = list(document.problems)
    rows = document.data.get("stages")
    if not isinstance(rows, list) or not rows:
        what = Problem(where=f"{document.name}: stages", got=show(rows), expected="a list of stages", fix="add rows")
        raise ConfigError([*problems, what])
    for index, row in enumerate(rows):
        where = f"{document.name}: stages[{index}]"
        problems.extend(
            Problem(
                where=".".join([where, *(str(part) for part in error.absolute_path)]),
                wrong=error.message,
                fix="write it as the head of the file says",
            )
            for error in Draft202012Validator(_ROW_SCHEMA).iter_errors(row)
        )
    if problems:
        raise ConfigError(problems)
    stages = [Stage(**{**row, "requires": tuple(row["requires"])}) for row in rows]
    problems.extend(_table_problems(stages, document.name))
    if problems:
        raise ConfigError(problems)
    return stages


def find_stage(name: str, stages: Sequence[Stage] | None = None, *, where: str = "STAGE") -> Stage:
    """Return the stage with this id (`stage1.1`) or name (`rlvr1`); `where` is what the user has set to it."""
    stages = load_stages() if stages is None else stages
    for stage in stages:
        if name in (stage.id, stage.name):
            return stage
    known = [word for stage in stages for word in (stage.id, stage.name)]
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else "choose from what `make stages` prints"
    expected = f"one of {', '.join(f'{stage.id} ({stage.name})' for stage in stages)}"
    raise ConfigError(Problem(where=where, got=name, expected=expected, fix=fix))


def config_path(stage: Stage, scale: str, platform: str) -> Path:
    """Return the configuration file of a stage; scale tiny runs on a CPU whatever the platform."""
    platform = CPU if scale == "tiny" else platform
    name = stage.configs.get(scale, {}).get(platform)
    where = f"{display_name(STAGES)}: {stage.id}.configs.{scale}.{platform}"
    if name is None:
        there = [f"{s} on {p}" for s, platforms in stage.configs.items() for p in platforms]
        fix = f"choose from: {', '.join(there)}" if there else "choose another stage: this one has no file yet"
        wrong = "the stage has no file for this scale and platform"
        raise ConfigError(Problem(where=where, wrong=wrong, fix=fix))
    path = CONFIG_DIR / name
    if not path.is_file():
        wrong, fix = f"{display_name(path)} does not exist", "add it or correct the stage table"
        raise ConfigError(Problem(where=where, wrong=wrong, fix=fix))
    return path


def _table_problems(stages: Sequence[Stage], name: str) -> list[Problem]:
    """Return a problem for equal ids, names or experiments, and for a parent that does not come earlier."""
    problems = []
    for field in ("id", "name", "experiment"):
        values = [getattr(stage, field) for stage in stages]
        for value in sorted({value for value in values if values.count(value) > 1}):
            problems.append(Problem(where=f"{name}: {field}", wrong=f"{value} stands here twice", fix="rename one"))
    earlier: list[str] = []
    for stage in stages:
        if stage.after is not None and stage.after not in earlier:
            expected = f"null or one of {', '.join(earlier)}" if earlier else "null"
            fix = "name a stage above it, whose weights it starts from"
            problems.append(Problem(where=f"{name}: {stage.id}.after", got=stage.after, expected=expected, fix=fix))
        earlier.append(stage.id)
    return problems


def schema_problems(tree: Mapping[str, Any]) -> list[KeyProblem]:
    """Return one problem per key that is unknown, missing, of the wrong type or out of range; `???` passes."""
    found = [problem for error in Draft202012Validator(schema()).iter_errors(tree) for problem in _problems_of(error)]
    return list({(problem.key, problem.got, problem.wrong): problem for problem in found}.values())


def _problems_of(error: ValidationError) -> Iterator[KeyProblem]:
    key = ".".join(str(part) for part in error.absolute_path)
    if key.startswith(f"{INSTANCES}.") and key not in declared() and not _is_below_a_key(key):
        yield from _server_problems(key, error)
        return
    present: Mapping[str, Any] = error.instance if isinstance(error.instance, Mapping) else {}
    rule: Any = error.validator_value
    node: Any = error.schema
    if error.instance == UNSET and key in declared():
        return
    if error.validator == "additionalProperties":
        for name in sorted(set(present) - set(node.get("properties", {}))):
            yield unknown_key(f"{key}.{name}" if key else name)
    elif error.validator == "required":
        for name in sorted(set(rule) - set(present)):
            yield _missing_key(f"{key}.{name}" if key else name, declared()[f"{key}.{name}" if key else name])
    else:
        own = next((name for name in upwards(key) if name in declared()), "")  # of an item of a list, the list
        yield _wrong_value(own, declared()[own], error.instance)


def _is_below_a_key(key: str) -> bool:
    """Return whether this is an item of one of the block's own keys, and no server instance."""
    return any(name in declared() and name != INSTANCES for name in upwards(key) if name.startswith(f"{INSTANCES}."))


def _wrong_value(key: str, node: Mapping[str, Any], value: Any) -> KeyProblem:
    close = nearest(str(value), [str(choice) for choice in node.get("enum", [])])
    fix = f"did you mean {close}?" if close else f"meaning: {node['description']}"
    return KeyProblem(key=key, got=show(value), expected=describe(node), fix=fix)


def _missing_key(key: str, node: Mapping[str, Any]) -> KeyProblem:
    return KeyProblem(key=key, wrong="this key has no value", fix=f"set it to {describe(node)}")


def _server_problems(key: str, error: ValidationError) -> Iterator[KeyProblem]:
    """Yield what is wrong with a further key of env.nemo_gym: a server instance, or a misspelled key of the block."""
    name = key.removeprefix(f"{INSTANCES}.")
    present: Mapping[str, Any] = error.instance if isinstance(error.instance, Mapping) else {}
    known = settings_of(error.schema)
    if "url" in error.schema.get("required", ()) and "url" not in present:  # type: ignore[union-attr]
        yield _unknown_type(key)
    elif error.validator in ("additionalProperties", "unevaluatedProperties"):
        kind = ("kind of server", "type of server", "setting of this server")[min(name.count("."), 2)]
        for further in sorted(set(present) - set(known)):
            close = nearest(further, known)
            choices = f"choose from: {', '.join(sorted(known))}" if known else "delete it: this block has no settings"
            fix = f"did you mean {close}?" if close else choices
            yield KeyProblem(key=f"{key}.{further}", wrong=f"there is no such {kind}", fix=fix)
    elif error.validator == "required":
        required: Any = error.validator_value
        for missing in sorted(set(required) - set(present)):
            yield _missing_key(f"{key}.{missing}", known[missing])
    elif error.validator == "type" and "." not in name:
        yield unknown_key(key)
    elif error.validator in ("minProperties", "maxProperties"):
        expected = "one type of server" if "." in name else f"one of {', '.join(SERVER_KINDS)}"
        fix = "write an instance with one server, as configs/environments has them"
        yield KeyProblem(key=key, got=show(sorted(present)), expected=expected, fix=fix)
    else:
        own = next(above for above in upwards(key) if server_node(above))
        yield _wrong_value(own, server_node(own), error.instance)


def _unknown_type(key: str) -> KeyProblem:
    """Return the problem of a resources server of a type that is not known here, and that no address leads to."""
    above, _, name = key.rpartition(".")
    close = nearest(name, server_node(above)["properties"])
    file = f"recipes/environments/verifiers/{name}.py"
    if (CONFIG_DIR.parent / file).is_file():
        fix = f"run `make config-keys`, which puts the settings of {file} into configs/schema.json"
    elif close:
        fix = f"did you mean {close}?"
    else:
        fix = "give the `url` at which the server of your own type answers"
    return KeyProblem(key=key, wrong="there is no such type of server", fix=fix)


def unknown_key(key: str) -> KeyProblem:
    """Return the problem of a key that no class declares, with the nearest key that one does."""
    fix = upstream_hint(key)
    if fix is None:
        near = _nearest_key(key)
        fix = f"did you mean {near}?" if near else "delete it; configs/grpo_base.yaml has every key"
    return KeyProblem(key=key, wrong="there is no such key", fix=fix)


def _nearest_key(key: str) -> str | None:
    """Return the key of the same block that is most like this one, else one of another block that is almost equal."""
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in declared() if k.rpartition(".")[0] == parent}
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(declared())}
    near = nearest(name, siblings)
    if near is not None:
        return siblings[near]
    far = nearest(name, elsewhere, cutoff=0.85)
    return None if far is None else elsewhere[far]


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
    if any(is_of_nemo_rl(document.data) for _, document in chain):  # the file, or one that it lies over
        wrong = "this is a stage file of NeMo RL, whose keys are not all ours"
        fix = f"save what `make config-import FILE={path}` prints under configs/, and give that file"
        problems = [Problem(where=files[-1], wrong=wrong, fix=fix)]
    elif chain[0][0].name == merge.BASE_NAME:  # without the base every key would be missing
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


def is_of_nemo_rl(data: Mapping[str, Any]) -> bool:
    """Whether a file was written for NeMo RL: it sets several of the keys that only NeMo RL has."""
    names = {name for key in leaves(data) for name in upwards(key)}
    return sum(upstream_hint(name) is not None for name in names) >= FOREIGN_KEYS


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


def with_defaults(loaded: LoadedConfig) -> LoadedConfig:
    """Return a configuration with the values, too, that its verifiers take from their own files."""
    tree, sources = copy.deepcopy(dict(loaded.tree)), dict(loaded.sources)
    for key, (value, file) in server_defaults(tree).items():
        merge.put(tree, key, value)
        sources |= dict.fromkeys(leaves({key: value}), file)
    return replace(loaded, tree=tree, sources=sources)


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


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a dataclass tree with its value."""
    for field in fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from walk(value, f"{key}.")
        else:
            yield key, value
