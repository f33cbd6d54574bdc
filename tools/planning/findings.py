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
class Code:
    """What a code stands for; `can_force` says that --force turns the error into a note."""

    meaning: str
    severity: Severity = "error"
    can_force: bool = False


CODES = {
    "ENV001": Code("a required variable is not set"),
    "ENV002": Code("a variable has a value that it cannot have"),
    "ENV003": Code("no such stage, or no configuration of it for this scale and platform"),
    "ENV004": Code("a variable asks for something that is not built yet"),
    "ENV005": Code("the profile of CLUSTER is wrong, or there is none of that name"),
    "ENV006": Code("a field of the profile has no effect here", severity="note"),
    "ENV007": Code("a variable that nothing reads has almost the name of one that the launch reads", severity="note"),
    "CFG001": Code("the configuration is wrong: file, key, type, range, or a rule between keys"),
    "CFG002": Code("a value that must be given at launch is missing from the configuration"),
    "CFG003": Code("a value that the native engine would have to ignore"),
    "CFG004": Code("the run would have to save after its job has ended"),
    "ALC001": Code("fewer nodes are asked for than the configuration needs"),
    "ALC002": Code("this machine has fewer GPUs than the run has workers", can_force=True),
    "SLM001": Code("Slurm has no such partition, or it takes no jobs", can_force=True),
    "SLM002": Code("the partition has fewer nodes than the run needs, or allows fewer", can_force=True),
    "SLM003": Code("the partition's nodes have fewer GPUs than the run asks for on each", can_force=True),
    "SLM004": Code("the time limit is longer than the partition allows", can_force=True),
    "SLM005": Code("Slurm knows no such account for this user, or the partition does not take it", can_force=True),
    "SLM006": Code("Slurm did not answer, so nothing was compared with it", severity="note"),
    "SLM007": Code("fewer nodes are up right now than the run needs: the job would wait", severity="note"),
    "SLM008": Code("there is no sbatch on this machine, so nothing can be submitted from it"),
    "PTH001": Code("the run directory, or the directory of caches, cannot be written", can_force=True),
    "PTH002": Code("a path that a container must see is not mounted", can_force=True),
    "PTH003": Code("a run of this name is in progress"),
    "PTH004": Code("the disk is too full for one more checkpoint", can_force=True),
    "PTH005": Code("the disk holds fewer checkpoints than the configuration keeps", severity="note"),
    "COD001": Code("the code cannot be copied for the job: no git checkout, or git fails"),
    "COD002": Code("a file of the configuration would be missing from the job's copy of the code"),
    "COD003": Code("the snapshot that is taken again has another configuration than this checkout"),
    "DAT001": Code("a data file is missing or empty"),
    "DAT002": Code("a placeholder row was not filled"),
    "DAT003": Code("a row names an agent that does not exist"),
    "DAT004": Code("a row is malformed, or its verifier cannot read it"),
    "DAT005": Code("the parameters of a row's tool are no JSON Schema of an object"),
    "DAT006": Code("a data file is not the one that its manifest describes", can_force=True),
    "DAT007": Code("rows ask for low effort, but effort shaping is off", severity="note"),
    "DAT008": Code("a data file has no manifest, so its origin is unknown", severity="note"),
    "DAT009": Code("effort shaping is on, but no row asks for low effort", can_force=True),
    "MDL001": Code("the start weights are not there or not complete"),
    "MDL002": Code("a weight file has not the size that its header declares: a cut copy"),
    "MDL003": Code("the parent's checkpoint was not finished, or a file of it was changed since"),
    "MDL004": Code("the model does not fit the configuration's parallel sizes, lengths or heads"),
    "MDL005": Code("tokenizer or chat template differ from those of the parent", can_force=True),
    "MDL006": Code("large weights were checked by size, not by checksum", severity="note"),
    "MDL007": Code("the tokenizer cannot be used"),
    "MDL008": Code("a stage of a pipeline has trained already, from an export that was not its parent's last"),
    "MDL009": Code("the native engine cannot build a model of this architecture"),
    "IMG001": Code("an image file is missing"),
    "IMG002": Code("an image is not of the kind that the runtime takes"),
    "IMG003": Code("an image file is shorter than its header says: a cut copy or an import that did not end"),
    "IMG004": Code("the name of an image is malformed, or of a kind that the runtime does not fetch"),
    "IMG005": Code("an image is not the one that containers/images.lock records", severity="note"),
    "SIF001": Code("the directory of task images is not given or not there"),
    "SIF002": Code("rows have no task image", can_force=True),
    "SIF003": Code("a task image is not a SIF file, or cut", can_force=True),
    "SIF004": Code("rows of instances that a check of their images did not find good", can_force=True),
    "PRT001": Code("a port of the run is taken"),
    "PRT002": Code("the kernel hands out ports of the port table to outgoing connections"),
    "PRT003": Code("no slot of the port table is free on this machine"),
    "JDG001": Code("a model or verifier server does not answer", can_force=True),
    "JDG002": Code("a judge's model is neither a directory nor in the cache", can_force=True),
    "TOK001": Code("Weights & Biases is on, and there is no key for it", can_force=True),
    "TOK002": Code("a model would have to be fetched, and there is no Hugging Face token", severity="note"),
    "ENG001": Code("the engine that is asked for is not on this machine"),
    "ENG002": Code("a value with which the engine that is asked for would train something else"),
    "ENG003": Code("an override that the engine that is asked for refuses, or that it does not read"),
    "ENG004": Code("a key that the engine that is asked for lacks, or treats differently", severity="note"),
    "DOC001": Code("a check failed itself, so its subject is unknown", can_force=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of a launch."""

    code: str
    problem: Problem
    severity: Severity
    is_forced: bool = False  # an error that --force made a note

    def __str__(self) -> str:
        return f"{self.code} {self.problem}"


def found(code: str, *, where: str, got: str, expected: str, fix: str) -> Finding:
    """Return the finding of a code, with the severity that the table gives it."""
    return as_finding(code, Problem(where=where, got=got, expected=expected, fix=fix))


def as_finding(code: str, problem: Problem) -> Finding:
    """Return a problem under its code, with the severity that the table gives it."""
    return Finding(code=code, problem=problem, severity=CODES[code].severity)


def as_findings(code: str, problems: Iterable[Problem]) -> list[Finding]:
    """Return problems of one kind under their code."""
    return [as_finding(code, problem) for problem in problems]


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return what refuses the launch."""
    return [finding for finding in findings if finding.severity == "error"]


def forced(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with every error that may be forced made a note."""
    return [
        replace(finding, severity="note", is_forced=True)
        if finding.severity == "error" and CODES[finding.code].can_force
        else finding
        for finding in findings
    ]
