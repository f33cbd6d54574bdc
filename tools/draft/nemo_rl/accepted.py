"""Which keys NeMo RL's GRPO entrypoint reads, from configs/engines/nemo_rl_keys.yaml.

Its own configuration classes accept any further key, so it never says that a key is misspelled. We do.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.config.keys.schema import CONFIG_DIR, INSTANCES, SERVER_KINDS, UNSET, lookup, show
from recipes.config.merge import leaves, read_yaml
from recipes.errors import ConfigError, Problem, nearest

KEYS = CONFIG_DIR / "engines" / "nemo_rl_keys.yaml"
# A name that the code of a checkout declares in a class or asks a mapping for.
_NAMED = re.compile(r"""["'](\w+)["']|^\s+(\w+)\s*:""", re.MULTILINE)
_WORD = re.compile(r"\w+")
_SUFFIX = re.compile(r"_(?:config|cfg|configs|kwargs)$")
_ROOT, _ROOTS = "MasterConfig", ("config", "cfg", "master_config")  # the whole configuration: its class, its names
KINDS = f"one of {', '.join(SERVER_KINDS)}"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "block": (Mapping,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True)
class NemoRlKey:
    """One key of NeMo RL."""

    types: tuple[str, ...]
    is_required: bool
    has_default: bool
    default: Any  # what an absent key means

    def takes(self, value: Any) -> bool:
        """Return whether the value has one of the types, as has one that is not known yet (`${...}`, `???`)."""
        if isinstance(value, str) and ("${" in value or value == UNSET):
            return True
        if isinstance(value, bool):
            return "boolean" in self.types
        return any(isinstance(value, _TYPES[name]) for name in self.types)

    def __str__(self) -> str:
        return " or ".join(self.types)


@functools.cache
def _document() -> Mapping[str, Any]:
    document = read_yaml(KEYS, name=KEYS.name)
    if document.problems:
        raise ConfigError(document.problems)
    return document.data


@functools.cache
def accepted() -> dict[str, NemoRlKey]:
    """Return every key by its dotted name, blocks with free keys included."""
    return {key: _parse(str(text)) for key, text in leaves(_document()["keys"]).items()}


def _parse(text: str) -> NemoRlKey:
    """Return the key that `required integer or null = 5` describes."""
    types, _, default = text.partition(" = ")
    is_required = types.startswith("required ")
    names = tuple(types.removeprefix("required ").split(" or "))
    return NemoRlKey(names, is_required, bool(default), yaml.safe_load(default) if default else None)


@functools.cache
def gym_files() -> Mapping[str, tuple[str, ...]]:
    """Return the instances that each known file of NeMo Gym declares."""
    return {path: tuple(names) for path, names in _document()["files"].items()}


def instances_of(path: str) -> tuple[str, ...]:
    """Return the instances that a file of NeMo Gym declares; none for a file that is not known."""
    return gym_files().get(path, ())


@functools.cache
def names_in(home: Path) -> frozenset[str]:
    """Return the names in the code of a checkout of NeMo RL; none where this machine has no such checkout."""
    files = sorted((home / "nemo_rl").rglob("*.py"))
    found = (_NAMED.findall(file.read_text(encoding="utf-8", errors="replace")) for file in files)
    return frozenset(quoted or declared for names in found for quoted, declared in names)


@functools.cache
def pairs_in(home: Path) -> frozenset[tuple[str, str]]:
    """Return (block, name) of every key that the code of a checkout declares in that block, or asks that block for."""
    found: set[tuple[str, str]] = set()
    fields: dict[str, dict[str, set[str]]] = {}  # class -> field -> the names in its type
    bases: dict[str, list[str]] = {}
    for file in sorted((home / "nemo_rl").rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                own = {line.target.id: set(_WORD.findall(ast.unparse(line.annotation))) for line in lines
                       if isinstance(line.target, ast.Name)}  # fmt: skip
                fields.setdefault(node.name, {}).update(own)
                bases.setdefault(node.name, []).extend(
                    name for base in node.bases for name in _WORD.findall(ast.unparse(base))
                )
            elif (asked := _asked(node)) is not None:
                found |= {(block, asked[1]) for block in _block_names(asked[0])}
    for name, own in fields.items():
        if name.endswith(_ROOT):
            found |= {("", field) for field in own}
        for field, types in own.items():
            todo = [one for one in types if one in fields]
            for one in todo:  # grows by the bases of each
                found |= {(field, inner) for inner in fields[one]}
                todo += [base for base in bases[one] if base in fields and base not in todo]
    return frozenset(found)


def _asked(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Return the mapping that an expression asks, and the key: `mapping["key"]`, `mapping.get("key")`, `it.key`."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        value, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        value, key = node.func.value, node.args[0]
    elif isinstance(node, ast.Attribute):
        return node.value, node.attr
    return (value, key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _block_names(mapping: ast.expr) -> set[str]:
    """Return the names that a mapping has in code: of `c["grpo"]`, `c.grpo` and `grpo_config` it is `grpo`."""
    asked = _asked(mapping)
    name = asked[1] if asked is not None else mapping.id if isinstance(mapping, ast.Name) else ""
    return {name, _SUFFIX.sub("", name)} - {""} | ({""} if name in _ROOTS else set())


def is_read_in(home: Path | None, key: str) -> bool:
    """Return whether a checkout reads a key that NeMo RL got after the version of the list.

    Each name of it must be one of the block before it: that another block has the name proves nothing.
    """
    names = ["", *key.split(".")]
    return home is not None and all(pair in pairs_in(home) for pair in itertools.pairwise(names))


def is_known(key: str) -> bool:
    """Return whether NeMo RL reads the key: one of its own, one inside a block with free keys, or a block."""
    return _spec(key) is not None or key in _blocks()


@functools.cache
def _blocks() -> frozenset[str]:
    """Return the keys of NeMo RL that hold further ones."""
    parts = [key.split(".") for key in accepted()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


def _spec(key: str) -> NemoRlKey | None:
    """Return the description of a key or, inside a block with free keys, of that block."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        spec = accepted().get(".".join(parts[:end]))
        if spec is not None:
            return spec if end == len(parts) or "block" in spec.types else None
    return None


def key_problem(key: str, value: Any, where: str) -> Problem | None:
    """Return what is wrong with one key outside the server instances."""
    spec = _spec(key)
    if spec is None:
        if isinstance(value, Mapping) and is_known(key):  # an empty block of NeMo RL
            return None
        return Problem(where=where, wrong="NeMo RL does not read this key", fix=_near(key))
    if key in accepted() and not spec.takes(value):
        return Problem(where=where, got=show(value), expected=str(spec), fix="correct the value")
    return None


def _near(key: str) -> str:
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in accepted() if k.rpartition(".")[0] == parent}
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(accepted())}
    for names, cutoff in ((siblings, 0.6), (elsewhere, 0.85)):
        close = nearest(name, names, cutoff=cutoff)
        if close is not None:
            return f"did you mean {names[close]}?"
    return "delete it"


def check(tree: Mapping[str, Any], sources: Mapping[str, str], home: Path | None = None) -> list[Problem]:
    """Return one problem per key of a complete configuration that is unknown, of the wrong type or missing."""
    problems = []
    flat = leaves(tree)
    for key, value in flat.items():
        where = f"{sources.get(key, 'the configuration')}: {key}"
        is_newer = not is_known(key) and is_read_in(home, key)
        found = None if instance_of(key) or is_newer else key_problem(key, value, where)
        problems += [found] if found else []
    for key, spec in accepted().items():
        block, value = key.rpartition(".")[0], lookup(tree, key)
        is_there = isinstance(value, Mapping) or key in flat
        if spec.is_required and not is_there and isinstance(lookup(tree, block) if block else tree, Mapping):
            problems.append(Problem(where=key, wrong="NeMo RL needs this key", fix=f"set it to: {spec}"))
    return [*problems, *_instance_problems(tree, sources)]


def instance_of(key: str) -> str | None:
    """Return the server instance that a key of env.nemo_gym belongs to, None for any other key."""
    if not key.startswith(f"{INSTANCES}."):
        return None
    name = key.removeprefix(f"{INSTANCES}.").partition(".")[0]
    return None if is_known(f"{INSTANCES}.{name}") else name


def _instance_problems(tree: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Problem]:
    gym: Mapping[str, Any] = lookup(tree, INSTANCES) or {}
    listed = [str(path) for path in gym.get("config_paths") or []]
    for path in listed:
        if path not in gym_files() and (close := nearest(path, gym_files(), cutoff=0.9)):
            where, wrong = f"{INSTANCES}.config_paths", f"NeMo Gym has no file {path}"
            yield Problem(where=where, wrong=wrong, fix=f"did you mean {close}?")
    own = {name: block for name, block in gym.items() if instance_of(f"{INSTANCES}.{name}")}
    declared = {name for path in listed for name in gym_files().get(path, ())} | {
        name for name, block in own.items() if _is_complete(block)
    }
    can_tell = all(path in gym_files() for path in listed)
    for name, block in own.items():
        key = f"{INSTANCES}.{name}"
        where = next((f"{source}: {key}" for known, source in sources.items() if known.startswith(f"{key}.")), key)
        if not isinstance(block, Mapping):
            fix = _near(key)
            yield Problem(where=where, got=show(block), expected="a server instance, or a key of NeMo RL", fix=fix)
            continue
        if can_tell and name not in declared:
            close = nearest(name, declared)
            fix = f"did you mean {close}?" if close else "add the file that declares it to config_paths"
            yield Problem(where=where, wrong="no file of config_paths declares this instance", fix=fix)
        yield from _setting_problems(where, block)


def server_types() -> list[tuple[str, str]]:
    """Return kind and name of every type of server whose settings are listed."""
    return [(kind, server) for kind in SERVER_KINDS for server in _document()["servers"].get(kind, {})]


def settings_of_type(kind: str, server: str) -> Iterable[str]:
    """Return the settings that are listed for a type of server."""
    return list(_document()["servers"][kind][server])


def is_setting(key: str) -> bool:
    """Return whether the server of an instance reads this setting; of a server that is not known, every one."""
    kind, server, name = (*key.removeprefix(f"{INSTANCES}.").split(".")[1:4], "", "", "")[:3]
    known = _document()["servers"].get(kind, {}).get(server)
    return known is None or not name or name in (*known, *_document()["servers"]["common"])


def _is_complete(block: Any) -> bool:
    """Return whether an instance needs no file of NeMo Gym: it copies another, or names its program."""
    if not isinstance(block, Mapping):
        return False
    servers = [server for kind in SERVER_KINDS for server in (block.get(kind) or {}).values()]
    return "_copy" in block or any(isinstance(server, Mapping) and "entrypoint" in server for server in servers)


def _setting_problems(where: str, block: Mapping[str, Any]) -> Iterator[Problem]:
    servers = _document()["servers"]
    for kind, named in block.items():
        if kind == "_copy":
            continue
        if kind not in SERVER_KINDS or not isinstance(named, Mapping):
            yield Problem(where=f"{where}.{kind}", got=show(named), expected=KINDS, fix="name the kind of server")
            continue
        for server, settings in named.items():
            known = servers[kind].get(server)
            if known is None or not isinstance(settings, Mapping):  # a server of the user's own is checked by itself
                continue
            for name in settings:
                if name not in (*known, *servers["common"]):
                    close = nearest(name, [*known, *servers["common"]])
                    fix = f"did you mean {close}?" if close else "delete it"
                    wrong = "the server does not read this setting"
                    yield Problem(where=f"{where}.{kind}.{server}.{name}", wrong=wrong, fix=fix)
