"""Containers by Apptainer, with the options that this repository uses for every image that is not trusted.

`--containall`: namespaces of its own for processes and IPC, an empty home and /tmp, a minimal /dev, no variables of
this process. `--writable-tmpfs`: a writable layer in memory, of the size that the machine's apptainer.conf sets
(`sessiondir max size`). `--net --network=none`: no network. No directory of this machine is shown but that of pipes.
Root in a container is the user who started it outside; of root, Apptainer drops all rights (`--no-privs`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from recipes.environments.sandbox.apptainer import isolation
from recipes.environments.swe.containers.container import Launch, RunningContainer, init_words
from recipes.environments.swe.containers.places import container_directory
from recipes.environments.swe.contract import ContainerFailedError, ContainerLimits

PROGRAMS = {"apptainer": "apptainer"}
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
        launch = Launch(
            words=[*words, "/bin/bash", "--noprofile", "--norc", "-c", *init_words(token, limits)],
            environment={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            directory=directory,
            owner=os.geteuid(),
            token=token,
            layers=("/", "/dev/shm"),
            memory_files=True,
        )
        return await RunningContainer.start(launch, limits)
