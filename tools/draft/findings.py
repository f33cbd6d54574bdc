"""What a check of a launch finds: a problem with a stable code, and the table of all codes.

A code never changes its meaning: scripts, tickets and answers refer to it. A new check takes the next free number of
its family; a number that is no longer used is not given out again. `make doctor ARGS=--codes` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from recipes.errors import Problem

Severity = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a code stands for, and what follows from it."""

    meaning: str
    severity: Severity = "error"
    can_force: bool = False  # --force turns the error into a note
    has_command: bool = False  # of an error of variables or configuration: it leaves a command that can be printed
    is_made: bool = False  # a file is missing that may be one of those which `make tiny` makes


CODES = {
    "ENV001": Kind("a required variable is not set"),
    "ENV002": Kind("a variable has a value that it cannot have"),
    "ENV003": Kind("no such stage, or no configuration of it for this scale and platform"),
    "ENV005": Kind("the profile of CLUSTER is wrong, or there is none of that name"),
    "ENV006": Kind("a field of the profile has no effect here", severity="note"),
    "ENV007": Kind("a variable that nothing reads has almost the name of one that the launch reads", severity="note"),
    "ENV008": Kind("an override names another input than the variable that the launch checks and records"),
    "ENV009": Kind("CONFIG_PATH has the path of NeMo RL, and our file of that stage is taken", severity="note"),
    "ENV010": Kind("a variable is read only with another one, which is off", severity="note"),
    "CFG001": Kind("the configuration is wrong: file, key, type, range, or a rule between keys"),
    "CFG002": Kind("a value that must be given at launch is missing from the configuration", has_command=True),
    "CFG003": Kind("a value that the native engine would have to ignore", has_command=True),
    "CFG005": Kind("what waits in the run's checkpoint cannot be trained under the configuration"),
    "CFG006": Kind("the optimizer in the run's checkpoint has another form than the configuration's"),
    "CFG007": Kind("the form of the optimizer in the run's checkpoint is not known before the start", severity="note"),
    "CFG004": Kind("the run would have to save after its job has ended", has_command=True),
    "ALC001": Kind("fewer nodes are asked for than the configuration needs"),
    "ALC002": Kind("this machine has fewer GPUs than the run has workers", can_force=True),
    "ALC003": Kind("this machine has no GPU, and the run is too large for its processors", can_force=True),
    "ALC004": Kind("processes may open fewer files, or start fewer threads, than a run needs"),
    "ALC005": Kind("a bring-up with a planted fault does not end as it must"),
    "SLM001": Kind("Slurm has no such partition, or it takes no jobs", can_force=True),
    "SLM002": Kind("the partition has fewer nodes than the run needs, or allows fewer", can_force=True),
    "SLM003": Kind("the partition's nodes have fewer GPUs than the run asks for on each", can_force=True),
    "SLM004": Kind("the time limit is longer than the partition allows", can_force=True),
    "SLM005": Kind("Slurm knows no such account for this user, or the partition does not take it", can_force=True),
    "SLM006": Kind("Slurm did not answer, so nothing was compared with it", severity="note"),
    "SLM007": Kind("fewer nodes are up right now than the run needs: the job would wait", severity="note"),
    "SLM008": Kind("there is no sbatch on this machine, so nothing can be submitted from it"),
    "SLM009": Kind("jobs of the partition can be preempted before they have saved", severity="note"),
    "PTH001": Kind("the run directory, or the directory of caches, cannot be written", can_force=True),
    "PTH002": Kind("a path that a container must see is not mounted", can_force=True),
    "PTH003": Kind("a run of this name is in progress"),
    "PTH004": Kind("the disk is too full for one more checkpoint", can_force=True),
    "PTH005": Kind("the disk holds fewer checkpoints than the configuration keeps", severity="note"),
    "PTH007": Kind("the run had checkpoints, and none that is complete is there"),
    "PTH008": Kind("steps are logged, and there is no checkpoint of any: the run starts over", severity="note"),
    "PTH009": Kind("every checkpoint of the run is damaged, or the one to go on from cannot be read"),
    "PTH010": Kind("the newest checkpoint of the run is damaged: it goes on from an older one", severity="note"),
    "PTH011": Kind("the run's checkpoint is of another model than MODEL_PATH"),
    "PTH012": Kind("the run goes on from its checkpoint, and MODEL_PATH names other weights", severity="note"),
    "PTH006": Kind("/dev/shm has less room than the run needs", can_force=True),
    "COD001": Kind("the code cannot be copied for the job: no git checkout, or git fails"),
    "COD002": Kind("a file of the configuration would be missing from the job's copy of the code"),
    "COD003": Kind("the snapshot that is taken again has another configuration than this checkout"),
    "DAT001": Kind("a data file is missing or empty", is_made=True),
    "DAT002": Kind("a placeholder row was not filled"),
    "DAT003": Kind("a row names an agent that does not exist"),
    "DAT004": Kind("a row is malformed, or its verifier cannot read it"),
    "DAT005": Kind("the parameters of a row's tool are no JSON Schema of an object"),
    "DAT006": Kind("a data file is not the one that its manifest describes", can_force=True),
    "DAT007": Kind("rows ask for low effort, but effort shaping is off", severity="note"),
    "DAT008": Kind("a data file has no manifest, so its origin is unknown", severity="note"),
    "DAT009": Kind("effort shaping is on, but no row asks for low effort", can_force=True),
    "DAT010": Kind("validation rows are training rows, too, so the held-out reward is too high", severity="note"),
    "DAT012": Kind("the rows do not suffice for one step"),
    "DAT013": Kind("validation rows whose answers are compared get one answer each"),
    "DAT014": Kind("the data is not that of the run's checkpoint"),
    "DAT011": Kind("the rows suffice for fewer steps than are asked for", severity="note"),
    "MDL001": Kind("the start weights are not there, not complete, or contradict each other", is_made=True),
    "MDL002": Kind("a weight file has not the size that its header declares: a cut copy"),
    "MDL003": Kind("the parent's checkpoint was not finished, or a file of it was changed since"),
    "MDL004": Kind("the model does not fit the configuration's parallel sizes, lengths or heads"),
    "MDL005": Kind("tokenizer or chat template differ from those of the parent", can_force=True),
    "MDL006": Kind("large weights were checked by size, not by checksum", severity="note"),
    "MDL007": Kind("the tokenizer cannot be used"),
    "MDL008": Kind("a stage of a pipeline has trained already, from an export that was not its parent's last"),
    "MDL009": Kind("the native engine cannot build a model of this architecture"),
    "MDL010": Kind("a weight file lies beside those that the index names, and nothing reads it", severity="note"),
    "MDL011": Kind("the weights are not those of the model that config.json describes", can_force=True),
    "MDL013": Kind("an engine does not take what the policy pushes"),
    "MDL014": Kind("a rank does not fit into its GPU's memory"),
    "MDL012": Kind(
        "the parent stage has a newer run than the one that is taken by default", can_force=True, has_command=True
    ),
    "IMG001": Kind("an image file is missing"),
    "IMG002": Kind("an image is not of the kind that the runtime takes"),
    "IMG003": Kind("an image file is shorter than its header says: a cut copy or an import that did not end"),
    "IMG004": Kind("the name of an image is malformed, or of a kind that the runtime does not fetch"),
    "IMG005": Kind("an image is not the one that containers/images.lock records", severity="note"),
    "IMG006": Kind("pins of an environment's lock contradict what its packages ask for"),
    "SIF001": Kind("the directory of task images is not given or not there", is_made=True),
    "SIF002": Kind("rows have no task image", can_force=True),
    "SIF003": Kind("a task image is not a SIF file, or cut", can_force=True),
    "SIF004": Kind("rows of instances that a check of their images did not find good", can_force=True),
    "SIF005": Kind("rows whose tests are run by a command that code under test can deceive", severity="note"),
    "CTR001": Kind("this machine cannot run the containers of tasks", can_force=True),
    "CTR002": Kind("an agent program is not installed"),
    "PRT001": Kind("a port of the run is taken"),
    "PRT002": Kind("the kernel hands out ports of the port table to outgoing connections"),
    "PRT003": Kind("no slot of the port table is free on this machine"),
    "JDG001": Kind("a model or verifier server does not answer", can_force=True),
    "JDG002": Kind("a judge's model is neither a directory nor in the cache", can_force=True, is_made=True),
    "JDG003": Kind("a judge would be asked in other words than the recipe's"),
    "JDG004": Kind("a published text that a judge is asked with is missing or was changed"),
    "JDG005": Kind("a file that a verifier's settings name is missing, or would be missing for the job"),
    "JDG006": Kind("a judge that is given by URL is wrong about a known answer, or gives no verdict", can_force=True),
    "JDG007": Kind("the same, where env.judge_probe only warns of it", severity="note"),
    "WAN001": Kind("Weights & Biases is on, and its package is not installed on this machine"),
    "WAN002": Kind("a project of Weights & Biases and a key are given, and nothing is sent", severity="note"),
    "WAN003": Kind("Weights & Biases is on in a container, and nobody sees whether the image has it", severity="note"),
    "TOK001": Kind("Weights & Biases is on, and there is no key for it", can_force=True),
    "TOK002": Kind("a model would have to be fetched, and there is no Hugging Face token", severity="note"),
    "ENG001": Kind("the engine that is asked for is not on this machine"),
    "ENG002": Kind("a value with which the engine that is asked for would train something else"),
    "ENG003": Kind("an override that the engine that is asked for refuses, or that it does not read"),
    "ENG004": Kind("a key that the engine that is asked for lacks, or treats differently", severity="note"),
    "ENG005": Kind("the start weights bring code, and it is not said that it may run"),
    "ENG006": Kind("a key needs a package that is not installed on this machine", can_force=True),
    "ENG007": Kind("torch is a build for processors alone, and the run needs GPUs", can_force=True),
    "ENG008": Kind("a value that engines have on GPUs alone, and this machine has none", can_force=True),
    "ENG009": Kind(
        "the engine that is asked for does not run in the image that is given", can_force=True, has_command=True
    ),
    "ENG010": Kind("GPUs are here, and torch is a build for processors alone: the run uses none", severity="note"),
    "ENG011": Kind(
        "a key needs a package that the GPU image has not, if it is that of `make container`", can_force=True
    ),
    "DOC001": Kind("a check failed itself, so its subject is unknown", can_force=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of a launch. All that follows from its severity is read from here."""

    code: str
    problem: Problem
    kind: Kind
    is_forced: bool = False  # an error that --force made a note

    @property
    def severity(self) -> Severity:
        return "note" if self.is_forced else self.kind.severity

    @property
    def can_force(self) -> bool:
        return self.kind.can_force

    def __str__(self) -> str:
        return f"{self.code} {self.problem}"


def found(code: str, *, where: str, fix: str, got: str = "", expected: str = "", wrong: str = "") -> Finding:
    """Return a finding with the severity of its code; it has `got` and `expected`, or `wrong`, as a `Problem` has."""
    return as_finding(code, Problem(where=where, got=got, expected=expected, wrong=wrong, fix=fix))


def as_finding(code: str, problem: Problem) -> Finding:
    """Return a problem under its code, with the severity that the table gives it."""
    return Finding(code=code, problem=problem, kind=CODES[code])


def as_findings(code: str, problems: Iterable[Problem]) -> list[Finding]:
    """Return problems of one kind under their code."""
    return [as_finding(code, problem) for problem in problems]


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return what refuses the launch."""
    return [finding for finding in findings if finding.severity == "error"]


def forced(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with every error that may be forced made a note."""
    return [
        replace(finding, is_forced=True) if finding.severity == "error" and finding.can_force else finding
        for finding in findings
    ]
