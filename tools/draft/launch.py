"""A launch as far as its variables and its configuration describe it, before it is planned.

    stage table -> environment contract -> configuration -> sizes

Nothing is raised. A missing variable leaves open only what follows from it. Problems are collected: `launch/command.py`
makes no command of a launch with errors, and the doctor examines everything else all the same.

Fill the environment contract from the stage table: `make stage1.1 SCALE=tiny` needs no variable set by hand.

A variable that is already set wins. The start weights are the parent stage's last complete export, for the first
stage the SFT checkpoint of the scale, which only scale tiny can make by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from recipes.config.keys.derive import SWE_AGENTS, Derived, derive
from recipes.config.keys.schema import lookup
from recipes.config.load import (
    PLATFORMS,
    SCALES,
    LoadedConfig,
    Stage,
    config_path,
    find_stage,
    load_config,
    load_stages,
    refusals,
    unset,
)
from recipes.config.merge import COMMAND_LINE
from recipes.config.tree import Config
from recipes.errors import InputError, LaunchError, Problem
from tools.draft.contract import Contract, read_contract, set_variables, with_own_config
from tools.draft.findings import Finding, as_finding, as_findings, errors
from tools.draft.profiles import FILLED_BY_PROFILE, read_profile
from tools.draft.slurm import walltime_problems
from tools.draft.snapshot import CodeVersion, snapshot_path

TINY_MODEL, WIDE_MODEL = "models/tiny-nemotron-h-sft", "models/tiny-wide-sft"
HEADS_MODEL = "models/tiny-nemotron-h-heads-sft"  # that of stage 4: the chain's model is dense and has no heads
TEACHERS = "models/tiny-teacher-"  # and what one teaches: of distillation, whose student is the tiny model
TINY_DENSE_MODEL = "models/tiny-qwen3-sft"  # with which `make bench` measures
TOOLS_MODEL = "models/tiny-tools-sft"  # that of Nano: it also calls tools that do not exist
OWN_TINY_ROWS = {"distillation": "data/tiny-taught", "nano3-dpo": "data/tiny-tools"}  # by the name of the stage
OWN_TINY_MODELS = {"healing": HEADS_MODEL, "distillation": TINY_MODEL, "nano3-grpo": TOOLS_MODEL}
TINY_DATA = "data/tiny"
OF_WIDE = ("swe1", "swe2", "rlhf")  # stages whose tasks only the wide warm-up has seen
OWN_TINY_DATA = ("swe1", "swe2", "rlhf", "nano")  # blends of the stages whose rows data/tiny does not have
TINY_IMAGES = "images"  # below the rows of a stage whose tasks need images
WIDE = "wide"  # the other blend of stages 1.1 to 1.3 at scale tiny
WIDE_CONFIG = "wide.yaml"  # beside the configuration that the stage table names
EXPORT = Path("checkpoints") / "latest" / "hf"  # below a run
FILLED = ("EXP_NAME", "CONFIG_PATH", "TRAIN_PATH", "VAL_PATH", "MODEL_PATH")


def scale_of(environ: Mapping[str, str]) -> str:
    """Return the scale that is asked for."""
    return environ.get("SCALE") or "prod"


def platform_of(environ: Mapping[str, str]) -> str:
    """Return the platform that is asked for."""
    return environ.get("PLATFORM") or "h100"


def choice_problems(environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem for a scale or a platform that does not exist."""
    asked = (("SCALE", scale_of(environ), SCALES), ("PLATFORM", platform_of(environ), PLATFORMS))
    problems = [
        Problem(where=variable, got=value, expected=" or ".join(choices), fix="correct the value")
        for variable, value, choices in asked
        if value not in choices
    ]
    if scale_of(environ) == "tiny" and (blend := environ.get("BLEND")) not in (None, "", "tiny", WIDE):
        fix = "leave it out, or set TRAIN_PATH and VAL_PATH"
        problems.append(Problem(where="BLEND", got=str(blend), expected=f"{WIDE} at scale tiny", fix=fix))
    return problems


def is_wide_blend(environ: Mapping[str, str]) -> bool:
    """Whether the wide blend of scale tiny is asked for."""
    return scale_of(environ) == "tiny" and environ.get("BLEND") == WIDE


def tiny_data(stage: Stage, *, is_wide: bool) -> str:
    """Return the directory of a stage's rows at scale tiny."""
    if stage.name in OWN_TINY_ROWS:
        return OWN_TINY_ROWS[stage.name]
    if stage.blend in OWN_TINY_DATA:
        return f"{TINY_DATA}-{stage.blend}"
    return f"{TINY_DATA}-{WIDE}" if is_wide else TINY_DATA


def own_tiny_model(stage: Stage, environ: Mapping[str, str]) -> str | None:
    """Return the model that a stage starts from at scale tiny whatever came before it; None where its parent's."""
    return OWN_TINY_MODELS.get(stage.name) if scale_of(environ) == "tiny" else None


def parents_of(stage: Stage) -> Iterator[str]:
    """Yield the ids of a stage's parent, of that one's parent, and so on."""
    while stage.after:
        yield stage.after
        stage = find_stage(stage.after)


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Return the named stages in the order of the stage table; without a name the first and all that descend from it.

    Raises `LaunchError`.
    """
    table, problems, chosen = load_stages(), [], set()
    for name in names:
        try:
            chosen.add(find_stage(name, table, where="STAGES").id)
        except InputError as error:
            problems += error.problems
    if problems:
        raise LaunchError(problems)
    chosen |= set() if names else {stage.id for stage in table if table[0].id in (stage.id, *parents_of(stage))}
    return [stage for stage in table if stage.id in chosen]


def start_of(stages: Sequence[Stage], environ: Mapping[str, str], root: Path) -> str:
    """Return the model from which stages run one after the other begin at scale tiny; empty where the table says it.

    Only the wide warm-up has seen tools, repositories and preferences: a chain that comes to them starts from it.
    """
    is_long = scale_of(environ) == "tiny" and stages[0].after is None and any(one.name in OF_WIDE for one in stages)
    return str(root / WIDE_MODEL) if is_long and own_tiny_model(stages[0], environ) is None else ""


def experiment(stage: Stage, scale: str, *, is_wide: bool = False) -> str:
    """Return the default name of a stage's run."""
    name = stage.experiment if scale == "prod" else f"{stage.experiment}-{scale}"
    return f"{name}-{WIDE}" if is_wide else name


def suffix_of(environ: Mapping[str, str], own_file: Path) -> str:
    """Return what tells a run with a configuration of the user's choice from that of the stage's own file."""
    given = environ.get("CONFIG_PATH", "")
    given = "" if given and Path(given).resolve() == own_file.resolve() else given
    return "-" + re.sub(r"[^A-Za-z0-9._-]", "-", Path(given).stem) if given else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDefaults:
    """What the stage table says of a launch, before the variables that the user has set."""

    stage: Stage
    name: str  # of the run
    config: Path
    data: Path  # directory of the rows
    results: Path
    parent: str  # name of the run whose export it starts from, without what a configuration of the user's choice adds
    model: Path | None  # start weights; None when only the user knows


def stage_defaults(stage: Stage, environ: Mapping[str, str], root: Path) -> StageDefaults:
    """Return what the stage table knows; raises `LaunchError` where a stage has no such scale or platform.

    With a configuration of the user's choice the parent may have had the same.
    """
    scale, is_wide = scale_of(environ), is_wide_blend(environ)
    results = root / (environ.get("RESULTS_DIR") or "results")
    config = config_path(stage, scale, platform_of(environ))
    own = suffix_of(environ, config)
    has_wide_rows = is_wide and stage.name.startswith("rlvr")
    data = root / (tiny_data(stage, is_wide=has_wide_rows) if scale == "tiny" else f"data/{stage.blend}")
    good = data.with_name(f"{data.name}-good")  # the rows whose images `make sif-check` found good
    own_model = own_tiny_model(stage, environ)
    parent = experiment(find_stage(stage.after), scale, is_wide=is_wide) if stage.after and not own_model else ""
    tiny = own_model or (WIDE_MODEL if is_wide else TINY_MODEL)
    first = root / tiny if scale == "tiny" else None
    run = f"{parent}{own}" if (results / f"{parent}{own}").is_dir() else parent
    return StageDefaults(
        stage=stage,
        name=f"{experiment(stage, scale, is_wide=is_wide)}{own}",
        config=config.with_name(WIDE_CONFIG) if has_wide_rows else config,
        data=good if "sif" in stage.requires and (good / "manifest.json").is_file() else data,
        results=results,
        parent=parent,
        model=results / run / EXPORT if parent else first,
    )


def stage_environment(defaults: StageDefaults, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with what the stage table knows added to it."""
    stage, data = defaults.stage, defaults.data
    filled = {
        "EXP_NAME": defaults.name,
        "CONFIG_PATH": str(defaults.config),
        "TRAIN_PATH": str(data / "train-split.jsonl"),
        "VAL_PATH": str(data / "val-split.jsonl"),
    }
    if scale_of(environ) == "tiny" and "sif" in stage.requires:
        filled["SIF_DIR"] = str(data / TINY_IMAGES)
    if defaults.model:
        filled["MODEL_PATH"] = str(defaults.model)
    given = set_variables(environ)
    if stage.container == "swe" and "SWE_CONTAINER" in given:
        given["CONTAINER"] = given["SWE_CONTAINER"]
    return filled | given | {"STAGE": stage.id}


def newer_parents(defaults: StageDefaults, environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem where another run of the parent stage has saved later than the one that is taken by default.

    A run with a configuration of the user's choice has its name behind the stage's (`suffix_of`).
    """
    stage, results, name, model = defaults.stage, defaults.results, defaults.parent, defaults.model
    if not name or model is None or set_variables(environ).get("MODEL_PATH"):
        return []
    ends = [path.name.removeprefix(name) for path in results.glob(f"{name}*")]
    of_other_scales = tuple(f"-{word}" for word in (*SCALES, WIDE))
    runs = [
        results / f"{name}{end}" for end in ends if not end or (end[0] == "-" and not end.startswith(of_other_scales))
    ]
    saved = {run / EXPORT: when for run in runs if (when := _saved_at(run / EXPORT))}
    newest = max(saved, key=lambda path: saved[path], default=model)
    if saved.get(newest, 0.0) <= saved.get(model, 0.0):
        return []
    taken = f"{model}, which {'is older' if model in saved else 'is not there'}"
    wrong = f"not set, so that the stage starts from {taken}; another run of {stage.after} has saved {newest}"
    fix = f"set MODEL_PATH={newest}, or, to take the other one, MODEL_PATH={model}"
    return [Problem(where="MODEL_PATH", wrong=wrong, fix=fix)]


def _saved_at(export: Path) -> float:
    """Return when the checkpoint of an export was completed; 0 where there is none."""
    complete = export.parent.resolve() / "COMPLETE"
    return complete.stat().st_mtime if complete.is_file() else 0.0


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
class Launch:
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
    job_variables: Mapping[str, str]  # what the job gets beside the environment
    profile_variables: tuple[str, ...]  # names of all that the profile sets for the job, also those set in the shell

    def require_whole(self) -> tuple[LoadedConfig, Derived, Path]:
        """Return configuration, sizes and run directory; raises `LaunchError` with what leaves no command."""
        in_the_way = [finding.problem for finding in errors(self.findings) if not finding.kind.has_command]
        if in_the_way or self.loaded is None or self.sizes is None or self.run_dir is None:
            raise LaunchError(in_the_way)
        return self.loaded, self.sizes, self.run_dir

    @property
    def runs_in_checkout(self) -> bool:
        """Whether the job runs from the checkout itself, not from a copy of it."""
        return self.contract.is_local or self.contract.is_set("SKIP_CODE_SNAPSHOT")

    def code_dir(self, code: CodeVersion) -> Path:
        """Return where the job runs: in its copy of this code, or in the checkout itself."""
        if self.runs_in_checkout:
            return self.root
        home = self.root / self.contract["CODE_SNAPSHOT_DIRNAME"] / self.contract["EXP_NAME"]
        return snapshot_path(home, code, reuse_newest=not self.contract.is_set("REFRESH_CODE_SNAPSHOT"))

    @property
    def swe_agents(self) -> list[Mapping[str, Any]]:
        """The settings of the configured agents that work in task images."""
        instances = self.config.env.nemo_gym.instances if self.config else {}
        kinds = [block.get("responses_api_agents") or {} for block in instances.values() if isinstance(block, Mapping)]
        return [kind[SWE_AGENTS] or {} for kind in kinds if SWE_AGENTS in kind]

    @property
    def needs_task_images(self) -> bool:
        """Whether agents of this launch work in task images."""
        return (self.stage is not None and "sif" in self.stage.requires) or bool(self.swe_agents)

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run; None without a name."""
        name = self.contract["EXP_NAME"]
        return (self.root / self.contract["RESULTS_DIR"] / name).resolve() if name else None

    def path(self, variable: str) -> Path | None:
        """Return the path that a variable gives; None when it is not set."""
        return Path(self.contract[variable]) if self.contract[variable] else None


def read_launch(stage: str, overrides: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> Launch:
    """Gather what is known of a launch."""
    profile = read_profile(environ, root)
    variables, names, environ = profile.job_variables(environ), profile.named(environ), profile.over(environ)
    environ, renamed = with_own_config(environ, root)
    findings: list[Finding] = []
    row: Stage | None = None
    if stage:
        findings += as_findings("ENV002", choice_problems(environ))
        try:
            row = find_stage(stage)
            if not findings:
                defaults = stage_defaults(row, environ, root)
                findings += as_findings("MDL012", newer_parents(defaults, environ))
                environ = stage_environment(defaults, environ)
        except InputError as error:
            findings += as_findings("ENV003", error.problems)
    contract, wrong = read_contract(environ)
    if contract["WANDB"] == "offline":
        variables, environ = ({**one, "WANDB_MODE": "offline"} for one in (variables, environ))
    # When the stage table or the profile has an error, the variables that it would have filled are not missing, too.
    given = (
        *(FILLED if any(finding.code[:3] == "ENV" for finding in findings) else ()),
        *(FILLED_BY_PROFILE if profile.problems else ()),
    )
    findings = [*as_findings("ENV005", profile.problems), *as_findings("ENV006", profile.notes), *findings]
    findings += as_findings("ENV009", renamed)
    wrong = [replace(finding, problem=called(finding.problem, names)) for finding in wrong]
    findings += [finding for finding in wrong if finding.code != "ENV001" or finding.problem.where not in given]
    extra = contract.extra_overrides if contract["ENGINE"] == "native" else []  # another engine reads its own
    everything = (*launch_overrides(contract, row), *profile.overrides, *overrides, *extra)
    loaded = load_config((root / contract["CONFIG_PATH"]).resolve(), everything) if contract["CONFIG_PATH"] else None
    findings += _config_findings(contract, loaded)
    config = loaded.repaired if loaded else None
    sizes = derive(config) if config and loaded and not _is_size_wrong(loaded.problems) else None
    findings += as_findings("ALC001", _too_few_nodes(contract, sizes, names))
    return Launch(
        root=root,
        stage=row,
        environ=environ,
        contract=contract,
        overrides=everything,
        loaded=loaded,
        config=config,
        sizes=sizes,
        findings=tuple(findings),
        job_variables=variables,
        profile_variables=tuple(sorted(profile.job_environment)),
    )


def called(problem: Problem, names: Mapping[str, str]) -> Problem:
    """Return a problem of a variable under the name that the user wrote: that of the profile's field."""
    return replace(problem, where=f"{names[problem.where]} ({problem.where})") if problem.where in names else problem


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


def _too_few_nodes(contract: Contract, sizes: Derived | None, names: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem where fewer nodes are asked for than the configuration needs."""
    asked = "" if contract.is_local else contract["SBATCH_NUM_NODES"]
    if asked and sizes is not None and int(asked) < sizes.num_nodes:
        parts = (sizes.num_train_nodes, sizes.num_generation_nodes, sizes.num_judge_nodes)
        needs = "{} train + {} generation + {} judges".format(*parts)
        out = "remove it there" if "SBATCH_NUM_NODES" in names else "unset it"
        problem = Problem(
            where="SBATCH_NUM_NODES",
            got=asked,
            expected=f"at least {sizes.num_nodes} ({needs})",
            fix=f"{out}, or change cluster.num_nodes and generation.colocated.resources.num_nodes",
        )
        yield called(problem, names)


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
    if contract.is_set("ENABLE_MTP_INFERENCE") and contract["ENGINE"] == "native":
        overrides += speculation(contract)
    if contract["WANDB"] != "0":
        overrides.append("logger.wandb_enabled=true")
    return overrides + ([f"grpo.seed={contract['SEED']}"] if contract["SEED"] else [])


def speculation(contract: Contract) -> list[str]:
    """Return what the published launcher sets for engines that guess tokens ahead.

    The sizes of CUDA graphs are vLLM's own then, multiples of the tokens of one step of a sequence; they are set before
    they are deleted, since not every file has them. `mamba_cache_mode` is not set here: the files of models with Mamba
    layers have it.
    """
    generation, count = "policy.generation", contract["NUM_SPECULATIVE_TOKENS"]
    kwargs = f"{generation}.vllm_kwargs"
    return [
        f"{generation}.vllm_cfg.enable_prefix_caching=false",
        f"{kwargs}.enable_chunked_prefill=true",
        f"{kwargs}.max_num_batched_tokens={contract['MAX_NUM_BATCHED_TOKENS']}",
        f"{kwargs}.compilation_config.cudagraph_capture_sizes=[1]",
        f"~{kwargs}.compilation_config.cudagraph_capture_sizes",
        f"{kwargs}.speculative_config={{method: mtp, num_speculative_tokens: {count}}}",
    ]


def as_text(value: str) -> str:
    """Return a text as YAML that is read as the same text: a run may be named 42."""
    try:
        return value if yaml.safe_load(value) == value else json.dumps(value)
    except yaml.YAMLError:
        return json.dumps(value)
