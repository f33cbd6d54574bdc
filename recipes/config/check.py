"""Check a resolved configuration against configs/schema.json; report every wrong key, what it accepts, and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from recipes.config.keys.schema import (
    INSTANCES,
    SERVER_KINDS,
    UNSET,
    KeyProblem,
    declared,
    describe,
    schema,
    server_node,
    settings_of,
    show,
    upwards,
)
from recipes.config.keys.upstream import upstream_hint
from recipes.errors import nearest


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
    fix = f"did you mean {close}?" if close else "give the `url` at which the server of your own type answers"
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
