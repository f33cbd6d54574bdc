"""The ports of this machine, and a run of the same name. The nodes of a job check theirs when Ray starts there."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from recipes.cluster.ports import node_problems, ray_ports
from recipes.errors import LaunchError, Problem
from tools.doctor.slurm import NoAnswerError, ask
from tools.job.local import LOCAL_RUNS, take_slot
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_finding, as_findings
from tools.planning.run_dir import lock_problems


def check(draft: Draft) -> Iterator[Finding]:
    """Check what a Ray head on this machine would need, when the run or its job could have one here."""
    if draft.contract.is_local:
        if draft.run_dir is not None:
            yield from as_findings("PTH003", lock_problems(draft.run_dir))
        try:
            take_slot()[1].close()
        except LaunchError as error:
            yield from (as_finding(code_of(problem), problem) for problem in error.problems)
        return
    problems = node_problems(ray_ports(), head=True)
    if problems and is_node_of(draft.contract["SLURM_PARTITION"]):
        yield from (as_finding(code_of(problem), problem) for problem in problems)


def code_of(problem: Problem) -> str:
    """Return the code of a problem with ports."""
    if problem.where.startswith("net."):
        return "PRT002"
    return "PRT003" if problem.where == LOCAL_RUNS else "PRT001"


def is_node_of(partition: str) -> bool:
    """Whether a job of this partition could run on this machine."""
    host = socket.gethostname().partition(".")[0]
    try:
        found = ask("sinfo", "--noheader", f"--partition={partition}", f"--nodes={host}", "--format=%D")
    except NoAnswerError:
        return False
    return found.returncode == 0 and bool(found.stdout.strip())
