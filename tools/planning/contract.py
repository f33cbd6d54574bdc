"""The environment contract of `super_launch.sh`: every variable, what it means, who needs it, its default.

The names are the published recipe's; LAUNCHER, CONTAINER_RUNTIME, ENGINE, SEED and RESULTS_DIR are ours.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.errors import Problem, nearest
from tools.command_line import FALSE, TRUE
from tools.planning.findings import Finding, as_findings

REQUIRED = {
    "EXP_NAME": "name of the run; checkpoints and logs go to results/EXP_NAME",
    "CONFIG_PATH": "stage or overlay YAML file",
    "MODEL_PATH": "Hugging Face directory of the start weights",
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
OPTIONAL = {
    "LAUNCHER": "slurm",  # or local: a one-node Ray cluster on this machine
    "ENGINE": "native",  # or nemo_rl: NeMo RL's own entrypoint in its container, which CONTAINER then is
    "NEMO_RL_DIR": "/opt/nemo-rl",  # with ENGINE=nemo_rl: its checkout in that container
    "GYM_VENV_DIR": "/opt/gym_venvs",  # with ENGINE=nemo_rl: where that container has NeMo Gym's environments
    "ENABLE_MTP_INFERENCE": "false",  # with ENGINE=nemo_rl: decode speculatively with the model's own heads
    "NUM_SPECULATIVE_TOKENS": "5",  # tokens guessed ahead with ENABLE_MTP_INFERENCE
    "MAX_NUM_BATCHED_TOKENS": "8480",  # tokens of one engine step with ENABLE_MTP_INFERENCE
    "CONTAINER_RUNTIME": "pyxis",  # or apptainer, podman, none: what is installed on the nodes
    "SEED": "",  # grpo.seed; empty = the configuration's
    "RESULTS_DIR": "results",
    "DRY_RUN": "false",  # print what would be started
    "EXTRA_HYDRA_ARGS": "",  # further KEY=VALUE overrides, the last to apply; in the engine's own grammar
    "WANDB_PROJ": "nemotron-3-super-posttraining",
    "SLURM_TIME_LIMIT": "4:00:00",
    "MAX_RESTARTS": "20",  # of one job: after it saved at its time limit or on a signal, and after the loss of a node
    "SANDBOX_COMMAND": "",  # server of the sandbox on every node; empty = the sandbox image's own
    "SBATCH_NUM_NODES": "",  # more nodes than the configuration needs; empty = as many
    "EXTRA_MOUNTS": "",  # SRC[:DST[:ro]],... on top of what the launch mounts itself
    "HF_HOME": "",  # cache of the Hugging Face hub, mounted where it is set
    "SWE_CONTAINER": "",  # training image of the stages that run SWE tasks; empty = CONTAINER
    "SIF_DIR": "",  # directory of the images of SWE tasks
    "CONTAINER_FORMATTER": "",  # names of those images with {instance_id}: one, or a JSON list; empty = the recipe's
    "CODE_SNAPSHOT_DIRNAME": "code_snapshots",
    "SKIP_CODE_SNAPSHOT": "false",  # run from this checkout
    "REFRESH_CODE_SNAPSHOT": "true",  # false: take the run's newest snapshot again
}
NOT_BUILT = {
    "ENABLE_MTP_INFERENCE": "speculative decoding with the model's own heads",
}
CHOICES = {
    "LAUNCHER": ("slurm", "local"),
    "ENGINE": ("native", "nemo_rl"),
    "CONTAINER_RUNTIME": ("pyxis", "apptainer", "podman", "none"),
}
_SWITCHES = ("DRY_RUN", "ENABLE_MTP_INFERENCE", "SKIP_CODE_SNAPSHOT", "REFRESH_CODE_SNAPSHOT")
OF_MAKE = ("STAGE", "STAGES", "SCALE", "PLATFORM", "CLUSTER", "ENV_TOML", "NEMOTRON_ENV_FILE")  # read elsewhere
_MIN_NAME, _ALIKE = 8, 0.86  # letters of a name that may be misspelt, and the share of them that two names have
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Contract:
    """A complete set of the variables: those not given have their default."""

    values: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values[name].lower() in TRUE

    @property
    def is_local(self) -> bool:
        return self.values["LAUNCHER"] == "local"

    @property
    def extra_overrides(self) -> list[str]:
        return shlex.split(self.values["EXTRA_HYDRA_ARGS"])


def required(launcher: str, runtime: str) -> dict[str, str]:
    """Return the variables that a launch of this kind needs, each with its meaning."""
    names = dict(REQUIRED)
    if launcher != "local":
        names |= REQUIRED_ON_SLURM
        if runtime != "none":
            names |= REQUIRED_WITH_CONTAINERS
    return names


def read_contract(environ: Mapping[str, str]) -> tuple[Contract, list[Finding]]:
    """Read the variables; return them with every missing or wrong one. In place of a wrong value stands the default."""
    values = {name: environ.get(name) or default for name, default in OPTIONAL.items()}
    everything = {**REQUIRED, **REQUIRED_ON_SLURM, **REQUIRED_WITH_CONTAINERS}
    values |= {name: environ.get(name, "") for name in everything}
    values["MODEL_PATH"] = values["MODEL_PATH"].rstrip("/")
    wrong = _wrong_values(values)
    values |= {problem.where: OPTIONAL.get(problem.where, "") for problem in wrong}
    misnamed = {problem.where for problem in wrong}
    # Of a launcher or a runtime that does not exist nobody knows what else it needs.
    launcher = "local" if "LAUNCHER" in misnamed else values["LAUNCHER"]
    runtime = "none" if "CONTAINER_RUNTIME" in misnamed else values["CONTAINER_RUNTIME"]
    missing = [
        Problem(where=name, wrong=f"not set: {meaning}", fix=f"export {name}=... or pass it to make")
        for name, meaning in required(launcher, runtime).items()
        if not values[name] and name not in misnamed
    ]
    findings = as_findings("ENV001", missing) + as_findings("ENV002", wrong)
    findings += as_findings("ENV007", _misspelt(environ, [*values, *OF_MAKE]))
    return Contract(values), findings + as_findings("ENV004", _not_built(environ))


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
        for name in ("SEED", "SBATCH_NUM_NODES", "MAX_RESTARTS", "NUM_SPECULATIVE_TOKENS", "MAX_NUM_BATCHED_TOKENS")
        if values[name] and not values[name].isdecimal()
    ]
    if values["EXP_NAME"] and not _NAME.fullmatch(values["EXP_NAME"]):
        expected = "letters, digits and . _ -, for it names a directory and a job"
        problems.append(Problem(where="EXP_NAME", got=values["EXP_NAME"], expected=expected, fix="rename the run"))
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


def _misspelt(environ: Mapping[str, str], known: Sequence[str]) -> list[Problem]:
    """Return a problem for each variable whose name is almost one of the contract; make refuses those on its line."""
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


def _not_built(environ: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(where=name, wrong=f"{purpose}: not built yet", fix="unset it, or set ENGINE=nemo_rl")
        for name, purpose in NOT_BUILT.items()
        if environ.get(name, "").lower() not in FALSE and environ.get("ENGINE") != "nemo_rl"
    ]
