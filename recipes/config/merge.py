"""Layers of configuration files: the `defaults:` chain, overrides, which layer set each key, and interpolation.

Read YAML files and command-line values as plain data; every trap of YAML 1.1 is a problem that names its key.

YAML 1.1 reads `1e-6` as text, `4:00:00` as 14400, `0755` as 493, `no` as false, and keeps the last of two equal keys.
A value here is what it looks like, or a `Problem`.

Also the way back: a configuration as YAML with one line and one comment per key, to be read and diffed.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.keys.schema import INSTANCES, UNSET, lookup, show, upwards
from recipes.errors import Problem

COMMENT_COLUMN = 72
MAX_LINE = 110  # a longer list has an item per line


def scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return str(text).strip().removesuffix("\n...")


def yaml_lines(
    block: Mapping[str, Any], comment_of: Callable[[str], str] | None = None, prefix: str = ""
) -> Iterator[str]:
    """Yield a tree as YAML, one line per key, with what `comment_of` says about each dotted key that has a value."""
    depth = prefix.count(".")
    for name, value in block.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, Mapping) and value:
            if depth == 0:
                yield ""
            yield f"{indent}{name}:"
            yield from yaml_lines(value, comment_of, f"{key}.")
        else:
            comment = "" if comment_of is None else f"  # {comment_of(key)}"
            line = f"{indent}{name}: {scalar(value)}"
            if isinstance(value, list) and len(line) > MAX_LINE:
                yield f"{indent}{name}:{comment}"
                yield from (f"{indent}  - {scalar(item)}" for item in value)
            else:
                yield f"{line:<{COMMENT_COLUMN}}{comment}" if comment else line


# A reader takes it for a number; YAML 1.1 does so only with a dot and a sign.
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
DECIMAL_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


@dataclass(slots=True)
class Document:
    """One YAML mapping: its data, the line of every dotted key, and what is wrong with it."""

    name: str  # how messages call the file
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # 1-based
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: str) -> str:
        return f"{self.name}: {key}"


def read_yaml(path: Path, *, name: str) -> Document:
    """Read one file; a file that is absent, malformed or no mapping is a problem, not an exception."""
    document = Document(name=name)
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        wrong = f"this file cannot be read ({reason})"
        document.problems.append(Problem(where=name, wrong=wrong, fix="check the path"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        document.problems.append(
            Problem(
                where=f"{name}{line}",
                wrong=f"this is not YAML ({reason})",
                fix="correct the syntax on or above this line",
            )
        )
    else:
        if isinstance(node, yaml.MappingNode):
            try:
                document.data = _mapping(node, "", document)
            except RecursionError:
                fix = "delete the alias"
                document.problems.append(Problem(where=name, wrong="an alias stands inside its own anchor", fix=fix))
        elif node is not None:
            document.problems.append(
                Problem(where=name, wrong="this file has no `key: value` lines", fix="see configs/grpo_base.yaml")
            )
    return document


def parse_value(text: str, *, where: str) -> tuple[Any, list[Problem]]:
    """Read the right side of `key=value` as YAML. Unlike in a file, `1e-6` is a number: nothing else reads it."""
    document = Document(name="command line")
    if EXPONENT.fullmatch(text):
        return float(text), []
    try:
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        return None, [Problem(where=where, wrong=f"{text!r} is not YAML ({reason})", fix="quote it")]
    if node is None:
        fix = "write null for no value, '' for an empty text"
        return None, [Problem(where=where, wrong="there is nothing after '='", fix=fix)]
    value = _value(node, where.removeprefix("command line: "), document)
    return value, document.problems


def _mapping(node: yaml.MappingNode, prefix: str, document: Document) -> dict[str, Any]:
    """Return a mapping as a dict with text keys; a key that stands twice is a problem."""
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "<a key that is no text>"
        key = f"{prefix}.{name}" if prefix else name
        line = key_node.start_mark.line + 1
        if name in data:
            document.problems.append(
                Problem(
                    where=f"{document.name}:{line}: {key}",
                    wrong=f"this key stands here a second time, first on line {document.lines[key]}",
                    fix="delete one of them",
                )
            )
            continue
        document.lines[key] = line
        data[name] = _value(value_node, key, document)
    return data


def _value(node: yaml.Node, key: str, document: Document) -> Any:
    """Return the plain value of a node, recording traps under the dotted `key`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, document)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{key}[{index}]", document) for index, item in enumerate(node.value)]
    value, problem = _scalar(node)
    if problem is not None:
        got, expected, fix = problem
        document.problems.append(Problem(where=document.where(key), got=got, expected=expected, fix=fix))
    return value


Trap = tuple[str, str, str]  # what was got, what is expected, the fix


def _scalar(node: yaml.Node) -> tuple[Any, Trap | None]:
    """Return the value of a scalar and, where YAML reads something else than a reader would, the trap."""
    text, kind = str(node.value), node.tag.rsplit(":", 1)[-1]
    if node.style:  # type: ignore[attr-defined]  # quoted or block: text, whatever it looks like
        return text, None
    if kind == "null":
        return None, None
    readers = {"str": _text, "bool": _bool, "int": _int, "float": _float}
    if kind in readers:
        return readers[kind](text)
    return text, (f"{text}, which YAML reads as a {kind}", "a plain value", f'quote it: "{text}"')


def _text(text: str) -> tuple[Any, Trap | None]:
    if EXPONENT.fullmatch(text):
        return float(text), (f"{text}, which YAML reads as text", "a number with a dot", f"write {_with_dot(text)}")
    return text, None


def _bool(text: str) -> tuple[bool, Trap | None]:
    value = text.lower() in ("true", "yes", "on")
    if text.lower() in ("true", "false"):
        return value, None
    word = str(value).lower()
    return value, (f"{text}, which YAML reads as {word}", "true or false", f'write {word}, or quote it: "{text}"')


def _int(text: str) -> tuple[int, Trap | None]:
    if DECIMAL_INT.fullmatch(text):
        return int(text.replace("_", "")), None
    value = int(yaml.safe_load(text))
    return value, (f"{text}, which YAML reads as {value}", "a decimal number", f'write {value}, or quote it: "{text}"')


def _float(text: str) -> tuple[float, Trap | None]:
    value = float(yaml.safe_load(text))
    if ":" in text:
        return value, (f"{text}, which YAML reads as {value}", "a decimal number", f'quote it: "{text}"')
    if not math.isfinite(value):
        return value, (text, "a finite number", "use null where no bound is meant")
    return value, None


def _with_dot(text: str) -> str:
    """Return `1e-6` as `1.0e-6` and `3E5` as `3.0e+5`, which YAML 1.1 reads as numbers."""
    mantissa, exponent = re.split("[eE]", text)
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    exponent = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f"{mantissa}e{exponent}"


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every dotted key that is not a block; an empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping) and value:
            flat.update(leaves(value, key))
        else:
            flat[key] = value
    return flat


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
