"""A stage in the form of NeMo RL's own GRPO entrypoint, and what that form cannot say. Pure: no files are written.

    our resolved configuration -> rules of configs/engines/nemo_rl.yaml -> NeMo RL's tree, notes, refusals

"Theirs" is NeMo RL's here. `to_theirs` and `to_ours` translate what no table can state, in the two directions;
tools/draft/nemo_rl/import_file.py translates back.

A launch of NeMo RL's own entrypoint: configuration with what only a launch knows, environment, command.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config.keys.schema import CONFIG_DIR, INSTANCES, SERVER_KINDS, declared, lookup, show, upwards
from recipes.config.load import LoadedConfig
from recipes.config.merge import (
    OVERRIDE,
    UNSET_TOKEN,
    Layers,
    drop,
    leaves,
    parse_value,
    put,
    read_yaml,
    source_of,
    yaml_lines,
)
from recipes.errors import ConfigError, Problem
from recipes.files import write_atomically
from tools.draft.contract import Contract
from tools.draft.launch import INPUTS, OVERRIDES
from tools.draft.nemo_rl.accepted import check, instance_of, instances_of, is_known, is_read_in, key_problem

FILE_NAME = "nemo_rl.yaml"
PARSER = "policy.generation.vllm_cfg.reasoning_parser_plugin"
VLLM = "policy.generation.vllm_kwargs"
INPUT_KEYS = {OVERRIDES[variable]: variable for variable in INPUTS}
SIZES = ("cluster", "policy.generation.colocated", "env.nemo_gym.num_gpu_nodes")  # node totals follow from these


def exported_for(loaded: LoadedConfig, contract: Contract, run_dir: Path) -> ExportedConfig:
    """Return the configuration in NeMo RL's form, with the values that only a launch knows."""
    plain = export(loaded, Path(contract["NEMO_RL_DIR"]))
    tree, sources = copy.deepcopy(dict(plain.tree)), dict(plain.sources)
    changes: dict[str, Any] = {
        "checkpointing.checkpoint_dir": str(run_dir / lookup(tree, "checkpointing.checkpoint_dir")),
        "logger.log_dir": str(run_dir / "logs"),
        "env.nemo_gym.uv_venv_dir": contract["GYM_VENV_DIR"],
        # Engines run where Ray was started, which is not their checkout.
        PARSER: str(Path(contract["NEMO_RL_DIR"]) / lookup(tree, PARSER)),
    }
    if lookup(tree, "policy.tokenizer.name") == lookup(tree, "policy.model_name"):
        changes["policy.tokenizer.name"] = (
            "${policy.model_name}"  # the job may replace it at its start by a newer export
        )
    if contract.is_set("ENABLE_MTP_INFERENCE"):
        changes |= {
            "policy.generation.vllm_cfg.enable_prefix_caching": False,
            f"{VLLM}.enable_chunked_prefill": True,
            f"{VLLM}.max_num_batched_tokens": int(contract["MAX_NUM_BATCHED_TOKENS"]),
            f"{VLLM}.mamba_cache_mode": "align",
            f"{VLLM}.speculative_config": {
                "method": "mtp",
                "num_speculative_tokens": int(contract["NUM_SPECULATIVE_TOKENS"]),
            },
        }
        drop(tree, f"{VLLM}.compilation_config.cudagraph_capture_sizes")
    for key, value in changes.items():
        put(tree, key, value)
        sources[key] = "launch"
    return ExportedConfig(tree=tree, sources=sources, notes=plain.notes, problems=plain.problems, engine=plain.engine)


def write_config(loaded: LoadedConfig, contract: Contract, run_dir: Path) -> Path:
    """Write the file that the driver reads into the run directory; return its path."""
    path = run_dir / FILE_NAME
    lines = render_export(loaded, exported_for(loaded, contract, run_dir))
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def environment(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NeMo RL's driver needs; those that the user has set win."""
    values = {"cache": contract["PERSISTENT_CACHE"], "name": contract["EXP_NAME"], "venvs": contract["GYM_VENV_DIR"]}
    return {name: environ.get(name) or text.format(**values) for name, text in rules()["environment"].items()}


def driver_words(contract: Contract, environ: Mapping[str, str], run_dir: Path) -> tuple[str, ...]:
    """Return the driver's command after the interpreter; the user's own overrides come last and win.

    The start weights stand in the command because a job that waits for its parent stage replaces them when it begins.
    """
    return (
        *("-m", "tools.draft.nemo_rl.driver"),
        f"--home={contract['NEMO_RL_DIR']}",
        f"--config={run_dir / FILE_NAME}",
        *(["--trust-remote-code"] if contract.is_set("TRUST_REMOTE_CODE") else []),
        *(f"--env={name}={value}" for name, value in environment(contract, environ).items()),
        "--",
        f"policy.model_name={json.dumps(contract['MODEL_PATH'])}",
        *contract.extra_overrides,
    )


def override_problems(exported: ExportedConfig, words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each word that NeMo RL's override parser refuses, or takes although nothing reads the key."""
    tree = exported.tree
    for word in words:
        where, match = f"EXTRA_HYDRA_ARGS: {word}", OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            fix = "write key=value, +key=value, ++key=value or ~key"
            yield Problem(where=where, wrong=f"this is not an override of {exported.engine}", fix=fix)
            continue
        key, sign = match["key"], match["sign"] or ""
        if any(key == name or key.startswith(f"{name}.") for name in SIZES):
            fix = f"give {key}=... to super_launch.sh or as ARGS of make, where nodes are counted"
            yield Problem(where=where, wrong="this key decides how many nodes the job asks for", fix=fix)
            continue
        if (variable := INPUT_KEYS.get(key)) is not None:
            wrong = f"{variable} sets this key, and what it names is checked and recorded"
            yield Problem(where=where, wrong=wrong, fix=f"set {variable} in its place")
            continue
        is_there = _has(tree, key)
        if sign in ("", "~") and not is_there:
            fix = f"write ++{key}=..." if is_known(key) or instance_of(key) else "correct the name"
            yield Problem(where=where, wrong="there is no such key", fix=fix)
        elif sign == "+" and is_there:
            yield Problem(where=where, wrong="this key is there already", fix=f"write {key}=...")
        elif sign != "~" and not instance_of(key):
            value, unreadable = parse_value(match["value"], where=where)
            found = None if unreadable else key_problem(key, value, where)
            yield from [found] if found else unreadable


def _has(tree: Mapping[str, Any], key: str) -> bool:
    block, _, name = key.rpartition(".")
    parent = lookup(tree, block) if block else tree
    return isinstance(parent, Mapping) and name in parent


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
    engine: str  # name and version


@functools.cache
def rules() -> Mapping[str, Any]:
    """Return the parsed translation rules."""
    document = read_yaml(RULES, name=SOURCE)
    if document.problems:
        raise ConfigError(document.problems)
    return document.data


_PART = re.compile(r"^(MAJOR|MINOR) = (\d+)", re.MULTILINE)


def installed_version(home: Path) -> str:
    """Return MAJOR.MINOR of a checkout of NeMo RL, empty where it does not say."""
    info = home / "nemo_rl" / "package_info.py"
    parts = dict(_PART.findall(info.read_text(encoding="utf-8"))) if info.is_file() else {}
    return f"{parts['MAJOR']}.{parts['MINOR']}" if len(parts) == 2 else ""


def engine(home: Path | None = None) -> str:
    """Return the name of the engine for messages: with the version of its checkout, where that is another one."""
    known, there = str(rules()["version"]), installed_version(home) if home else ""
    return f"NeMo RL {known if not there or known.startswith(f'{there}.') else there}"


def export(loaded: LoadedConfig, home: Path | None = None) -> ExportedConfig:
    """Translate a configuration that has no problems; values given at launch may still be missing in it.

    A checkout of NeMo RL at `home` may read more keys than the version of the list: those pass unchanged.
    """
    layers = Layers()
    notes: list[Problem] = []
    lacking = {f"{INSTANCES}.{name}" for names in gym_lacks(loaded).values() for name in names}
    for key, value in leaves(loaded.tree).items():
        if not lacking.isdisjoint(upwards(key)):
            continue
        instead, different = None if is_read_in(home, key) else _missing(key), _different(key, value)
        if instead is not None:
            notes.append(_note(loaded, key, "has no such setting", instead, home))
        elif key == CONFIG_PATHS:
            layers.add(_nested(key, gym_files(value)), source_of(loaded.sources, key) or SOURCE)
        elif value is not None or key not in rules()["leave_out_null"]:
            mapped = rules()["values"].get(key, {}).get("null" if value is None else str(value), value)
            raw = lookup(loaded.raw, key) if UNSET_TOKEN in str(value) else mapped  # made from what a launch gives
            layers.add(_nested(key, raw), source_of(loaded.sources, key) or SOURCE)
        if different is not None:
            notes.append(_note(loaded, key, "treats it differently", different, home))
    for path, names in gym_lacks(loaded).items():
        wrong, fix = f"the NeMo Gym of {engine(home)} has no {names[0]}", "leave out its rows, or use ENGINE=native"
        notes.append(Problem(where=f"{source_of(loaded.sources, CONFIG_PATHS)}: {path}", wrong=wrong, fix=fix))
    tree, sources = layers.tree, layers.sources
    for theirs, ours in rules()["copy"].items():
        put(tree, theirs, lookup(loaded.tree, ours))
        sources[theirs] = source_of(loaded.sources, ours) or SOURCE
    to_theirs(tree, sources)
    for further in additions(tree):
        layers.add_under(further, SOURCE)
        for key in [key for key, value in leaves(further).items() if value == {} and lookup(tree, key) is None]:
            put(tree, key, {})
    problems = (*_value_problems(loaded, home), *_file_problems(loaded), *check(tree, sources, home))
    return ExportedConfig(tree=tree, sources=sources, notes=tuple(notes), problems=problems, engine=engine(home))


def gym_lacks(loaded: LoadedConfig) -> dict[str, list[str]]:
    """Return our files whose environments NeMo Gym lacks, each with the instances that it declares."""
    listed = lookup(loaded.tree, CONFIG_PATHS) or []
    return {path: rules()["gym_lacks"][path]["instances"] for path in listed if path in rules()["gym_lacks"]}


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
        if path not in rules()["gym_files"] and path not in rules()["gym_lacks"]:
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


def _note(loaded: LoadedConfig, key: str, how: str, instead: str, home: Path | None) -> Problem:
    wrong = f"{engine(home)} {how} (value {show(lookup(loaded.tree, key))}): it {instead}"
    where = f"{source_of(loaded.sources, key)}: {key}"
    return Problem(where=where, wrong=wrong, fix="accept that, or use ENGINE=native")


def _value_problems(loaded: LoadedConfig, home: Path | None) -> Iterator[Problem]:
    """Yield a problem for each value with which NeMo RL would train differently."""
    for key, rule in rules()["ours_only"].items():
        value = lookup(loaded.tree, key)
        if "neutral" in rule and value != rule["neutral"] and not is_read_in(home, key):
            yield _refused(loaded, key, rule["neutral"], f"it {rule['instead']}", home)
    for key, rule in rules()["refused"].items():
        is_met = not rule.get("asynchronous") or _is_asynchronous(loaded.tree)
        value = lookup(loaded.tree, key)
        is_wrong = value == rule["never"] if "never" in rule else value != rule["only"]
        if is_wrong and is_met:
            yield _refused(loaded, key, rule["only"], rule["because"], home)
    for key, value in leaves(loaded.tree).items():
        if is_instance(key) or is_read_in(home, key):
            continue
        if key not in rules()["ours_only"] and not is_known(key):
            wrong = f"{engine(home)} has no such key, and no rule says how to leave it out (value {show(value)})"
            where = f"{source_of(loaded.sources, key)}: {key}"
            yield Problem(where=where, wrong=wrong, fix=f"add a rule to {SOURCE}")


def _is_asynchronous(tree: Mapping[str, Any]) -> bool:
    return bool(lookup(tree, IS_ASYNC)) and lookup(tree, AGE) != 0


def _refused(loaded: LoadedConfig, key: str, only: Any, reason: str, home: Path | None) -> Problem:
    return Problem(
        where=f"{source_of(loaded.sources, key)}: {key}",
        got=show(lookup(loaded.tree, key)),
        expected=f"{show(only)} ({engine(home)})",
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
    yield f"# {exported.engine}: {' <- '.join(loaded.files)}, with {SOURCE}"
    yield from yaml_lines(exported.tree, lambda key: source_of(exported.sources, key) or "")
    yield ""
    for note in exported.notes:
        yield f"# not the same: {note}"
    for problem in exported.problems:
        yield f"# refused: {problem}"
