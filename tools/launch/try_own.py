"""Train a model on rows and a reward of your own, from their names to the report: `make try MODEL= DATA= REWARD=`.

    python -m tools.launch.try_own --model M --data D [--reward R] [--fields "question=q"] [KEY=VALUE ...]

M is smollm2, a family of `make tiny`, a directory or a name on the hub; D a file or a name on the hub. Every step is a
command of its own, which is printed before it runs. The short ones that find wrong inputs come first, all of them, so
that everything wrong is said at once. The same call after a kill goes on where it stopped: the name of the run is made
from the inputs, and each command keeps what it has done.
Exit status: 0; 2 a wrong input; else that of the step that failed (75: the run stopped early and saved).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import InputError, Problem
from recipes.files import read_object, sha256_of
from tools.command_line import exit_status
from tools.data.files.fetch import list_model, model_of
from tools.draft.launch import ROOT, TINY_MODEL
from tools.hub import HubName, cached_model, hub_name, taken_for
from tools.job.local import count_gpus
from tools.sizing.architecture import read_architecture
from tools.tiny.model import BUILDERS
from tools.tiny.prepare import SMOLLM2

SAMPLES = 8  # answers to a row before training
SMALL = 20e6  # parameters: a model that the settings of the tiny stages fit
TINY, REAL, TWO_GPUS, EIGHT_GPUS = "tiny/stage1_rlvr", "tiny/smollm2", "native_2gpu", "native_gpu"
NO_VERDICT = 1  # status of an evaluation in which a row had none
ALIKE = 1  # status of a reward that pays right answers no more than others: the user's to judge
# What an outer make has set for its own target.
OF_MAKE = re.compile(
    r"MAKE\w*|MFLAGS|SCALE|PLATFORM|LAUNCHER|CLUSTER|ENV_TOML|ENGINE|SEED|EXP_NAME|DRY_RUN|BLEND"
    r"|MODEL|DATA|REWARD|FIELDS|CONFIG_PATH|RESULTS_DIR|ARGS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TryStep:
    """One command, and the statuses with which the next one may follow."""

    title: str
    words: tuple[str, ...]
    allowed: tuple[int, ...] = (0,)

    @property
    def text(self) -> str:
        """The command as one types it."""
        return shlex.join(word for word in self.words if word != "-s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is to be trained on what."""

    model: str
    data: str
    reward: str
    fields: str
    config: str
    results: str
    overrides: tuple[str, ...]
    num_gpus: int

    @property
    def is_made(self) -> bool:
        """Whether `make tiny` makes the model, or fetches it."""
        return self.model in (*BUILDERS, SMOLLM2)

    @property
    def model_path(self) -> str:
        """The directory of the model, or its name on the hub."""
        made = SMOLLM2 if self.model == SMOLLM2 else Path(TINY_MODEL.replace("nemotron-h", self.model)).name
        return f"models/{made}" if self.is_made else self.model

    @property
    def own(self) -> str:
        """The directory of the imported rows, as the Makefile names it."""
        name = re.sub("[:@]", "-", self.data).rpartition("/")[2]
        return f"data/own-{name.rpartition('.')[0] or name}"

    @property
    def name(self) -> str:
        """The name of the run: another one for other inputs."""
        contents = [sha256_of(Path(path)) for path in (self.data, self.reward) if Path(path).is_file()]
        told = [self.model, self.data, self.fields, self.config, *self.overrides, *contents]
        return f"try-{Path(self.own).name}-{hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"

    def problems(self) -> list[Problem]:
        """Return what is wrong with the model and the machine; the other commands say what is wrong with the rest."""
        found = [
            Problem(where=name, wrong="it is not given", fix=f"give {name}={example}")
            for name, given, example in (("MODEL", self.model, SMOLLM2), ("DATA", self.data, "my.jsonl"))
            if not given
        ]
        if (
            self.model
            and not self.is_made
            and not hub_name(self.model)
            and not (Path(self.model) / "config.json").is_file()
        ):
            wrong, fix = taken_for(self.model, "MODEL_PATH")
            if Path(self.model).exists():
                wrong, fix = "it has no config.json", "give a directory in Hugging Face format"
            names = ", ".join((*BUILDERS, SMOLLM2))
            found.append(Problem(where=f"MODEL={self.model}", wrong=wrong, fix=f"{fix}, or one of {names}"))
        elif (name := hub_name(self.model)) and not self.is_made and not cached_model(name):
            found += _refusals(name)
        if self.num_gpus == 1 and not self.config:
            fix = "give CONFIG_PATH, or hide it: CUDA_VISIBLE_DEVICES= trains on the processor"
            found.append(Problem(where="this machine", wrong="one GPU cannot both train and generate", fix=fix))
        return found

    def launch(self) -> tuple[str, ...]:
        """Return the variables of the launch that fits this machine."""
        is_small = self.is_made and self.model != SMOLLM2
        if not self.is_made and (Path(path := model_of(self.model)) / "config.json").is_file():
            is_small = read_architecture(path).parameters < SMALL
        on_gpus = EIGHT_GPUS if self.num_gpus >= 8 else TWO_GPUS
        chosen = TINY if is_small else on_gpus if self.num_gpus else REAL
        scale = () if chosen in (TWO_GPUS, EIGHT_GPUS) else ("SCALE=tiny",)
        return (*scale, f"CONFIG_PATH={self.config or f'configs/{chosen}.yaml'}")


def _refusals(name: HubName) -> list[Problem]:
    """Return why the hub does not give a model; it is only asked for the list of its files."""
    try:
        list_model(name)
        return []
    except InputError as error:
        return error.problems


def make(target: str, *words: str) -> tuple[str, ...]:
    """Return a command of make without the variables that are empty."""
    return ("make", "-s", target, *(word for word in words if word.partition("=")[2]))


def short_steps(inputs: Inputs) -> list[TryStep]:
    """Return what shows wrong inputs within seconds."""
    rows = (f"ROWS={inputs.data}", f"REWARD={inputs.reward}", f"FIELDS={inputs.fields}")
    config = f"CONFIG_PATH={inputs.config or f'configs/{TINY}.yaml'}"
    variables = ("env", "SCALE=tiny", "LAUNCHER=local", f"MODEL_PATH={inputs.model_path}", config)
    check = ("./super_launch.sh", "--check", "stage1.1", *inputs.overrides)
    steps = [
        TryStep(title="settings: check those that were given", words=(*variables, *check)),
        TryStep(title="rows: make them ready for training", words=make("data-import", *rows)),
    ]
    if Path(inputs.reward).is_file():
        probe = ("--reward", inputs.reward, "--rows", f"{inputs.own}/train-split.jsonl")
        words = (".venv/bin/python", "-m", "tools.environments.try_reward", *probe)
        title = "reward: try it on right, empty, echoed and foreign answers"
        steps.append(TryStep(title=title, words=words, allowed=(0, ALIKE)))
    return steps


def model_step(inputs: Inputs) -> list[TryStep]:
    """Return what makes or fetches the model; nothing for a directory."""
    if inputs.is_made:
        return [TryStep(title=f"model: make {inputs.model}", words=make("tiny", f"MODEL={inputs.model}"))]
    name = make("fetch", f"MODEL_PATH={inputs.model}")
    return [TryStep(title="model: fetch it from the hub", words=name)] if hub_name(inputs.model) else []


def long_steps(inputs: Inputs) -> list[TryStep]:
    """Return what checks, measures, plans, trains and reports, once rows and model are there."""
    launch, place, results = inputs.launch(), f"{ROOT}/{inputs.own}", f"RESULTS_DIR={inputs.results}"
    files = (f"TRAIN_PATH={place}/train-split.jsonl", f"VAL_PATH={place}/val-split.jsonl")
    copy = f"{place}/reward-{sha256_of(Path(inputs.reward))[:12]}.py" if inputs.reward else ""
    reward = f"env.nemo_gym.reward.resources_servers.reward.file={copy}" if copy else ""
    overrides = (*inputs.overrides, *([reward] if reward else []))
    words, run = f"ARGS={' '.join(overrides)}", f"EXP_NAME={inputs.name}"
    local = (*launch, "LAUNCHER=local", f"MODEL_PATH={inputs.model_path}", *files, run, results)
    train = ("env", *local, "./super_launch.sh", "stage1.1", *overrides)
    config = launch[-1].partition("=")[2]
    measured = ("--config", config, "--data", f"{inputs.own}/val-split.jsonl", "--samples", str(SAMPLES))
    evaluate = (".venv/bin/python", "-m", "tools.data.curriculum.evaluate", inputs.model_path, *measured)
    before = (*evaluate, "--results", f"{inputs.results}/{inputs.name}-before", *overrides)
    validate = make("data-validate", f"BLEND={Path(inputs.own).name}", f"ARGS={reward}")
    steps = [
        TryStep(title="rows: check each, and that none is in both splits", words=validate),
        TryStep(title="launch: report every problem of it", words=make("doctor", *local, words)),
        TryStep(title="plan: memory and time of a step on this machine", words=make("plan", *local, words)),
        TryStep(title="pass rate before training, on held-out rows", words=before, allowed=(0, NO_VERDICT)),
        TryStep(title="train; progress is in the log that is named", words=train),
    ]
    if read_object(Path(inputs.results) / inputs.name / "status.json").get("state") == "done":
        print(f"try: {inputs.name} is trained already; make report shows it", flush=True)
        steps = []
    return [*steps, TryStep(title="report", words=make("report", run, results))]


def run_step(step: TryStep, number: int) -> int:
    """Say what a step does and how to do it alone, and run it; return its status."""
    print(f"\n[{number}] {step.title}\n    {step.text}", flush=True)
    kept = {name: value for name, value in os.environ.items() if not OF_MAKE.fullmatch(name)}
    return subprocess.run(step.words, cwd=ROOT, env=kept, check=False).returncode


def try_all(inputs: Inputs) -> int:
    """Run all steps; return the status."""
    problems = inputs.problems()
    steps = short_steps(inputs) if inputs.data else []
    ended = [(step, run_step(step, number)) for number, step in enumerate(steps, start=1)]
    failed = [step for step, status in ended if status not in step.allowed]
    if problems or failed:
        for problem in problems:
            print(problem, file=sys.stderr)
        wrong = [step.title.partition(":")[0] for step in failed] + [problem.where for problem in problems]
        print(f"try: correct what is said above about {', '.join(wrong)}; nothing was started", file=sys.stderr)
        return InputError.exit_code
    number = len(steps)
    for part in (model_step, long_steps):
        for step in part(inputs):
            number += 1
            status = run_step(step, number)
            if status not in step.allowed:
                again = "the same `make try` goes on here, and so does the command above"
                print(f"try: [{number}] ended with status {status}; {again}", file=sys.stderr)
                return InputError.exit_code if status == InputError.exit_code else status
    run = f"{inputs.results}/{inputs.name}"
    print(f"\nnext: make eval CHECKPOINT={run}   make chat CHECKPOINT={run}   make why EXP_NAME={inputs.name}")
    return 0


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Read the inputs and run all steps."""
    parser = argparse.ArgumentParser(prog="python -m tools.launch.try_own", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", required=True, help="smollm2, a tiny family, a directory, or a name on the hub")
    parser.add_argument("--data", required=True, help="rows: a file, or a name on the hub")
    parser.add_argument("--reward", default="", help="Python file with score(response, row)")
    parser.add_argument("--fields", default="", help="names of your columns: question=NAME answer=NAME")
    parser.add_argument("--config", default="", help="configuration, instead of the one that fits this machine")
    parser.add_argument("--results", default="results", help="directory of the run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    args = parser.parse_intermixed_args(argv)
    overrides = tuple(args.overrides)
    given = {name: getattr(args, name) for name in ("model", "data", "reward", "fields", "config", "results")}
    return try_all(Inputs(**given, overrides=overrides, num_gpus=count_gpus()))


if __name__ == "__main__":
    sys.exit(main())
