"""`nemotron`: the command lines of the published pages, each answered by the `make` commands that do it here.

    nemotron super3 data prep rl rlvr --run PROFILE     make data BLEND=rlvr1, then rlvr2 and rlvr3
    nemotron super3 rl rlvr -c rlvr2 --run PROFILE      make stage1.2 CLUSTER=PROFILE, then make watch
    nemotron super3 rl swe2 --batch PROFILE KEY=VALUE   make stage2.2 CLUSTER=PROFILE ARGS=KEY=VALUE
    nemotron super3 rl rlvr -c test --run PROFILE       make smoke
    nemotron super3 rl rlvr --sample 200                make stage1.1 with the rows of `data prep ... --sample 200`
    nemotron nano3 data prep rl revision=COMMIT         make data BLEND=nano ARGS="--revision COMMIT"
    nemotron nano3 rl --dry-run                         make nano-rl DRY_RUN=1

Each command is printed before it runs; the first that fails ends the list. PROFILE is one of env.toml. Without one
a stage runs on this machine. Exit status: that of the last command, 2 when a word is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.config.load import find_stage
from recipes.errors import InputError, Problem, nearest
from tools.command_line import TRUE, exit_status
from tools.data.files.transfer import is_commit, no_commit
from tools.draft.contract import set_variables
from tools.draft.launch import read_launch

ROOT = Path(__file__).resolve().parents[2]
RLVR = ("rlvr1", "rlvr2", "rlvr3")  # one command there, three blends and stages here
STAGES = {"rlvr": "stage1.1", "rlvr1": "stage1.1", "rlvr2": "stage1.2", "rlvr3": "stage1.3"}
STAGES |= {"swe1": "stage2.1", "swe2": "stage2.2", "rlhf": "stage3", "": "nano-rl"}
PARTS = ("rlvr", "swe1", "swe2", "rlhf")
TRIALS = ("test", "tiny")  # configurations for one GPU there
VARIABLES = {
    "account": "SLURM_ACCOUNT",
    "partition": "SLURM_PARTITION",
    "batch_partition": "SLURM_PARTITION",
    "nodes": "SBATCH_NUM_NODES",
    "time": "SLURM_TIME_LIMIT",
    "container": "CONTAINER",
    "container_image": "CONTAINER",
    "sif_dir": "SIF_DIR",
    "persistent_cache": "PERSISTENT_CACHE",
}  # run.env.KEY -> variable of a launch
COUNTS = ("gpus_per_node", "nproc_per_node")
DATA_SETTINGS = {"sample": "SAMPLE", "val_holdout": "VAL_ROWS", "revision": "ARGS"}
ENV = "run.env."
COMMITS = "https://huggingface.co/datasets/nvidia/Nemotron-3-Nano-RL-Training-Blend/commits/main"
NANO_VAL_ROWS = "1000"  # of the guide to Nemotron 3 Nano
ELSEWHERE = {
    "run.model": "W&B artifacts name no start weights here: set MODEL_PATH=DIRECTORY",
    "run.data": "W&B artifacts name no rows here: set TRAIN_PATH and VAL_PATH",
    "grpo.num_iterations": "no engine reads this key: write grpo.max_num_steps=N",
    "grpo.learning_rate": "no engine reads this key: write policy.megatron_cfg.optimizer.lr=RATE",
}  # keys of the pages, also one that no engine reads


@dataclass(slots=True)
class PublishedAnswer:
    """The commands for one published line, and what the user should know."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the published options, which may stand anywhere between the words."""
    parser = argparse.ArgumentParser(
        prog="nemotron", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", help="super3|nano3, then `data prep rl` or `rl`, a stage, KEY=VALUE")
    parser.add_argument("-c", "--config", default="", help="rlvr1, small, test, or a file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-r", "--run", metavar="PROFILE", default="", help="submit, then follow until it ends")
    where.add_argument("-b", "--batch", metavar="PROFILE", default="", help="submit")
    parser.add_argument("-d", "--dry-run", action="store_true", help="print what would run")
    parser.add_argument("--sample", default="", metavar="ROWS", help="prepare the first rows alone, or train on those")
    parser.add_argument("--force", action="store_true", help="of `data prep`: taken, for each step knows what changed")
    return parser.parse_intermixed_args(argv)


def answer(args: argparse.Namespace, environ: Mapping[str, str]) -> PublishedAnswer:
    """Return the commands for a published line; raises `InputError` with every word that has no meaning here."""
    placeholders = [word for word in args.words if word.startswith("[")]  # as the pages print them
    pairs = [word for word in args.words if "=" in word or word.startswith("~")]
    words = [word for word in args.words if word not in pairs and word not in placeholders]
    found = PublishedAnswer(notes=[f"{word} stands for words of your own" for word in placeholders])
    family, rest = words[0] if words else "", words[1:]
    is_data = rest[:3] == ["data", "prep", "rl"]
    parts = rest[3:] if is_data else rest[1:]
    known = PARTS if family == "super3" else ()
    if family not in ("super3", "nano3") or not (is_data or rest[:1] == ["rl"]):
        expected = "super3 or nano3, then `rl` or `data prep rl`"
        fix = "the other parts of those recipes are not here: run them with their own repository"
        raise InputError(Problem(where="nemotron", got=" ".join(words) or "no words", expected=expected, fix=fix))
    if (parts and parts[0] not in known) or len(parts) > 1 or bool(known) != bool(parts):
        expected = f"one of {', '.join(known)}" if known else "KEY=VALUE words and options alone"
        close = nearest(" ".join(parts), known)
        fix = f"did you mean {close}?" if close else "correct the line"
        where = f"nemotron {' '.join(words[: len(words) - len(parts)])}"
        raise InputError(Problem(where=where, got=" ".join(parts) or "no stage", expected=expected, fix=fix))
    part = parts[0] if parts else ""
    if is_data:
        _add_data(found, args, part, pairs)
    else:
        _add_stage(found, args, part, pairs, environ)
    return found


def _add_data(found: PublishedAnswer, args: argparse.Namespace, part: str, pairs: Sequence[str]) -> None:
    """Add the preparation of a blend, or of three."""
    if profile := args.run or args.batch:
        found.notes.append(f"rows are prepared on this machine, which needs no GPU: {profile} is for stages")
    settings = {"val_holdout": NANO_VAL_ROWS} if not part else {}
    settings |= {"sample": args.sample} if args.sample else {}
    problems = _config_problems(args.config, RLVR if part == "rlvr" else (), "--sample ROWS takes the first rows")
    for key, _, value in (pair.partition("=") for pair in pairs):
        if key in DATA_SETTINGS:
            settings[key] = value
        elif key == "force":
            args.force = args.force or value.lower() in TRUE
        else:
            fix = "leave it out; `make help-all` lists what `make data` reads"
            expected = ", ".join([*DATA_SETTINGS, "force"])
            problems.append(Problem(where="nemotron data prep", got=f"{key}={value}", expected=expected, fix=fix))
    settings = {key: value for key, value in settings.items() if value != "null"}
    problems += _number_problems({key: settings[key] for key in ("sample", "val_holdout") if key in settings})
    if not part and "revision" not in settings:
        wrong, fix = "nobody has published a commit of Nano's rows", f"add revision=COMMIT, one of {COMMITS}"
        problems.append(Problem(where="nemotron nano3 data prep", wrong=wrong, fix=fix))
    elif not is_commit(settings.get("revision", "0" * 40)):
        fix = f"take one of {COMMITS}" if not part else "leave it out, or take a commit of the data set's page"
        problems.append(no_commit("nemotron: revision", settings["revision"], fix=fix))
    if problems:
        raise InputError(problems)
    if args.force:
        found.notes.append(
            "each step runs again when its input, its settings or its output changed, so --force is moot"
        )
    blends: tuple[str, ...] = (part or find_stage(STAGES[part]).blend,)
    if part == "rlvr":
        blends = (args.config,) if args.config in RLVR else RLVR
    if "revision" in settings:
        settings["revision"] = f"--revision {shlex.quote(settings['revision'])}"
    if "sample" in settings:
        found.notes.append(f"a stage trains on these rows with --sample {settings['sample']}")
    variables = [f"{DATA_SETTINGS[key]}={value}" for key, value in settings.items()]
    found.commands += [["data", f"BLEND={blend}", *variables] for blend in blends]


def _config_problems(config: str, known: Sequence[str], other: str) -> list[Problem]:
    """Return a problem for a word after -c that has no meaning there; `other` says what may be meant."""
    if config in ("", "default", *known):
        return []
    close = nearest(config, known)
    fix = f"did you mean {close}?" if close else f"leave it out; {other}"
    return [Problem(where="nemotron: -c", got=config, expected=" or ".join(["default", *known]), fix=fix)]


def _number_problems(settings: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(where=f"nemotron: {key}", got=value or "nothing", expected="a whole number from 1 on", fix="correct it")
        for key, value in settings.items()
        if not (value.isdecimal() and int(value))
    ]


def _stage_problems(args: argparse.Namespace, part: str) -> list[Problem]:
    """Return a problem for each option that has no meaning for this stage."""
    config = args.config
    problems = _number_problems({"--sample": args.sample} if args.sample else {})
    if args.force:
        fix = "leave it out; what the doctor finds is forced by `./super_launch.sh --force`"
        problems.append(Problem(where="nemotron: --force", got="a stage", expected="`data prep`", fix=fix))
    if config in RLVR and part != "rlvr":
        where, fix = f"nemotron: -c {config}", "write `rl rlvr` before it, or leave it out"
        problems.append(Problem(where=where, got=f"a stage {part or 'of Nano'}", expected="the stage rlvr", fix=fix))
    elif not (Path(config).is_file() or (ROOT / config).is_file()):
        known = (*TRIALS, "small", *(RLVR if part == "rlvr" else ()))
        problems += _config_problems(config, known, "there is no such file")
    return problems


def _add_stage(
    found: PublishedAnswer, args: argparse.Namespace, part: str, pairs: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Add a stage, and what follows it until it ends."""
    profile, config = args.run or args.batch, args.config
    variables, overrides = _overrides(part, [pair for pair in pairs if not pair.startswith("sample=")])
    args.sample = next((pair.partition("=")[2] for pair in pairs if pair.startswith("sample=")), args.sample)
    if problems := _stage_problems(args, part):
        raise InputError(problems)
    if config in TRIALS:
        _add_trial(found, args, part, pairs)
        return
    if config == "small":
        variables["SCALE"] = "small"
    elif config not in ("", "default", *RLVR):
        variables["CONFIG_PATH"] = config if (ROOT / config).is_file() else str(Path(config).resolve())
    if part == "rlvr" and not config:
        found.notes.append("stage1.1 of three: -c rlvr2 and -c rlvr3 are the others")
    target = STAGES[config if config in RLVR else part]
    if args.sample:
        rows = f"data/{find_stage(target).blend}-sample{args.sample}"
        variables |= {"TRAIN_PATH": f"{rows}/train-split.jsonl", "VAL_PATH": f"{rows}/val-split.jsonl"}
    variables |= {"CLUSTER": profile} if profile else {"LAUNCHER": environ.get("LAUNCHER") or "local"}
    variables |= {"DRY_RUN": "1"} if args.dry_run else {}
    words = [f"{key}={value}" for key, value in variables.items()]
    found.commands.append([target, *words, *_arguments(overrides)])
    given = {**set_variables(environ), **variables}
    if args.run and given.get("DRY_RUN", "").lower() not in TRUE:
        launch = read_launch(target, overrides, given)
        found.commands.append(["watch", f"EXP_NAME={launch.contract['EXP_NAME']}"])


def _add_trial(found: PublishedAnswer, args: argparse.Namespace, part: str, pairs: Sequence[str]) -> None:
    """Add a run of a tiny model on this machine, and say what of the line it does not read."""
    profile = args.run or args.batch
    unread = [pair.partition("=")[0] for pair in pairs if pair.startswith(ENV)]
    unread += ["--sample"] if args.sample else []
    named = f"without {profile}" if profile else "without a cluster"
    found.notes.append(f"-c {args.config} trains a tiny model on its own rows on this machine, {named}")
    if unread:
        found.notes.append(f"not read there: {', '.join(unread)}")
    overrides = [pair for pair in pairs if not pair.startswith((ENV, "sample="))]
    tiny = ["pipeline", f"STAGES={STAGES[part]}", "SCALE=tiny", "LAUNCHER=local"] if part != "rlvr" else []
    found.commands.append([*(tiny or ["smoke"]), *_arguments(overrides)])


def _overrides(part: str, pairs: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a launch that `run.env` sets, and the overrides of the configuration."""
    variables: dict[str, str] = {}
    overrides, problems = [], []
    for pair in pairs:
        key, _, value = pair.partition("=")
        name = key.removeprefix(ENV)
        variable = VARIABLES.get(name) if name != key else None
        if variable == "CONTAINER" and part == "swe2":
            variable = "SWE_CONTAINER"
        if hint := ELSEWHERE.get(key):
            wrong, _, fix = hint.partition(": ")
            problems.append(Problem(where=f"nemotron: {pair}", wrong=wrong, fix=fix))
        elif variable:
            variables[variable] = value
        elif name != key and name in COUNTS:
            overrides.append(f"cluster.gpus_per_node={value}")
        elif name != key:
            expected = ", ".join(f"{ENV}{name}" for name in (*VARIABLES, *COUNTS))
            fix = "put it into the profile, or leave it out"
            problems.append(Problem(where="nemotron", got=key, expected=expected, fix=fix))
        else:
            overrides.append(pair)
    if problems:
        raise InputError(problems)
    return variables, overrides


def _arguments(overrides: Sequence[str]) -> Iterator[str]:
    if overrides:
        yield f"ARGS={shlex.join(overrides)}".replace("$", "$$")  # make reads a dollar, the shell its quotes


def shown(words: Sequence[str]) -> str:
    """Return a command of make as a user would type it."""
    parts = [word.partition("=") for word in words]
    return " ".join(["make", *(f"{name}={shlex.quote(value)}" if equals else name for name, equals, value in parts)])


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print and run the commands of one published line."""
    args = parse(argv)
    found = answer(args, os.environ)
    for note in found.notes:
        print(f"nemotron: {note}", flush=True)
    for words in found.commands:
        print(f"nemotron: {shown(words)}", flush=True)
        if args.dry_run and "DRY_RUN=1" not in words:
            continue  # the line above is the plan
        status = subprocess.run(["make", "--no-print-directory", "-C", str(ROOT), *words], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
