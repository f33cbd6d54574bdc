"""Run every subject on a launch, side by side, and collect what they find in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from tools.doctor import machine, model, services, slurm
from tools.draft.findings import Finding, found
from tools.draft.launch import Launch

Subject = Callable[[Launch], Iterable[Finding]]


def data_rows(launch: Launch) -> Iterable[Finding]:
    """Check the rows, which takes the module of every verifier."""
    from tools.doctor import data

    return data.check(launch)


def task_images(launch: Launch) -> Iterable[Finding]:
    """Check the images of tasks, where there are any."""
    if not launch.needs_task_images:
        return ()
    from tools.doctor import task_images

    return task_images.check(launch)


def task_containers(launch: Launch) -> Iterable[Finding]:
    """Start a container of a task, where there are any."""
    if not launch.needs_task_images:
        return ()
    from tools.doctor import task_images

    return task_images.check_programs(launch)


SUBJECTS: dict[str, Subject] = {
    "variables and configuration": lambda launch: launch.findings,
    "engine": machine.check_engine,
    "allocation": machine.check_allocation,
    "Slurm": slurm.check,
    "paths": machine.check_paths,
    "code": machine.check_code,
    "data files": machine.check_files,
    "data": data_rows,
    "task images": task_images,
    "task containers": task_containers,
    "start weights": model.check,
    "containers": slurm.check_containers,
    "this machine": machine.check_machine,
    "servers and tokens": services.check,
    "texts of judges": services.text_findings,
}
# Subjects that a dry run leaves out: they take as long as there are rows, or the module of every verifier.
THOROUGH = ("data", "task containers", "texts of judges")


def examine(launch: Launch, *, is_dry: bool = False) -> list[Finding]:
    """Return everything that is wrong with a launch. What waits for Slurm or a server waits beside the rest."""
    subjects = {name: subject for name, subject in SUBJECTS.items() if not (is_dry and name in THOROUGH)}
    with ThreadPoolExecutor(len(subjects)) as pool:
        running = [pool.submit(_examined, name, subject, launch) for name, subject in subjects.items()]
        return [finding for result in running for finding in result.result()]


def _examined(name: str, subject: Subject, launch: Launch) -> list[Finding]:
    try:
        return list(subject(launch))
    except Exception as error:  # one check that fails must not hide what the others find
        wrong = f"the check itself failed with {type(error).__name__}: {error}"
        fix = "report it; --force starts without this check"
        return [found("DOC001", where=f"doctor: {name}", wrong=wrong, fix=fix)]
