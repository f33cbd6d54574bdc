"""Layers of configuration files: the `defaults:` chain, overrides, which layer set each key, and interpolation."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.keys.schema import INSTANCES, UNSET, lookup, show, upwards
from recipes.config.yaml_files import Document, leaves, parse_value, read_yaml
from recipes.errors import Problem

COMMAND_LINE = "command line"
BASE_NAME = "grpo_base.yaml"
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(?P<value>.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$\{([^${}:]+)\}")  # the innermost ${key}; ${oc.env:...} and ${mul:...} have a colon
UNSET_TOKEN = "<given at launch>"  # stands for `???` in a resolved text: OmegaConf refuses to interpolate its own `???`


@dataclass(slots=True)
class Layers:
    """Files and overrides laid over each other; the last one wins."""

    tree: dict[str, Any] = field(default_factory=dict)  # raw: interpolations not yet resolved
    sources: dict[str, str] = field(default_factory=dict)  # dotted key of a leaf -> file or "command line"
    deleted: dict[str, str] = field(default_factory=dict)  # dotted key -> layer that deleted it
    problems: list[Problem] = field(default_factory=list)

    def add(self, data: Mapping[str, Any], source: str) -> None:
        """Lay `data` over the tree: blocks are merged, other values replaced, and `~key` deletes a key."""
        self._merge(self.tree, data, source, "")

    def add_under(self, data: Mapping[str, Any], source: str, prefix: str = "") -> None:
        """Lay `data` under the tree: take only the keys that no layer has set."""
        below = f"{prefix}." if prefix else ""
        there = {above for known in self.sources if known.startswith(below) for above in upwards(known)}
        for key, value in leaves(data, prefix).items():
            if key not in there and not any(above in self.sources for above in upwards(key)):
                put(self.tree, key, copy.deepcopy(value))
                self.sources[key] = source

    def _merge(self, tree: dict[str, Any], data: Mapping[str, Any], source: str, prefix: str) -> None:
        for name, value in data.items():
            if name.startswith("~"):
                self._delete(tree, name[1:], source, prefix)
                continue
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                if not isinstance(tree.get(name), dict):
                    self.sources.pop(key, None)
                    tree[name] = {}
                self._merge(tree[name], value, source, f"{key}.")
            elif not (isinstance(value, Mapping) and isinstance(tree.get(name), dict)):
                self._forget(key, tree.get(name))
                tree[name] = copy.deepcopy(value)
                self.sources[key] = source

    def _delete(self, tree: dict[str, Any], name: str, source: str, prefix: str) -> None:
        if name in tree:
            self._forget(f"{prefix}{name}", tree.pop(name))
            self.deleted[f"{prefix}{name}"] = source
        else:
            fix = f"choose from: {', '.join(tree)}" if tree else "delete this line"
            where, wrong = f"{source}: ~{prefix}{name}", "there is no such key to delete"
            self.problems.append(Problem(where=where, wrong=wrong, fix=fix))

    def _forget(self, key: str, value: Any) -> None:
        """Drop who set a value that goes and, where it is a block, who set what is below it."""
        self.sources.pop(key, None)
        if isinstance(value, dict):
            for known in [known for known in self.sources if known.startswith(f"{key}.")]:
                del self.sources[known]

    def source_of(self, key: str) -> str | None:
        """Return the layer that set or deleted the key."""
        return source_of(self.sources, key) or self.deleted.get(key)


def lay_instances(layers: Layers, directory: Path) -> None:
    """Lay the server instances of `env.nemo_gym.config_paths` under the block, later files over earlier ones."""
    paths = lookup(layers.tree, f"{INSTANCES}.config_paths")
    for name in reversed(paths if isinstance(paths, list) else []):
        path = directory / str(name)
        document = read_yaml(path, name=display_name(path))
        layers.problems.extend(document.problems)
        layers.add_under(document.data, document.name, INSTANCES)


def source_of(sources: Mapping[str, str], key: str) -> str | None:
    """Return the layer that set the key or, for a block, the layer that set its last value."""
    below = [source for known, source in sources.items() if known == key or known.startswith(f"{key}.")]
    return below[-1] if below else None


def display_name(path: Path) -> str:
    """Return the path for messages: relative to the working directory if it lies below that."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def read_chain(path: Path) -> tuple[list[tuple[Path, Document]], list[Problem]]:
    """Read a file and the files that its `defaults:` names, base first; a list is a parent and files to lay over it."""
    chain: list[tuple[Path, Document]] = []
    problems: list[Problem] = []
    current: Path | None = path
    while current is not None:
        document = read_yaml(current, name=display_name(current))
        problems.extend(document.problems)
        chain.insert(0, (current, document))
        names = document.data.pop("defaults", None)
        if names is None:
            break
        targets, found = _targets(current, names, document, [seen for seen, _ in chain])
        problems.extend(found)
        current = targets[0] if targets and not found else None
        over = [(target, read_yaml(target, name=display_name(target))) for target in targets[1:]]
        problems.extend(problem for _, laid in over for problem in (*laid.problems, *_has_parent(laid)))
        chain[:0] = over
    root = chain[0][0]
    if not problems and root.name != BASE_NAME:
        fix = f"add `defaults:` with the path to configs/{BASE_NAME} or to a stage file, relative to this file"
        name = display_name(root)
        problems.append(Problem(where=f"{name}: defaults", wrong="this file names no parent", fix=fix))
    return chain, problems


def _targets(path: Path, names: Any, document: Document, seen: Sequence[Path]) -> tuple[list[Path], list[Problem]]:
    """Return the existing files that `defaults:` names, and a problem for each other name."""
    where = document.where("defaults")
    listed = names if isinstance(names, list) else [names]
    if not listed or not all(isinstance(name, str) for name in listed):
        fix = "name one parent file, or a list of one and of files to lay over it"
        return [], [Problem(where=where, got=show(names), expected="a path or a list of paths", fix=fix)]
    targets: list[Path] = []
    problems: list[Problem] = []
    for name in listed:
        target = path.parent / name
        if not target.is_file():
            fix = "give the path relative to this file"
            problems.append(Problem(where=where, wrong=f"{name} does not exist", fix=fix))
        elif target.resolve() in [known.resolve() for known in (*seen, *targets)]:
            wrong, fix = f"{name} is among the parents already", "remove it here, or it would be its own parent"
            problems.append(Problem(where=where, wrong=wrong, fix=fix))
        else:
            targets.append(target)
    return targets, problems


def _has_parent(laid: Document) -> list[Problem]:
    """Return a problem when a file that is laid over a parent names a parent itself."""
    if "defaults" not in laid.data:
        return []
    wrong = f"{show(laid.data.pop('defaults'))} cannot be the parent of a file that is laid over another one"
    fix = "delete this line; name the parent in the file that lists both"
    return [Problem(where=laid.where("defaults"), wrong=wrong, fix=fix)]


def apply_override(layers: Layers, text: str) -> None:
    """Apply one `key=value`, `++key=value` or `~key` of the command line."""
    match = OVERRIDE.fullmatch(text)
    deletes = match is not None and match["sign"] == "~"
    if match is None or deletes != (match["value"] is None):
        layers.problems.append(
            Problem(
                where=f"{COMMAND_LINE}: {text}",
                wrong="this is not an override",
                fix="write key=value, ++key=value or ~key, e.g. grpo.num_prompts_per_step=64",
            )
        )
        return
    *blocks, name = match["key"].split(".")
    value: Any = None
    if not deletes:
        value, problems = parse_value(match["value"], where=f"{COMMAND_LINE}: {match['key']}")
        if problems:
            layers.problems.extend(problems)
            return
    data: dict[str, Any] = {f"~{name}" if deletes else name: value}
    for block in reversed(blocks):
        data = {block: data}
    layers.add(data, COMMAND_LINE)


def product(*factors: Any) -> int | float:
    """Return the product of the factors; configuration files write it `${mul:a,b}`."""
    result: int | float = 1
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ValueError(f"{factor!r} is no number")
        result *= factor
    return result


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree with every `${...}` resolved, and the reasons by key where that fails; such a value is None."""
    OmegaConf.register_resolver("mul", product, replace=True)
    raw = _swap(tree, UNSET, UNSET_TOKEN)
    quickly = _resolved_parts(raw)
    if quickly is not None:
        return _swap(quickly, UNSET_TOKEN, UNSET), {}
    failures: dict[str, str] = {}
    while True:
        try:
            config = OmegaConf.create(raw)
            plain = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            found = _failures(raw)
            if not found:
                raise AssertionError(f"no key explains: {error}") from error
            failures.update(found)
            for key in found:
                put(raw, key, None)
        else:
            return _swap(plain, UNSET_TOKEN, UNSET), failures


def _resolved_parts(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Resolve only the values with a `${...}` and those that they name: most values have none, and OmegaConf is slow.

    Return None when that fails; resolving the whole tree then gives the reasons.
    """
    flat = leaves(raw)
    made = {key: value for key, value in flat.items() if "${" in str(value)}
    needed, queue = dict(made), list(made)
    while queue:
        key = queue.pop()
        for name in references(key, str(flat[key])):
            for found in [name] if name in flat else [known for known in flat if known.startswith(f"{name}.")]:
                if found not in needed:
                    needed[found] = flat[found]
                    queue.append(found)
    part: dict[str, Any] = {}
    for key, value in needed.items():
        if lookup(raw, key) is not value:  # a name contains a dot
            return None
        put(part, key, value)
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.create(part), resolve=True)
    except OmegaConfBaseException:
        return None
    resolved = copy.deepcopy(raw)
    for key in made:
        put(resolved, key, lookup(plain, key))
    return resolved


def _failures(raw: dict[str, Any]) -> dict[str, str]:
    """Return the reason for each key whose `${...}` is malformed or, when none is, cannot be resolved."""
    made = {key: value for key, value in leaves(raw).items() if "${" in str(value)}
    failures = {}
    for key, value in made.items():
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            failures[key] = str(error).splitlines()[0]
    if failures:
        return failures
    config = OmegaConf.create(raw)
    for key in made:
        try:
            value = OmegaConf.select(config, key)
            if isinstance(value, Container):  # relative references in a list need its place in the tree
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            failures[key] = str(error).splitlines()[0]
    return failures


def _swap(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _swap(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_swap(item, old, new) for item in value]
    return new if value == old else value


def references(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys that the raw value at `key` interpolates; leading dots count blocks upwards."""
    for name in REFERENCE.findall(value) if isinstance(value, str) else []:
        dots = len(name) - len(name.lstrip("."))
        if dots == 0:
            yield name
        else:
            yield ".".join([*key.split(".")[:-dots], name.lstrip(".")])


def tainted_keys(tree: Mapping[str, Any], bad: set[str]) -> set[str]:
    """Return the keys of `bad` and all keys whose values interpolate them, directly or through others."""
    raw = leaves(tree)
    tainted = set(bad)
    grown = True
    while grown:
        grown = False
        for key, value in raw.items():
            if key not in tainted and any(under(reference, tainted) for reference in references(key, value)):
                tainted.add(key)
                grown = True
    return tainted


def origins(tree: Mapping[str, Any], wrong: set[str]) -> set[str]:
    """Return the keys of `wrong` whose values interpolate no other wrong key; all of them when they form a circle."""
    return {key for key in wrong if key not in tainted_keys(tree, wrong - {key})} or wrong


def under(key: str, keys: set[str]) -> bool:
    """Return whether the key or a block around it is among `keys`."""
    parts = key.split(".")
    return any(".".join(parts[: index + 1]) in keys for index in range(len(parts)))


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key, making blocks on the way."""
    *blocks, name = key.split(".")
    for block in blocks:
        if not isinstance(tree.get(block), dict):
            tree[block] = {}
        tree = tree[block]
    tree[name] = value


def drop(tree: Mapping[str, Any], key: str) -> None:
    """Remove a dotted key where it exists."""
    block, _, name = key.rpartition(".")
    parent = lookup(tree, block) if block else tree
    if isinstance(parent, dict):
        parent.pop(name, None)
