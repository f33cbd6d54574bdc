"""A launch as far as its variables and its configuration describe it, before it is planned.

    stage table -> environment contract -> configuration -> sizes

Nothing is raised. A missing variable leaves open only what follows from it. Problems are collected: `plan.py` makes no
command of a draft with errors, and the doctor examines everything else all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from recipes.config.keys.derive import Derived, derive
from recipes.config.keys.schema import lookup
from recipes.config.load import LoadedConfig, load_config, refusals, unset
from recipes.config.merge import COMMAND_LINE
from recipes.config.stages import Stage, find_stage
from recipes.config.tree import Config
from recipes.errors import InputError, Problem
from tools.planning.contract import Contract, read_contract
from tools.planning.findings import Finding, as_finding, as_findings
from tools.planning.profiles import FILLED_BY_PROFILE, read_profile
from tools.planning.stage_env import FILLED, choice_problems, stage_environment
from tools.planning.walltime import walltime_problems

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = {
    "MODEL_PATH": "policy.model_name",
    "TRAIN_PATH": "data.train.data_path",
    "VAL_PATH": "data.validation.data_path",
    "SIF_DIR": "sif_dir",
    "WANDB_PROJ": "logger.wandb.project",
    "EXP_NAME": "logger.wandb.name",
}  # variable -> the key that it sets
INPUTS = ("MODEL_PATH", "TRAIN_PATH", "VAL_PATH", "SIF_DIR")  # that are checked, mounted and recorded by the variable
FORMATTER = "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents.container_formatter"
SIZE_KEYS = (
    "cluster",
    "policy.generation.colocated",
    "env.nemo_gym.num_gpu_nodes",
)  # node totals come from these


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One launch as far as it is known."""

    root: Path  # the checkout
    stage: Stage | None  # None when the environment alone says what to run
    environ: Mapping[str, str]  # with what the stage table adds
    contract: Contract
    overrides: tuple[str, ...]  # those of the environment, then the user's
    loaded: LoadedConfig | None  # None without a file to load
    config: Config | None  # wrong keys have the base's value
    sizes: Derived | None  # None when a key that they are computed from is wrong
    findings: tuple[Finding, ...]  # of variables and configuration
    job_variables: Mapping[str, str]  # of the cluster's profile: what the job gets beside the environment
    profile_variables: tuple[str, ...]  # names of all that the profile sets for the job, also those set in the shell

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run; None without a name."""
        name = self.contract["EXP_NAME"]
        return (self.root / self.contract["RESULTS_DIR"] / name).resolve() if name else None

    def path(self, variable: str) -> Path | None:
        """Return the path that a variable gives; None when it is not set."""
        return Path(self.contract[variable]) if self.contract[variable] else None


def draft_launch(stage: str, overrides: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> Draft:
    """Gather what is known of a launch."""
    profile = read_profile(environ, root)
    variables, environ = profile.job_variables(environ), profile.over(environ)
    findings: list[Finding] = []
    row: Stage | None = None
    if stage:
        findings += as_findings("ENV002", choice_problems(environ))
        try:
            row = find_stage(stage)
            if not findings:
                environ = stage_environment(row.id, environ, root)
        except InputError as error:
            findings += as_findings("ENV003", error.problems)
    contract, wrong = read_contract(environ)
    # When the stage table or the profile has an error, the variables that it would have filled are not missing, too.
    given = (*(FILLED if findings else ()), *(FILLED_BY_PROFILE if profile.problems else ()))
    findings = [*as_findings("ENV005", profile.problems), *as_findings("ENV006", profile.notes), *findings]
    findings += [finding for finding in wrong if finding.code != "ENV001" or finding.problem.where not in given]
    extra = contract.extra_overrides if contract["ENGINE"] == "native" else []  # another engine reads its own
    everything = (*launch_overrides(contract, row), *profile.overrides, *overrides, *extra)
    loaded = load_config((root / contract["CONFIG_PATH"]).resolve(), everything) if contract["CONFIG_PATH"] else None
    findings += _config_findings(contract, loaded)
    config = loaded.repaired if loaded else None
    return Draft(
        root=root,
        stage=row,
        environ=environ,
        contract=contract,
        overrides=everything,
        loaded=loaded,
        config=config,
        sizes=derive(config) if config and loaded and not _is_size_wrong(loaded.problems) else None,
        findings=tuple(findings),
        job_variables=variables,
        profile_variables=tuple(sorted(profile.job_environment)),
    )


def _config_findings(contract: Contract, loaded: LoadedConfig | None) -> list[Finding]:
    if loaded is None:
        return []
    missing = {key for variable, key in OVERRIDES.items() if not contract[variable]}
    findings = as_findings("CFG001", loaded.problems)
    if loaded.repaired is None:  # without the base every key would be missing
        return findings
    findings += as_findings("ENV008", _other_inputs(contract, loaded))
    findings += as_findings("CFG002", [problem for problem in unset(loaded) if _key(problem) not in missing])
    if contract["ENGINE"] == "native":
        known = {finding.problem.where for finding in findings}
        findings += as_findings("CFG003", [problem for problem in refusals(loaded) if problem.where not in known])
    if not contract.is_local:
        must_save_by = loaded.repaired.checkpointing.checkpoint_must_save_by
        for problem in walltime_problems(must_save_by, contract["SLURM_TIME_LIMIT"]):
            findings.append(as_finding("ENV002" if problem.where == "SLURM_TIME_LIMIT" else "CFG004", problem))
    return findings


def _other_inputs(contract: Contract, loaded: LoadedConfig) -> Iterator[Problem]:
    """Yield a problem for each input that an override takes from elsewhere; null, for none, is no other input."""
    for variable in INPUTS:
        key, given = OVERRIDES[variable], contract[variable]
        used = lookup(loaded.tree, key)
        if given and isinstance(used, str) and Path(used).absolute() != Path(given):
            fix = f"set {variable}={used} in its place, which is also checked and recorded"
            yield Problem(where=f"{COMMAND_LINE}: {key}", got=used, expected=f"{variable}, {given}", fix=fix)


def _key(problem: Problem) -> str:
    return problem.where.rpartition(": ")[2]


def _is_size_wrong(problems: Sequence[Problem]) -> bool:
    keys = [_key(problem) for problem in problems]
    return any(key == name or key.startswith(f"{name}.") for key in keys for name in SIZE_KEYS)


def launch_overrides(contract: Contract, stage: Stage | None = None) -> list[str]:
    """Return what the environment says about the configuration; the user's own overrides come after and win."""
    overrides = [f"{key}={as_text(contract[name])}" for name, key in OVERRIDES.items() if contract[name]]
    names = contract["CONTAINER_FORMATTER"]
    if names and stage is not None and "sif" in stage.requires:
        overrides.append(f"{FORMATTER}={names if names.startswith('[') else as_text(names)}")  # JSON is YAML, too
    return overrides + ([f"grpo.seed={contract['SEED']}"] if contract["SEED"] else [])


def as_text(value: str) -> str:
    """Return a text as YAML that is read as the same text: a run may be named 42."""
    try:
        return value if yaml.safe_load(value) == value else json.dumps(value)
    except yaml.YAMLError:
        return json.dumps(value)
