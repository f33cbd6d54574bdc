"""Cluster profiles: `make stage1.1 CLUSTER=my-cluster` takes what env.toml says of that cluster.

    [my-cluster]               a profile; `extends = "other"` takes over what it does not say itself
    executor = "slurm"
    account = "lab"            the field names are those of the Nemotron CLI's profiles; `runtime` is ours

A profile fills variables of the launcher that are not set: the environment wins. The file is ENV_TOML, else
NEMOTRON_ENV_FILE as for that CLI, else env.toml in the checkout. See configs/env.example.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.cluster.ports import SANDBOX_PORT
from recipes.config.keys.schema import show
from recipes.config.merge import display_name
from recipes.errors import Problem, nearest
from tools.draft.contract import CHOICES, set_variables

TEXT, NUMBER, SWITCH = "a text", "a whole number >= 1", "true or false"
ANY_TEXT = "a text, which may be empty"
TEXTS, TABLE, SANDBOX = "a list of texts", "a table of texts and numbers", "a table with container, port, command"
KINDS: Mapping[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str) and value != "",
    ANY_TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
    SWITCH: lambda value: isinstance(value, bool),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(item, str) and item for item in value),
    TABLE: lambda value: (
        isinstance(value, dict) and all(isinstance(item, str | int | float) for item in value.values())
    ),
    SANDBOX: lambda value: isinstance(value, dict) and all(isinstance(item, str | int) for item in value.values()),
}
FIELDS = {
    "extends": TEXT,
    "executor": TEXT,
    "account": TEXT,
    "partition": TEXT,
    "run_partition": TEXT,
    "batch_partition": TEXT,
    "nodes": NUMBER,
    "spare_nodes": NUMBER,
    "gpus_per_node": NUMBER,
    "gres": ANY_TEXT,
    "ntasks_per_node": NUMBER,
    "nproc_per_node": NUMBER,
    "cpus_per_task": NUMBER,
    "mem": TEXT,
    "exclusive": SWITCH,
    "time": TEXT,
    "container": TEXT,  # or container_image
    "runtime": TEXT,
    "mounts": TEXTS,
    "startup_commands": TEXTS,
    "env_vars": TABLE,
    "sandbox": SANDBOX,
    "persistent_cache": TEXT,
    "sif_dir": TEXT,
    "apptainer": SWITCH,
    "tunnel": TEXT,
    "host": TEXT,
    "user": TEXT,
    "identity": TEXT,
    "remote_job_dir": TEXT,
    "build_partition": TEXT,
    "build_time": TEXT,
    "build_cache_dir": TEXT,
}
VARIABLES = {
    "account": "SLURM_ACCOUNT",
    "partition": "SLURM_PARTITION",
    "batch_partition": "SLURM_PARTITION",  # a launch is a batch job: this one wins
    "nodes": "SBATCH_NUM_NODES",
    "spare_nodes": "SPARE_NODES",
    "gres": "SBATCH_GRES",
    "time": "SLURM_TIME_LIMIT",
    "container": "CONTAINER",
    "runtime": "CONTAINER_RUNTIME",
    "persistent_cache": "PERSISTENT_CACHE",
    "sif_dir": "SIF_DIR",
}
FILLED_BY_PROFILE = (*dict.fromkeys(VARIABLES.values()), "SANDBOX_CONTAINER")
WITHOUT_EFFECT = {
    "run_partition": "a launch is a batch job, which goes to batch_partition or partition",
    "ntasks_per_node": "the job takes whole nodes and starts one task on each",
    "nproc_per_node": "the configuration says how many workers a node has",
    "cpus_per_task": "the job takes whole nodes",
    "mem": "the job takes all memory of its nodes",
    "exclusive": "the job always takes whole nodes",
    "apptainer": "the image of the SWE stage has it",
    "tunnel": "sbatch is called on this machine, which must be a login node of the cluster",
    "host": "sbatch is called on this machine",
    "user": "sbatch is called on this machine",
    "identity": "sbatch is called on this machine",
    "remote_job_dir": "runs lie in RESULTS_DIR",
    "build_partition": "images are not built by a launch",
    "build_time": "images are not built by a launch",
    "build_cache_dir": "images are not built by a launch",
}
SETTINGS = ("wandb", "artifacts", "cache", "cli")  # tables of the file that are no profiles
EXECUTORS = ("slurm", "local")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class Profile:
    """What a profile says, as variables of the launcher; empty without CLUSTER."""

    variables: dict[str, str] = field(default_factory=dict)  # of the launcher
    job_environment: dict[str, str] = field(default_factory=dict)  # of the job
    origins: dict[str, str] = field(default_factory=dict)  # variable -> the field that says it
    overrides: list[str] = field(default_factory=list)  # of the configuration; the user's come after and win
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)  # fields that have no effect here

    def over(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ`, with the values of the profile for what it does not set."""
        return self.variables | self.job_environment | set_variables(environ)

    def named(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the launch that the profile has set, each with the field that says it."""
        given = set_variables(environ)
        return {name: where for name, where in self.origins.items() if name not in given}

    def job_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what the job gets beside the variables of `environ`, which it inherits."""
        return {name: value for name, value in self.job_environment.items() if not environ.get(name)}


def with_variables(argv: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command that gives its job these variables: Slurm's own option, or `env` on this machine.

    A job needs those of the shell, too, also where a site sets SBATCH_EXPORT to keep them back.
    """
    program, *words = argv
    further = [f"{name}={value}" for name, value in variables.items()]
    if program == "sbatch":
        return (program, f"--export={','.join(['ALL', *further])}", *words)
    return ("env", *further, *argv) if further else tuple(argv)


def read_profile(environ: Mapping[str, str], root: Path) -> Profile:
    """Return the profile that CLUSTER names, with everything that is wrong with it."""
    profile, name = Profile(), environ.get("CLUSTER", "")
    if not name:
        return profile
    path = root / (environ.get("ENV_TOML") or environ.get("NEMOTRON_ENV_FILE") or "env.toml")
    tables = _read(path, profile)
    if tables is None:
        return profile
    where = display_name(path)
    fields = _inherited(name, tables, where, profile)
    fields = _checked(fields, profile)
    _fill(fields, profile)
    wandb = tables.get("wandb")
    if isinstance(wandb, dict):
        texts = {key: value for key, value in wandb.items() if isinstance(value, str)}
        profile.variables |= {"WANDB_PROJ": texts["project"]} if "project" in texts else {}
        profile.job_environment |= {"WANDB_ENTITY": texts["entity"]} if "entity" in texts else {}
    return profile


def _read(path: Path, profile: Profile) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "copy configs/env.example.toml to env.toml, or set ENV_TOML, or unset CLUSTER"
        problem = Problem(where=f"ENV_TOML={path}", wrong=f"the file cannot be read: {error.strerror}", fix=fix)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = Problem(where=display_name(path), wrong=f"this is not TOML: {error}", fix="correct the syntax")
    profile.problems.append(problem)
    return None


Fields = dict[str, tuple[Any, str]]  # field -> value, and where it stands


def _inherited(name: str, tables: Mapping[str, Any], where: str, profile: Profile) -> Fields:
    """Return the fields of a profile and of those that it extends; the nearer one wins, tables are merged."""
    known = [key for key, value in tables.items() if isinstance(value, dict) and key not in SETTINGS]
    fields: Fields = {}
    seen: list[str] = []
    asked = "CLUSTER"
    while name:
        if name not in known or name in seen:
            close = nearest(name, known)
            there = f"did you mean {close}?" if close else f"choose from: {', '.join(known)}" if known else "add it"
            circle = Problem(where=asked, wrong=f"{name} extends itself through others", fix="remove one `extends`")
            missing = Problem(where=asked, wrong=f"{where} has no profile {name}", fix=there)
            profile.problems.append(circle if name in seen else missing)
            break
        seen.append(name)
        if {"container", "container_image"} <= set(tables[name]):
            wrong, fix = "container and container_image are two names of one field", "remove one of them"
            profile.problems.append(Problem(where=f"{where}: {name}", wrong=wrong, fix=fix))
        for field_name, value in tables[name].items():
            key = "container" if field_name == "container_image" else field_name
            if key not in fields:
                fields[key] = (value, f"{where}: {name}.{field_name}")
            elif isinstance(value, dict) and isinstance(fields[key][0], dict):
                fields[key] = ({**value, **fields[key][0]}, fields[key][1])
        asked, parent = f"{where}: {name}.extends", tables[name].get("extends")
        name = parent if isinstance(parent, str) else ""
    return fields


def _checked(fields: Fields, profile: Profile) -> Fields:
    """Return the fields that exist and have a value of their type."""
    right = {}
    for key, (value, where) in fields.items():
        if key not in FIELDS:
            close = nearest(key, [*FIELDS, "container_image"])
            fix = f"did you mean {close}?" if close else "delete it; see configs/env.example.toml"
            profile.problems.append(Problem(where=where, wrong="profiles have no such field", fix=fix))
        elif not KINDS[FIELDS[key]](value):
            quoted = FIELDS[key] == TEXT and not isinstance(value, str | dict | list)
            fix = f'quote it: {key} = "{value}"' if quoted else "correct it; see configs/env.example.toml"
            got = str(value) if quoted else show(value)
            profile.problems.append(Problem(where=where, got=got, expected=FIELDS[key], fix=fix))
        else:
            right[key] = (value, where)
    return right


def _fill(fields: Fields, profile: Profile) -> None:
    """Translate the fields."""
    values = {key: value for key, (value, _) in fields.items()}
    for key in (key for key in VARIABLES if key in values):
        profile.variables[VARIABLES[key]] = str(values[key])
        profile.origins[VARIABLES[key]] = fields[key][1]
    if executor := values.get("executor"):
        profile.variables["LAUNCHER"] = executor
    if mounts := values.get("mounts"):
        profile.variables["EXTRA_MOUNTS"] = ",".join(mounts)
    if gpus := values.get("gpus_per_node"):
        profile.overrides.append(f"cluster.gpus_per_node={gpus}")
    sandbox = values.get("sandbox") or {}
    for key, variable in (("container", "SANDBOX_CONTAINER"), ("command", "SANDBOX_COMMAND")):
        if key in sandbox:
            profile.variables[variable] = str(sandbox[key])
    profile.job_environment |= {name: str(value) for name, value in (values.get("env_vars") or {}).items()}
    for key, (value, where) in fields.items():
        if key in WITHOUT_EFFECT:
            profile.notes.append(
                Problem(where=where, wrong=f"{show(value)} has no effect", fix=f"remove it: {WITHOUT_EFFECT[key]}")
            )
        profile.problems.extend(_refused(key, value, where))


def _refused(key: str, value: Any, where: str) -> list[Problem]:
    """Return a problem for a value of the right type that this launcher cannot use."""
    choices = {"executor": EXECUTORS, "runtime": CHOICES["CONTAINER_RUNTIME"]}.get(key)
    if choices and value not in choices:
        close = nearest(value, choices)
        fix = f"did you mean {close}?" if close else "choose one of those: this recipe starts nothing else"
        return [Problem(where=where, got=value, expected=" or ".join(choices), fix=fix)]
    if key == "startup_commands" and value:
        wrong = f"nothing is installed when a job starts, so {show(value)} would not run"
        return [Problem(where=where, wrong=wrong, fix="build it into the image, and remove it here")]
    if key == "mounts":
        items = [item for item in value if "," in item or item.startswith("__")]
        expected = "SOURCE[:TARGET[:ro]]"
        return [Problem(where=where, got=item, expected=expected, fix="write one mount per item") for item in items]
    if key == "sandbox":
        return _refused_sandbox(value, where)
    if key == "env_vars":
        return _refused_variables(value, where)
    return []


def _refused_sandbox(table: Mapping[str, Any], where: str) -> list[Problem]:
    known = ("container", "port", "command")
    problems = []
    for key in (key for key in table if key not in known):
        close = nearest(key, known)
        fix = f"did you mean {close}?" if close else "delete it"
        problems.append(Problem(where=f"{where}.{key}", got=key, expected=" or ".join(known), fix=fix))
    if table.get("port", SANDBOX_PORT) != SANDBOX_PORT:
        fix = "remove it: recipes/cluster/ports.py fixes the port"
        got = show(table["port"])
        problems.append(Problem(where=f"{where}.port", got=got, expected=str(SANDBOX_PORT), fix=fix))
    return problems


def _refused_variables(table: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for name in table:
        if not NAME.fullmatch(name):
            fix = "use letters, digits and _"
            problems.append(Problem(where=f"{where}.{name}", got=name, expected="a variable's name", fix=fix))
        elif SECRET.search(name):
            fix = f"export {name} in your shell: a job inherits it, and no command line shows it"
            problems.append(Problem(where=f"{where}.{name}", wrong="a profile must not hold a secret", fix=fix))
        elif "," in str(table[name]) or "\n" in str(table[name]):
            fix = f"export {name} in your shell, which a job inherits"
            wrong = f"sbatch would split {show(table[name])} at its comma or line end"
            problems.append(Problem(where=f"{where}.{name}", wrong=wrong, fix=fix))
    return problems
