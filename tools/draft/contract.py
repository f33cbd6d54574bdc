"""The environment contract of `super_launch.sh`: every variable, its meaning, its default, and which launch needs it.

The names are the published recipe's; LAUNCHER, CONTAINER_RUNTIME, ENGINE, SEED, WANDB and RESULTS_DIR are ours. The
tables in tools/launch/README.md are written from this file: `python -m tools.dev.readme_tables --write README`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import Problem, nearest
from tools.command_line import FALSE, TRUE
from tools.draft.findings import Finding, as_findings
from tools.hub import model_path


@dataclass(frozen=True, slots=True)
class Optional:
    """A variable that need not be set."""

    default: str
    meaning: str


REQUIRED = {
    "EXP_NAME": "name of the run; checkpoints and logs go to results/EXP_NAME",
    "CONFIG_PATH": "stage or overlay YAML file",
    "MODEL_PATH": "Hugging Face directory of the start weights, or their name on the hub (`org/name@COMMIT`)",
    "TRAIN_PATH": "JSONL file of training rows",
    "VAL_PATH": "JSONL file of validation rows",
}
REQUIRED_ON_SLURM = {
    "PERSISTENT_CACHE": "directory for caches that outlive a job, on a shared file system",
    "SLURM_PARTITION": "partition to submit to",
    "SLURM_ACCOUNT": "account to charge",
}
REQUIRED_WITH_CONTAINERS = {
    "CONTAINER": "training image: a file of the runtime's kind (.sqsh, .sif) or a registry URI",
    "SANDBOX_CONTAINER": "image of the sandbox that runs model-written code",
}
COUNTED = "auto"  # of SBATCH_GRES
OPTIONAL = {
    "LAUNCHER": Optional("slurm", "`local`: a one-node Ray cluster on this machine"),
    "ENGINE": Optional("native", "`nemo_rl`: NeMo RL's own entrypoint in its container, which `CONTAINER` then names"),
    "CONTAINER_RUNTIME": Optional("pyxis", "`apptainer`, `podman` or `none`: what starts containers on the nodes"),
    "SLURM_TIME_LIMIT": Optional("4:00:00", "time limit of one start of the job"),
    "MAX_RESTARTS": Optional("20", "how often one job starts again: after a save, a failure, or the loss of a node"),
    "SBATCH_NUM_NODES": Optional("", "nodes to ask for; empty: what the configuration needs; fewer are refused"),
    "SPARE_NODES": Optional("0", "nodes to ask for on top, so that a run begins without as many that do not come up"),
    "BRING_UP_SECONDS": Optional("", "in which the nodes must come up; empty: half an hour, and 10 s for each node"),
    "SBATCH_GRES": Optional(
        COUNTED,
        "resource to ask for on each node, with the number needed; `auto`: `gpu`, if Slurm counts any; nothing: none",
    ),
    "EXTRA_MOUNTS": Optional("", "`SRC[:DST[:ro]],...`, besides what the launch itself mounts"),
    "SEED": Optional("", "`grpo.seed`; empty: the configuration's"),
    "EXTRA_HYDRA_ARGS": Optional("", "further `KEY=VALUE` overrides, applied last, in the grammar of the engine"),
    "RESULTS_DIR": Optional("results", "directory of the runs"),
    "DRY_RUN": Optional("false", "`true`: print the command and stop"),
    "SKIP_CODE_SNAPSHOT": Optional("false", "`true`: the job runs from this checkout, not from a copy"),
    "REFRESH_CODE_SNAPSHOT": Optional("true", "`false`: use the newest copy that this run has"),
    "CODE_SNAPSHOT_DIRNAME": Optional("code_snapshots", "directory of the copies"),
    "WANDB_PROJ": Optional("nemotron-3-super-posttraining", "project in Weights & Biases"),
    "WANDB": Optional("0", "`1`: send the numbers to Weights & Biases; `offline`: keep them in the run directory"),
    "HF_HOME": Optional("", "cache of the Hugging Face hub, which the containers then see"),
    "SANDBOX_COMMAND": Optional("", "server of the sandbox on every node; empty: the one of the sandbox image"),
    "SWE_CONTAINER": Optional("", "training image of the stages with SWE tasks; empty: `CONTAINER`"),
    "SIF_DIR": Optional("", "directory of the images of SWE tasks"),
    "CONTAINER_FORMATTER": Optional("", "file names of those images with `{instance_id}`: one, or a JSON list"),
    "NEMO_RL_DIR": Optional("/opt/nemo-rl", "with `ENGINE=nemo_rl`: its checkout in that container"),
    "GYM_VENV_DIR": Optional("/opt/gym_venvs", "with `ENGINE=nemo_rl`: NeMo Gym's environments in that container"),
    "TRUST_REMOTE_CODE": Optional("false", "with `ENGINE=nemo_rl`: `true`: run the code that the start weights bring"),
    "ENABLE_MTP_INFERENCE": Optional("false", "`true`: the engines guess tokens ahead with the model's own heads"),
    "NUM_SPECULATIVE_TOKENS": Optional("5", "tokens guessed ahead with `ENABLE_MTP_INFERENCE`"),
    "MAX_NUM_BATCHED_TOKENS": Optional("8480", "tokens of one engine step with `ENABLE_MTP_INFERENCE`"),
}
CHOICES = {
    "LAUNCHER": ("slurm", "local"),
    "ENGINE": ("native", "nemo_rl"),
    "CONTAINER_RUNTIME": ("pyxis", "apptainer", "podman", "none"),
    "WANDB": ("0", "1", "offline"),
}
MAY_BE_EMPTY = ("SBATCH_GRES",)  # set to nothing is not the same as not set
PATHS = ("MODEL_PATH", "TRAIN_PATH", "VAL_PATH", "PERSISTENT_CACHE", "SIF_DIR")  # relative to the shell's directory
# Where the published pages have the stage files, in a checkout of NeMo RL.
PUBLISHED = ("examples/nemo_gym/nemotron-3-super/", "examples/configs/super/")
PUBLISHED_FILE = re.compile(r"(small_scale/)?stage[1-3]_\w+\.yaml")  # stage 4 is ours alone
_SWITCHES = ("DRY_RUN", "ENABLE_MTP_INFERENCE", "SKIP_CODE_SNAPSHOT", "REFRESH_CODE_SNAPSHOT", "TRUST_REMOTE_CODE")
_NUMBERS = (
    *("SEED", "SBATCH_NUM_NODES", "SPARE_NODES", "BRING_UP_SECONDS", "MAX_RESTARTS"),
    *("NUM_SPECULATIVE_TOKENS", "MAX_NUM_BATCHED_TOKENS"),
)
_AT_LEAST_ONE = {
    "SBATCH_NUM_NODES": "leave it out, and the nodes are counted from the configuration",
    "BRING_UP_SECONDS": "leave it out, and they follow from the number of nodes",
    "NUM_SPECULATIVE_TOKENS": "correct it, or unset ENABLE_MTP_INFERENCE: engines then guess nothing",
    "MAX_NUM_BATCHED_TOKENS": "correct the value or leave it out",
}
READ_WITH = dict.fromkeys(("NUM_SPECULATIVE_TOKENS", "MAX_NUM_BATCHED_TOKENS"), "ENABLE_MTP_INFERENCE")
# Read elsewhere: by make, by the stage table, and by the profiles.
OF_MAKE = ("STAGE", "STAGES", "SCALE", "PLATFORM", "CLUSTER", "ENV_TOML", "NEMOTRON_ENV_FILE")
_MIN_NAME, _ALIKE = 8, 0.86  # shortest name, and least similarity (`nearest`), that is reported as a misspelling
_MAX_NAME = 128  # characters of EXP_NAME: a file system takes 255, and other names are made from this one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Contract:
    """A value for every variable: the default where none is given."""

    values: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values[name].lower() in TRUE

    @property
    def is_local(self) -> bool:
        return self.values["LAUNCHER"] == "local"

    def num_nodes(self, num_needed: int) -> int:
        """Return how many nodes a job asks for; those beyond what the configuration needs are spare."""
        return int(self.values["SBATCH_NUM_NODES"] or num_needed) + int(self.values["SPARE_NODES"] or 0)

    @property
    def extra_overrides(self) -> list[str]:
        return shlex.split(self.values["EXTRA_HYDRA_ARGS"])


def set_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have a value; for most an empty one is as good as none."""
    return {name: value for name, value in environ.items() if value or name in MAY_BE_EMPTY}


def with_own_config(environ: Mapping[str, str], root: Path) -> tuple[dict[str, str], list[Problem]]:
    """Return `environ` with our file of the stage whose published path CONFIG_PATH has, and a note that says so."""
    given = environ.get("CONFIG_PATH", "")
    name = next(
        (path[len(prefix) :] for prefix in PUBLISHED if (path := given.removeprefix("./")).startswith(prefix)), ""
    )
    name = name if PUBLISHED_FILE.fullmatch(name) else ""
    platform = environ.get("PLATFORM")
    own = [*([f"configs/{platform}/{name}"] if platform else []), f"configs/{name}"]
    found = next((path for path in own if name and (root / path).is_file()), None)
    if found is None or (root / given).is_file():
        return dict(environ), []
    wrong = f"{given} is NeMo RL's path of a stage whose file here is {found}, which is taken"
    of_b200 = (root / f"configs/b200/{name}").is_file()
    fix = f"write CONFIG_PATH={found}"
    fix += ", and PLATFORM=b200 for the node counts of the pages about B200" if of_b200 else ""
    return {**environ, "CONFIG_PATH": found}, [Problem(where="CONFIG_PATH", wrong=wrong, fix=fix)]


def required(launcher: str, runtime: str) -> dict[str, str]:
    """Return the variables that a launch of this kind needs, each with its meaning."""
    names = dict(REQUIRED)
    if launcher != "local":
        names |= REQUIRED_ON_SLURM
        if runtime != "none":
            names |= REQUIRED_WITH_CONTAINERS
    return names


def read_contract(environ: Mapping[str, str]) -> tuple[Contract, list[Finding]]:
    """Return the variables with a finding for every missing or wrong one; a wrong value is replaced by its default."""
    values = {name: environ.get(name) or variable.default for name, variable in OPTIONAL.items()}
    values |= {name: environ[name].strip() for name in MAY_BE_EMPTY if name in environ}
    everything = {**REQUIRED, **REQUIRED_ON_SLURM, **REQUIRED_WITH_CONTAINERS}
    values |= {name: environ.get(name, "") for name in everything}
    values["MODEL_PATH"] = model_path(values["MODEL_PATH"], environ)  # a name on the hub: where it lies
    # A job runs in another directory than the shell that starts it, and there a relative path names nothing.
    values |= {name: str(Path(values[name]).absolute()) for name in PATHS if values[name]}
    wrong = _wrong_values(values)
    values |= {problem.where: OPTIONAL[problem.where].default if problem.where in OPTIONAL else "" for problem in wrong}
    misnamed = {problem.where for problem in wrong}
    # Nobody knows what a launcher or a runtime needs that does not exist: then only the common variables are required.
    launcher = "local" if "LAUNCHER" in misnamed else values["LAUNCHER"]
    runtime = "none" if "CONTAINER_RUNTIME" in misnamed else values["CONTAINER_RUNTIME"]
    missing = [
        Problem(where=name, wrong=f"not set: {meaning}", fix=f"export {name}=... or pass it to make")
        for name, meaning in required(launcher, runtime).items()
        if not values[name] and name not in misnamed
    ]
    findings = as_findings("ENV001", missing) + as_findings("ENV002", wrong)
    findings += as_findings("ENV007", _misspelt(environ, [*values, *OF_MAKE]))
    contract = Contract(values)
    return contract, findings + as_findings("ENV010", _idle(contract, environ))


def _wrong_values(values: Mapping[str, str]) -> list[Problem]:
    problems = [
        Problem(where=name, got=values[name], expected=" or ".join(choices), fix="correct the value")
        for name, choices in CHOICES.items()
        if values[name] not in choices
    ]
    problems += [
        Problem(where=name, got=values[name], expected="true or false", fix="correct the value")
        for name in _SWITCHES
        if values[name].lower() not in TRUE + FALSE
    ]
    problems += [
        Problem(where=name, got=values[name], expected="a whole number", fix="correct the value or leave it out")
        for name in _NUMBERS
        if values[name] and not values[name].isdecimal()
    ]
    problems += [
        Problem(where=name, got=values[name], expected="a whole number from 1 on", fix=fix)
        for name, fix in _AT_LEAST_ONE.items()
        if values[name].isdecimal() and int(values[name]) == 0
    ]
    if values["EXP_NAME"] and not _NAME.fullmatch(values["EXP_NAME"]):
        expected = "letters, digits and . _ -, for it names a directory and a job"
        problems.append(Problem(where="EXP_NAME", got=values["EXP_NAME"], expected=expected, fix="rename the run"))
    elif len(values["EXP_NAME"]) > _MAX_NAME:
        got, expected = f"{len(values['EXP_NAME'])} characters", f"{_MAX_NAME} at most, for it names files and a job"
        problems.append(Problem(where="EXP_NAME", got=got, expected=expected, fix="choose a shorter name"))
    if values["CONTAINER_FORMATTER"].startswith("[") and not _is_list_of_texts(values["CONTAINER_FORMATTER"]):
        expected = "a name with {instance_id}, or a JSON list of such names"
        got = values["CONTAINER_FORMATTER"]
        problems.append(Problem(where="CONTAINER_FORMATTER", got=got, expected=expected, fix="correct it"))
    try:
        shlex.split(values["EXTRA_HYDRA_ARGS"])
    except ValueError as error:
        expected = "KEY=VALUE words quoted as for a shell"
        got = f"{values['EXTRA_HYDRA_ARGS']} ({error})"
        problems.append(Problem(where="EXTRA_HYDRA_ARGS", got=got, expected=expected, fix="correct the quotes"))
    return problems


def _idle(contract: Contract, environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each variable that is given and read only with a switch that is off."""
    return [
        Problem(
            where=name,
            wrong=f"only {switch} makes it count, and that is off",
            fix=f"set {switch}=true, or unset {name}",
        )
        for name, switch in READ_WITH.items()
        if environ.get(name) and not contract.is_set(switch)
    ]


def _misspelt(environ: Mapping[str, str], known: Sequence[str]) -> list[Problem]:
    """Return a problem for each variable of the shell whose name is almost one of the contract."""
    problems = []
    for name in environ:
        close = nearest(name, known, cutoff=_ALIKE)
        if close and name not in known and len(name) >= _MIN_NAME and not name.startswith("SLURM_JOB_"):
            fix = "correct its name, if it is meant for this launch"
            problems.append(Problem(where=name, wrong=f"nothing here reads it; did you mean {close}?", fix=fix))
    return problems


def _is_list_of_texts(text: str) -> bool:
    try:
        return all(isinstance(entry, str) for entry in json.loads(text))
    except ValueError:
        return False
