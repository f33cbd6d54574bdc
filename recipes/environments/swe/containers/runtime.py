"""Which program runs containers on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from recipes.environments.swe.containers import apptainer, bwrap, podman
from recipes.environments.swe.contract import Runtime
from recipes.errors import LaunchError, Problem

# Bubblewrap before Podman: both run the same images, and Podman takes a second more to start one.
RUNTIMES: Mapping[str, tuple[Mapping[str, str], Callable[[], Runtime]]] = {
    "apptainer": (apptainer.PROGRAMS, apptainer.ApptainerRuntime),
    "bwrap": (bwrap.PROGRAMS, bwrap.BwrapRuntime),
    "podman": (podman.PROGRAMS, podman.PodmanRuntime),
}


def runtime_of_machine() -> Runtime:
    """Return the first of `RUNTIMES` whose programs are installed; raises `LaunchError` with what each lacks."""
    lacking: list[str] = []
    for name, (programs, make) in RUNTIMES.items():
        if not (missing := missing_programs(programs)):
            return make()
        lacking.append(f"{name} needs {', '.join(missing)}")
    packages = " ".join(sorted({bwrap.PROGRAMS[program] for program in missing_programs(bwrap.PROGRAMS)}))
    raise LaunchError(
        Problem(
            where="containers of tasks",
            wrong=f"no program on this machine can run them ({'; '.join(lacking)})",
            fix=f"install apptainer, or `apt-get install {packages}`",
        )
    )


def missing_programs(programs: Mapping[str, str]) -> list[str]:
    """Return those of the programs that are not installed."""
    return [program for program in programs if shutil.which(program) is None]
