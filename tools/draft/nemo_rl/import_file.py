"""Turn a stage file of NeMo RL into a small overlay of one of our stages, and list what has no counterpart here.

    python -m tools.draft.nemo_rl.import_file --file their.yaml > configs/mine.yaml      over the nearest of our stages
    python -m tools.draft.nemo_rl.import_file --file their.yaml --base stage2.2/small    over this one

The overlay goes to standard output, to be saved under configs/; the list to standard error, one line per key.
Exit status: 0, also when the list is long; 2 when the file cannot be read.

A stage file of NeMo RL as an overlay of the nearest of our stages, with what has no counterpart here.

    their file and its `defaults:` -> one tree -> our keys -> compared with our files -> the overlay of the nearest

"Theirs" is NeMo RL's here. The rules are those of tools/draft/nemo_rl/export.py, read backwards.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.keys.schema import CONFIG_DIR, UNSET, declared, describe, lookup, show
from recipes.config.keys.upstream import upstream_hint
from recipes.config.load import PLATFORMS, SCALES, LoadedConfig, config_path, find_stage, load_config, require_valid
from recipes.config.merge import UNSET_TOKEN, display_name, drop, leaves, put, read_yaml, resolve, scalar, yaml_lines
from recipes.errors import ConfigError, Problem
from tools.command_line import exit_status
from tools.draft.nemo_rl.accepted import accepted, instance_of, is_known, is_setting
from tools.draft.nemo_rl.export import CONFIG_PATHS, is_instance, rules, to_ours

KEEPS_ALL = 1_000_000  # checkpoints: the number with which published files keep all
COMPLETE = ("policy.megatron_cfg", "grpo.num_prompts_per_step", "cluster.num_nodes")  # a whole stage has these
ROUNDS = 5
_ABSENT = object()
_VARIABLE = re.compile(r"\$\{oc\.env:([^,}]+)[^}]*\}")


@dataclass(slots=True)
class TranslatedFile:
    """One configuration of NeMo RL under our names."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)  # our dotted key -> value
    lost: dict[str, str] = field(default_factory=dict)  # their dotted key -> what to do about it
    lost_values: dict[str, Any] = field(default_factory=dict)  # key below one of `lost` -> its value there
    is_complete: bool = (
        True  # a key it leaves out has the default of NeMo RL's code, not a value from a file that we lack
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedOverlay:
    """The overlay that gives one of our files the values of theirs."""

    base: LoadedConfig
    overlay: Mapping[str, Any]  # nested; `~key` deletes
    lost: Mapping[str, str]  # their dotted key -> what to do about it
    lost_values: Mapping[str, Any]  # key below one of `lost` -> its value there


def read_file(path: Path, *, is_partial: bool = False) -> TranslatedFile:
    """Return a file of theirs under our names; raises `ConfigError` when it or one of its parents cannot be read.

    With `is_partial` a parent that does not exist is left out.
    """
    tree, missing = _read(path, is_partial=is_partial)
    theirs = translate(tree, display_name(path))
    theirs.is_complete = not missing and all(lookup(tree, key) is not None for key in COMPLETE)
    theirs.lost |= {f"defaults: {name}": "not read; the base stands for it" for name in missing}
    if theirs.is_complete:
        _add_defaults(theirs)
    return theirs


def import_over(theirs: TranslatedFile, bases: Sequence[LoadedConfig]) -> ImportedOverlay:
    """Return the overlay over the base with the fewest differences."""
    base = min(bases, key=lambda base: len(_differences(base.tree, _with_files(theirs, base)[0])))
    values, lost = _with_files(theirs, base)
    overlay = _overlay(base, theirs, values)
    return ImportedOverlay(base=base, overlay=overlay, lost=theirs.lost | lost, lost_values=theirs.lost_values)


def _read(path: Path, *, is_partial: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a file merged with its parents as NeMo RL does it, and the parents that are not there."""
    for name, function in (("div", lambda a, b: a / b), ("max", lambda a, b: max(a, b))):
        OmegaConf.register_resolver(name, function, replace=True)
    missing: list[str] = []
    plain = OmegaConf.to_container(_merged(path, missing, [], is_partial=is_partial), resolve=False)
    return dict(plain), missing  # type: ignore[arg-type]


def _merged(path: Path, missing: list[str], seen: list[Path], *, is_partial: bool) -> DictConfig:
    where = display_name(path)
    try:
        config = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise _unreadable(where, f"this file cannot be read ({reason})", "check the path, or the YAML") from error
    if not isinstance(config, DictConfig) or not config:
        raise _unreadable(where, "this file has no `key: value` lines", "give a configuration of NeMo RL")
    parents = config.pop("defaults", [])
    below = OmegaConf.create({})
    for name in [parents] if isinstance(parents, str) else parents:
        parent = Path(path.parent, str(name))
        if parent.resolve() in [known.resolve() for known in (*seen, path)]:
            raise _unreadable(f"{where}: defaults", f"{name} is among the parents already", "remove it here")
        if not parent.is_file():
            if not is_partial:
                fix = "put it there, or name the stage of ours that stands for it: BASE=..."
                raise _unreadable(f"{where}: defaults", f"{name} does not exist", fix)
            missing.append(str(name))
            continue
        below = _over(below, _merged(parent, missing, [*seen, path], is_partial=is_partial))
    return _over(below, config)


def _over(below: DictConfig, config: DictConfig) -> DictConfig:
    """Lay one file over another; a block with `_override_: true` replaces the one below."""
    for name, block in config.items_ex(resolve=False):
        if isinstance(block, DictConfig) and block.pop("_override_", False):
            below.pop(name, None)
    merged = OmegaConf.merge(below, config)
    assert isinstance(merged, DictConfig)
    return merged


def _unreadable(where: str, wrong: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where=where, wrong=wrong, fix=fix))


def translate(tree: Mapping[str, Any], name: str) -> TranslatedFile:
    """Return a tree of NeMo RL under our names, and what has no name here."""
    theirs = TranslatedFile(name)
    if isinstance(lookup(tree, "data.train"), list):
        raise _unreadable(f"{name}: data.train", "several datasets are listed", "blend them into one file first")
    raw: dict[str, Any] = _mapped(tree, lambda text: _VARIABLE.sub(r"$\1", text))
    for key, variable in rules()["given_at_launch"].items():
        value = lookup(raw, key)
        if value not in (None, UNSET):
            theirs.lost[key] = f"given at launch by {variable}"
            if str(value).startswith("/"):  # also in other keys that repeat it
                raw = _mapped(raw, functools.partial(_unset, given=str(value)))
            put(raw, key, UNSET)  # and so in values made from it
    plain, failures = resolve(raw)
    for key, reason in failures.items():
        drop(plain, key)
        theirs.lost[key] = f"cannot be resolved: {reason}"
    to_ours(plain)
    _restore_copies(plain, theirs)
    blocks = (rules()["add"], *rules()["add_with"].values())
    engine_own = {key: value for block in blocks for key, value in leaves(block).items()}
    for key, value in leaves(plain).items():
        ours = rules()["older_names"].get(key, key)
        if key in rules()["given_at_launch"] or value == lookup(plain, "policy.model_name"):
            continue
        if ours in declared() or instance_of(ours) or ours.startswith(_free_blocks()):
            _take(theirs, ours, _our_value(ours, value))
        elif engine_own.get(key, _ABSENT) != value:
            theirs.lost |= dict([_advice(key, value)])
            theirs.lost_values[key] = value
    if "checkpointing.keep_top_k" in theirs.values and theirs.values["checkpointing.keep_top_k"] is None:
        theirs.values["checkpointing.metric_name"] = None  # all are kept, so none is ranked
    return theirs


def _take(theirs: TranslatedFile, key: str, value: Any) -> None:
    """Add a value, unless our schema refuses it."""
    node = declared().get(key)
    if node is None or value == UNSET or Draft202012Validator(node).is_valid(value):
        theirs.values[key] = value
    else:
        theirs.lost[key] = f"{show(value)}: here it is {describe(node)}; the base's value stays"
        theirs.lost_values[key] = value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a tree with every text changed."""
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _unset(text: str, *, given: str) -> str:
    """Return a path that a launch gives, or one below it, as our files have it."""
    if text == given:
        return UNSET
    return f"{UNSET_TOKEN}{text.removeprefix(given)}" if text.startswith(f"{given}/") else text


def _restore_copies(plain: dict[str, Any], theirs: TranslatedFile) -> None:
    """Give our key the value that NeMo RL's code reads: its own, or that of the older copy where it has none."""
    for copied, ours in rules()["copy"].items():
        value = lookup(plain, copied)
        if value is not None and lookup(plain, ours) is None:
            put(plain, ours, value)
        elif value is not None and lookup(plain, ours) != value:
            theirs.lost[copied] = f"{show(value)} is not what they read: that is {ours}"
        drop(plain, copied)


@functools.cache
def _free_blocks() -> tuple[str, ...]:
    """Return the beginnings of our keys inside blocks with free keys."""
    blocks = []
    for key, node in declared().items():
        kinds = node.get("type", [])
        if "object" in ([kinds] if isinstance(kinds, str) else kinds) and "properties" not in node:
            blocks.append(f"{key}.")
    return tuple(blocks)


def _our_value(key: str, value: Any) -> Any:
    if key == "checkpointing.keep_top_k" and isinstance(value, int) and value >= KEEPS_ALL:
        return None
    for ours, mapped in rules()["values"].get(key, {}).items():
        if value == mapped:
            return {"null": None, "False": False, "True": True}.get(ours, ours)
    return rules()["same_values"].get(key, {}).get(str(value), value)


def _advice(key: str, value: Any) -> tuple[str, str]:
    """Return what to do about a key without a counterpart, under its name or that of a whole block without one."""
    for name in (key, *_parents(key)):
        if hint := upstream_hint(name):
            return (name, f"{show(value)}: {hint}" if name == key else hint)
    if is_known(key):
        return key, f"{show(value)}: nothing here does that; leave it out, or give it to ENGINE=nemo_rl"
    return key, f"{show(value)}: NeMo RL reads it nowhere either; leave it out"


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _add_defaults(theirs: TranslatedFile) -> None:
    """Add the defaults of NeMo RL's code for keys that a complete file leaves out."""
    said = {*theirs.values, *theirs.lost}
    for key, spec in accepted().items():
        if spec.has_default and key in declared() and not any(k == key or k.startswith(f"{key}.") for k in said):
            _take(theirs, key, _our_value(key, spec.default))


def _with_files(theirs: TranslatedFile, base: LoadedConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values with our environment files in place of NeMo Gym's, and what has no counterpart in this base."""
    values: dict[str, Any] = dict(theirs.values)
    lost: dict[str, str] = {}
    listed = values.pop(CONFIG_PATHS, None)
    own = list(lookup(base.tree, CONFIG_PATHS) or [])
    theirs_of = rules()["gym_files"] | {path: lacking["files"] for path, lacking in rules()["gym_lacks"].items()}
    if listed is not None and set(listed) != {file for path in own for file in theirs_of.get(path, [])}:
        ours = {file: path for path, files in theirs_of.items() for file in files}
        lost |= {
            f"{CONFIG_PATHS}: {file}": "no environment of ours; leave its rows out" for file in set(listed) - set(ours)
        }
        kept = [path for path in own if not theirs_of.get(path) or set(theirs_of[path]) & set(listed)]
        values[CONFIG_PATHS] = list(dict.fromkeys([*kept, *(ours[file] for file in listed if file in ours)]))
    for key in [key for key in values if is_instance(key) and not _is_there(base.tree, key)]:
        if not is_setting(key):
            lost[key] = f"{show(values[key])}: no server of NeMo Gym reads it; leave it out"
        if not is_setting(key) or values[key] in (None, False, "app.py"):
            del values[key]
    return values, lost


def _is_there(tree: Mapping[str, Any], key: str) -> bool:
    block, _, name = key.rpartition(".")
    return name in (lookup(tree, block) or {})


def _differences(tree: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    flat = leaves(tree)
    return [key for key, value in values.items() if flat.get(key, lookup(tree, key)) != value]


def _overlay(base: LoadedConfig, theirs: TranslatedFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest overlay: a computed value is written only where it differs from what is computed."""
    raw = copy.deepcopy(dict(base.raw))
    chosen: dict[str, Any] = {}
    for round_ in range(ROUNDS):
        tree = resolve(raw)[0]
        wrong = _differences(tree, values)
        if round_ == 0:  # first the values that the base states, then the computed ones that still differ
            wrong = [key for key in wrong if "${" not in str(lookup(base.raw, key))] or wrong
        if not wrong:
            break
        for key in wrong:
            chosen[key] = values[key]
            put(raw, key, copy.deepcopy(values[key]))
    overlay: dict[str, Any] = {}
    for key, value in chosen.items():
        put(overlay, key, value)
    for key in _surplus(base, theirs, values):
        block, _, name = key.rpartition(".")
        put(overlay, f"{block}.~{name}", None)
    return overlay


def _surplus(base: LoadedConfig, theirs: TranslatedFile, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of blocks with free keys that the base has and a complete configuration of NeMo RL lacks."""
    if not theirs.is_complete:
        return
    for key, value in leaves(base.tree).items():
        is_free = value is not None and key.startswith(_free_blocks())
        if is_free and not any(known == key or key.startswith(f"{known}.") for known in values):
            yield key


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print the overlay and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="a configuration of NeMo RL")
    parser.add_argument(
        "--base", metavar="STAGE[/SCALE[/PLATFORM]]", help="write the overlay for this stage, not for the nearest one"
    )
    args = parser.parse_args(argv)
    candidates = [base_path(args.base)] if args.base else overlays()
    theirs = read_file(args.file, is_partial=args.base is not None)
    bases = [load_config(path) for path in candidates]
    for base in bases:
        require_valid(base)
    imported = import_over(theirs, bases)
    text = "\n".join(render(args.file.name, imported)) + "\n"
    print(text, end="")
    for key, advice in imported.lost.items():
        print(f"config-import: not taken: {key}: {advice}", file=sys.stderr)
    for problem in problems_of(text):
        print(f"config-import: to correct: {problem}", file=sys.stderr)
    return 0


def base_path(name: str) -> Path:
    """Return the file that --base names."""
    stage, _, where = name.partition("/")
    scale, _, platform = where.partition("/")
    for value, choices in ((scale, SCALES), (platform, PLATFORMS)):
        if value and value not in choices:
            expected = f"one of {', '.join(choices)}"
            raise ConfigError(
                Problem(where="--base", got=value, expected=expected, fix="write STAGE[/SCALE[/PLATFORM]]")
            )
    return config_path(find_stage(stage, where="BASE"), scale or "prod", platform or "h100")


def overlays() -> list[Path]:
    """Return every file that has a parent; those of configs/ itself come first and win a tie."""
    paths = sorted(CONFIG_DIR.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return [path for path in paths if "defaults" in read_yaml(path, name=path.name).data]


def render(name: str, imported: ImportedOverlay) -> Iterator[str]:
    """Yield the overlay as YAML, each value with that of the base."""
    parent = os.path.relpath(imported.base.path, CONFIG_DIR)
    yield f"# {name} of NeMo RL, to be saved in configs/: what differs from {parent}"
    yield f"defaults: {parent}"
    yield from yaml_lines(imported.overlay, lambda key: f"there {there(imported, key)}")


def there(imported: ImportedOverlay, key: str) -> str:
    """Return what the base has at a key of the overlay."""
    return scalar(lookup(imported.base.tree, key.replace("~", "")))


def problems_of(text: str) -> list[Problem]:
    """Return what is wrong with an overlay that would be saved under configs/."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "imported.yaml"
        name = text.partition("\ndefaults: ")[2].partition("\n")[0]
        path.write_text(
            text.replace(f"\ndefaults: {name}\n", f"\ndefaults: {CONFIG_DIR / name}\n", 1), encoding="utf-8"
        )
        found = load_config(path).problems
    return [replace(problem, where=problem.where.replace(str(path), path.name)) for problem in found]


if __name__ == "__main__":
    sys.exit(main())
