"""Which program runs containers on this machine.

Containers by bubblewrap: on a SIF file, a squashfs or a directory with a root file system. See `held.py`.

Containers by Apptainer, with the options that this repository uses for every image that is not trusted.

`--containall`: namespaces of its own for processes and IPC, an empty home and /tmp, a minimal /dev, no variables of
this process. `--writable-tmpfs`: a writable layer in memory, of the size that the machine's apptainer.conf sets
(`sessiondir max size`). `--net --network=none`: no network. No directory of this machine is shown but that of pipes.
Root in a container is the user who started it outside; of root, Apptainer drops all rights (`--no-privs`).

Containers by Podman: on the same images as bubblewrap's. See `held.py`.

Podman runs in namespaces of users, processes and mounts that are one container's alone, as the user that containers run
as: what it starts and notes ends with it, also when the worker is killed. Its runtime is runc, and it reads nothing of
the machine's own configuration.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from recipes.confinement import filters, jails
from recipes.environments.sandbox.images import isolation
from recipes.environments.swe.containers import held
from recipes.environments.swe.containers.container import ContainerStart, RunningContainer, init_words
from recipes.environments.swe.containers.held import HeldRuntime, Opened
from recipes.environments.swe.containers.places import container_directory
from recipes.environments.swe.contract import ContainerFailedError, ContainerLimits, Runtime
from recipes.errors import LaunchError, Problem

BWRAP_PROGRAMS = {"bwrap": "bubblewrap", **held.PROGRAMS}


class BwrapRuntime(HeldRuntime):
    """See `contract.Runtime`."""

    def __init__(self) -> None:
        super().__init__(_Bwrap())


class _Bwrap:
    name = "bwrap"

    def open(self, directory: Path, layer: Path) -> Opened:
        descriptor = jails.memory_file("filter", filters.jail())
        jail = jails.task(
            root=layer / "root", shared_memory=layer / "shm", shells=directory, filter_descriptor=descriptor
        )
        words = ["env", "-i", *held.VARIABLES, *jail]
        return Opened(namespaces=("unshare", "--mount"), words=words, descriptors=(descriptor,))


APPTAINER_PROGRAMS = {"apptainer": "apptainer"}
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR")


class ApptainerRuntime:
    """See `contract.Runtime`."""

    name = "apptainer"

    async def start(self, image: str, limits: ContainerLimits) -> RunningContainer:
        if not Path(image).exists():
            raise ContainerFailedError(f"the image {image} does not exist")
        token = secrets.token_hex(16)
        directory = container_directory(token)
        words = ["apptainer", "exec", *isolation(network=False), f"--bind={directory}:/.shells:ro", image]
        launch = ContainerStart(
            words=[*words, "/bin/bash", "--noprofile", "--norc", "-c", *init_words(token, limits)],
            environment={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            directory=directory,
            owner=os.geteuid(),
            token=token,
            layers=("/", "/dev/shm"),
            memory_files=True,
        )
        return await RunningContainer.start(launch, limits)


PODMAN_PROGRAMS = {"podman": "podman", "conmon": "conmon", "runc": "runc", **held.PROGRAMS}
OWN_TASKS = 64  # threads of podman and of what it starts
OWN_USERS = ("unshare", "--user", "--map-root-user", "--mount", "--")
ENDS_WITH_WORKER = ("setpriv", "--pdeathsig", "KILL", "--")  # after the user namespace: entering one takes it back
OWN_PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


class PodmanRuntime(HeldRuntime):
    """See `contract.Runtime`."""

    def __init__(self) -> None:
        super().__init__(_Podman())


class _Podman:
    name = "podman"

    def open(self, directory: Path, layer: Path) -> Opened:
        profile = directory / "filter.json"
        profile.write_text(filters.jail_profile(), encoding="utf-8")
        profile.chmod(0o644)
        return Opened(
            namespaces=(*OWN_USERS, *ENDS_WITH_WORKER, *OWN_PROCESSES),
            words=_podman_words(profile, directory, layer),
            own_tasks=OWN_TASKS,
            layers=("/dev/shm", "/dev", "/etc/hostname"),
            ends_by_itself=True,
        )


def _podman_words(profile: Path, shells: Path, layer: Path) -> list[str]:
    """Return the words before those of a container's first process.

    What podman notes of its containers lies in /run, in memory, and ends with this one: it knows of no other. It is
    root where it starts, so it makes no user namespace of its own.
    """
    words = ["env", "-i", f"PATH={os.environ.get('PATH', jails.PATH)}", "HOME=/run/home", "XDG_RUNTIME_DIR=/run/user"]
    words += ["CONTAINERS_CONF=/dev/null", "CONTAINERS_STORAGE_CONF=/run/storage.conf"]
    words += ["_CONTAINERS_USERNS_CONFIGURED=done", "podman", "--root", "/run/store", "--runroot", "/run/state"]
    words += ["--tmpdir", "/run/state", "--storage-driver", "vfs", "--events-backend", "none"]
    words += ["--cgroup-manager", "cgroupfs", "--runtime", "runc", "--log-level", "error", "run", "--rm"]
    words += ["--interactive", "--quiet", "--log-driver", "none", "--network", "none", "--hostname", "task"]
    words += ["--no-hosts", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    words += ["--security-opt", f"seccomp={profile}", "--security-opt", "mask=/sys/fs/cgroup"]
    words += ["--cgroups", "no-conmon", "--pids-limit", "-1", "--http-proxy=false", "--workdir", "/"]
    words += ["--mount", f"type=bind,source={shells},destination=/.shells,readonly"]
    words += ["--mount", f"type=bind,source={layer}/shm,destination=/dev/shm"]
    words += [word for variable in held.VARIABLES for word in ("--env", variable)]
    return [*words, "--rootfs", str(layer / "root")]


# Bubblewrap before Podman: both run the same images, and Podman takes a second more to start one.
RUNTIMES: Mapping[str, tuple[Mapping[str, str], Callable[[], Runtime]]] = {
    "apptainer": (APPTAINER_PROGRAMS, ApptainerRuntime),
    "bwrap": (BWRAP_PROGRAMS, BwrapRuntime),
    "podman": (PODMAN_PROGRAMS, PodmanRuntime),
}


def runtime_of_machine() -> Runtime:
    """Return the first of `RUNTIMES` whose programs are installed; raises `LaunchError` with what each lacks."""
    lacking: list[str] = []
    for name, (programs, make) in RUNTIMES.items():
        if not (missing := missing_programs(programs)):
            return make()
        lacking.append(f"{name} needs {', '.join(missing)}")
    packages = " ".join(sorted({BWRAP_PROGRAMS[program] for program in missing_programs(BWRAP_PROGRAMS)}))
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
