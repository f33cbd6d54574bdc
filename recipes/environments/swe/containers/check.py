"""Whether containers of tasks work on this machine: starts a real one, and names the first thing that fails."""

from __future__ import annotations

import asyncio
import os
import subprocess

from recipes.confinement.jails import nobody_words
from recipes.environments.swe.containers.images import environment
from recipes.environments.swe.contract import (
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
    Runtime,
    Shell,
)
from recipes.errors import LaunchError, Problem

LIMITS = ContainerLimits(memory_mib=1024, processes=64, disk_mib=64, file_mib=32)
NEEDED_MIB = ContainerLimits(memory_mib=0).disk_mib  # of a rollout's writable layer
SECONDS = 60.0
IN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--", "bash", "-euc")
OVERLAY = """mount -t tmpfs tmpfs /mnt; mkdir /mnt/lower /mnt/upper /mnt/work /mnt/root
mount -t overlay -o userxattr,lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root"""
# What bubblewrap and Podman need -> a command that tries it, and what to do where it fails.
PRIMITIVES = {
    "user namespaces": (
        "true",
        "let users make them: sysctl user.max_user_namespaces=15000, and kernel.unprivileged_userns_clone=1 or "
        "kernel.apparmor_restrict_unprivileged_userns=0 where the kernel has it",
    ),
    "a writable layer (overlay in a user namespace)": (OVERLAY, "use Linux 5.11 or later"),
}


async def check_runtime(runtime: Runtime, image: str) -> None:
    """Start an image, write, run a command that is late, and end it; raises `LaunchError` for the first that fails."""
    # Apptainer has other ways where one of them fails, and says itself what it lacks.
    for name, (script, fix) in PRIMITIVES.items() if runtime.name != "apptainer" else ():
        if said := await asyncio.to_thread(_try, script):
            raise _problem(runtime, f"{name} cannot be made: {said}", fix)
    doing = "start"
    try:
        container = await runtime.start(image, LIMITS)
        try:
            doing = "open a shell"
            shell = await container.open_shell()
            doing = "write a file"
            await container.write_file("/tmp/check", b"written")
            if await container.read_file("/tmp/check", max_bytes=100) != b"written":
                raise OSError("what was read is not what was written")
            doing = "stop a late command"
            late = await shell.run("cat /tmp/check; tail -f /dev/null", seconds=0.5, max_characters=100)
            again = await shell.run("echo here", seconds=SECONDS, max_characters=100)
            if (late.status, again.output) != (None, "here\n"):
                raise OSError(f"its shell answered {late.output!r}, then {again.output!r}")
            doing = "say how large its writable layer is"
            if runtime.name == "apptainer" and os.geteuid() != 0:  # which sets no limit for root
                await _check_layer(runtime, shell)
        finally:
            await container.close()
    except (ContainerFailedError, ContainerEndedError, OSError) as error:
        fix = f"see what `{runtime.name}` says of {image}; a SIF file also needs /dev/fuse, which root may have to open"
        raise _problem(runtime, f"a container cannot {doing}: {error}", fix) from error


async def _check_layer(runtime: Runtime, shell: Shell) -> None:
    """Raise `LaunchError` where Apptainer gives a container less space than rollouts may use."""
    done = await shell.run("LC_ALL=C df -Pk / | tail -n 1", seconds=SECONDS, max_characters=1000)
    size = done.output.split()[1:2]
    if done.status != 0 or not size or not size[0].isdecimal():
        raise OSError(f"df answered {done.output!r}")
    if (mib := int(size[0]) // 1024) < NEEDED_MIB:
        wrong = f"the writable layer of a container has {mib} MiB, but a rollout may use {NEEDED_MIB} MiB"
        raise _problem(runtime, wrong, f"set `sessiondir max size = {NEEDED_MIB}` in apptainer.conf")


def _try(script: str) -> str:
    """Return why a script fails in namespaces of its own; an empty text when it does not."""
    command = [*nobody_words(), *IN_NAMESPACES, script]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            cwd="/",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:] or f"status {done.returncode}"


def _problem(runtime: Runtime, wrong: str, fix: str) -> LaunchError:
    return LaunchError(Problem(where=f"containers of tasks by {runtime.name}", wrong=wrong, fix=fix))
