"""The jobs of this run, its partition and its account, as Slurm describes them. Every question has a deadline."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found
from tools.planning.live_jobs import asking_environment, run_problems
from tools.planning.walltime import UNLIMITED, slurm_seconds

DEADLINE_SECONDS = 5.0  # of one command; sinfo waits for many seconds when the controller is dead
NOT_UP = ("down", "drain", "drng", "fail", "maint", "unk", "boot", "resv", "futr", "inval")  # as sinfo shortens them
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


class NoAnswerError(Exception):
    """Slurm is not there, or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    count: int
    gpus: int  # of each
    is_up: bool


def check(draft: Draft) -> Iterator[Finding]:
    """Compare the job with its partition and its account."""
    contract = draft.contract
    if contract.is_local:
        return
    try:
        if draft.run_dir is not None:
            yield from as_findings("PTH003", _jobs_of_the_run(contract["EXP_NAME"], draft.run_dir))
        if not contract["SLURM_PARTITION"]:
            return
        fits: list[list[Finding]] = []
        for name in contract["SLURM_PARTITION"].split(","):
            partition = ask_partition(name)
            fits.append(list(partition_findings(draft, name, partition)))
        # Slurm takes the first of several partitions that suits.
        if all(any(finding.severity == "error" for finding in findings) for findings in fits):
            for findings in fits:
                yield from findings
        elif len(fits) == 1:
            yield from fits[0]
        if contract["SLURM_ACCOUNT"]:
            yield from account_findings(contract["SLURM_ACCOUNT"])
    except NoAnswerError as error:
        wrong = f"jobs, partition, nodes and account were not checked: {error}"
        yield found("SLM006", where="Slurm", wrong=wrong, fix="start the doctor on a login node to have them checked")


def _jobs_of_the_run(name: str, run_dir: Path) -> list[Problem]:
    try:
        return run_problems(name, run_dir)
    except LaunchError as error:  # a controller that did not answer this answers no other question either
        raise NoAnswerError(error.problems[0].what.splitlines()[-1]) from error


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; raises `NoAnswerError` without the command, a controller or time."""
    if shutil.which(command[0]) is None:
        raise NoAnswerError(f"no command {command[0]}")
    try:
        result = subprocess.run(
            command, env=asking_environment(), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not answer within {DEADLINE_SECONDS:g} s") from error
    return result


def ask_partition(name: str) -> Mapping[str, str] | None:
    """Return the fields of a partition, None when there is no such one."""
    result = ask("scontrol", "show", "partition", name, "--oneliner")
    if result.returncode == 0:
        return dict(_FIELD.findall(result.stdout))
    if "not found" in result.stdout + result.stderr:
        return None
    raise NoAnswerError((result.stderr.strip().splitlines() or ["scontrol failed"])[-1])


def ask_nodes(name: str) -> list[NodeGroup]:
    """Return the nodes of a partition in groups."""
    result = ask("sinfo", "--noheader", f"--partition={name}", "--format=%D|%G|%t")
    return [node_group(line) for line in result.stdout.splitlines() if line.count("|") == 2]


def node_group(line: str) -> NodeGroup:
    """Read `COUNT|GRES|STATE` as sinfo writes it."""
    count, gres, state = line.split("|")
    gpus = sum(int(number) for number in _GPUS.findall(gres))
    is_up = not state.strip().endswith("*") and not state.startswith(NOT_UP)
    return NodeGroup(count=int(count), gpus=gpus, is_up=is_up)


def partition_findings(draft: Draft, name: str, partition: Mapping[str, str] | None) -> Iterator[Finding]:
    """Compare a job with one partition."""
    where = "SLURM_PARTITION"
    if partition is None:
        yield found(
            "SLM001", where=where, got=name, expected="a partition of this cluster", fix="choose one that `sinfo` lists"
        )
        return
    if partition.get("State", "UP") != "UP":
        got, fix = f"{name}, which is {partition['State']}", "choose another one, or wait"
        yield found("SLM001", where=where, got=got, expected="a partition that takes jobs", fix=fix)
    yield from _time_findings(draft, name, partition)
    yield from preemption_findings(name, partition, ask("scontrol", "show", "config").stdout)
    yield from _taken_account_findings(draft, name, partition)
    if draft.sizes is not None:
        needed = max(draft.sizes.num_nodes, int(draft.contract["SBATCH_NUM_NODES"] or 0))
        gpus = draft.sizes.total_gpus // draft.sizes.num_nodes
        most = partition.get("MaxNodes", "UNLIMITED")
        if most.isdecimal() and int(most) < needed:
            got, fix = f"{needed} nodes", "choose another partition, or a smaller scale"
            yield found("SLM002", where=where, got=got, expected=f"at most MaxNodes = {most} of {name}", fix=fix)
        yield from node_findings(name, ask_nodes(name), needed, gpus)


def node_findings(name: str, groups: list[NodeGroup], needed: int, gpus: int) -> Iterator[Finding]:
    """Compare the nodes of a partition with `needed` nodes of `gpus` GPUs each."""
    where, fix = f"SLURM_PARTITION={name}", "choose another partition, or a smaller scale"
    total = sum(group.count for group in groups)
    enough = [group for group in groups if group.gpus >= gpus]
    fitting, up = sum(group.count for group in enough), sum(group.count for group in enough if group.is_up)
    if total < needed:
        yield found("SLM002", where=where, got=f"{total} nodes", expected=f"at least {needed}", fix=fix)
    elif fitting < needed:
        most = max((group.gpus for group in groups), default=0)
        got = f"{fitting} nodes with {gpus} GPUs (gres; the most is {most})"
        yield found("SLM003", where=where, got=got, expected=f"at least {needed}", fix=fix)
    elif up < needed:
        wrong = f"{up} of {fitting} nodes are up, and the run needs {needed}"
        yield found("SLM007", where=where, wrong=wrong, fix="start it all the same: the job waits until nodes return")


def preemption_findings(name: str, partition: Mapping[str, str], settings: str) -> Iterator[Finding]:
    """Note a partition that takes nodes back from a run which has not been asked to save; `settings` are Slurm's."""
    mode, grace = partition.get("PreemptMode", "OFF"), partition.get("GraceTime", "0")
    asks_first = re.search(r"^PreemptParameters\s*=.*send_user_signal", settings, re.MULTILINE) is not None
    if mode in ("CANCEL", "REQUEUE") and (grace == "0" or not asks_first):
        wrong = f"jobs of {name} can be preempted (PreemptMode={mode}), and a run then loses what it has not saved"
        fix = "lower checkpointing.save_period; or have the partition get a GraceTime, and PreemptParameters "
        fix += "send_user_signal: then a run is asked to save first"
        yield found("SLM009", where=f"SLURM_PARTITION={name}", wrong=wrong, fix=fix)


def _time_findings(draft: Draft, name: str, partition: Mapping[str, str]) -> Iterator[Finding]:
    most, asked = partition.get("MaxTime", "UNLIMITED"), draft.contract["SLURM_TIME_LIMIT"]
    limit = None if most.lower() in UNLIMITED else slurm_seconds(most)
    seconds = slurm_seconds(asked) if asked.lower() not in UNLIMITED else float("inf")
    if limit is not None and seconds is not None and seconds > limit:
        fix = "lower it: a run that reaches its limit saves and is resubmitted"
        yield found("SLM004", where="SLURM_TIME_LIMIT", got=asked, expected=f"at most {most} of {name}", fix=fix)


def _taken_account_findings(draft: Draft, name: str, partition: Mapping[str, str]) -> Iterator[Finding]:
    account = draft.contract["SLURM_ACCOUNT"]
    allowed, denied = partition.get("AllowAccounts", "ALL"), partition.get("DenyAccounts", "")
    if account and ((allowed != "ALL" and account not in allowed.split(",")) or account in denied.split(",")):
        expected = f"an account that {name} takes" + (f": {allowed}" if allowed != "ALL" else "")
        yield found("SLM005", where="SLURM_ACCOUNT", got=account, expected=expected, fix="choose one of them")


def account_findings(account: str) -> Iterator[Finding]:
    """Check that the user may charge an account, where Slurm keeps accounts and insists on them."""
    try:
        user = getpass.getuser()
        query = ("show", "associations", f"user={user}", f"account={account}", "format=account")
        result = ask("sacctmgr", "--noheader", "--parsable2", *query)
        if result.returncode or result.stdout.strip():
            return  # without accounting every account is taken
        settings = ask("scontrol", "show", "config").stdout
    except NoAnswerError:
        return
    enforced = re.search(r"^AccountingStorageEnforce\s*=\s*(\S+)", settings, re.MULTILINE)
    if enforced and "associations" in enforced[1]:
        expected = f"an account of user {user}"
        fix = f"choose one that `sacctmgr show associations user={user}` lists"
        yield found("SLM005", where="SLURM_ACCOUNT", got=account, expected=expected, fix=fix)
