"""Run every subject on a draft, side by side, and collect what they find in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from tools.doctor import (
    allocation,
    code,
    data,
    engine,
    images,
    machine,
    model,
    paths,
    services,
    slurm,
    task_containers,
    task_images,
)
from tools.planning.draft import Draft
from tools.planning.findings import Finding, found

Subject = Callable[[Draft], Iterable[Finding]]

SUBJECTS: dict[str, Subject] = {
    "variables and configuration": lambda draft: draft.findings,
    "engine": engine.check,
    "allocation": allocation.check,
    "Slurm": slurm.check,
    "paths": paths.check,
    "code": code.check,
    "data": data.check,
    "task images": task_images.check,
    "task containers": task_containers.check,
    "start weights": model.check,
    "containers": images.check,
    "this machine": machine.check,
    "servers and tokens": services.check,
}


def examine(draft: Draft) -> list[Finding]:
    """Return everything that is wrong with a launch. What waits for Slurm or a server waits beside the rest."""
    with ThreadPoolExecutor(len(SUBJECTS)) as pool:
        running = [pool.submit(_examined, name, subject, draft) for name, subject in SUBJECTS.items()]
        return [finding for result in running for finding in result.result()]


def _examined(name: str, subject: Subject, draft: Draft) -> list[Finding]:
    try:
        return list(subject(draft))
    except Exception as error:  # one check that fails must not hide what the others find
        wrong = f"the check itself failed with {type(error).__name__}: {error}"
        fix = "report it; --force starts without this check"
        return [found("DOC001", where=f"doctor: {name}", wrong=wrong, fix=fix)]
