"""The options with which Apptainer starts an image that is not trusted, wherever this repository starts one."""

from __future__ import annotations

import os

# Of this machine the container sees no files, devices, processes and shared memory; its writable layer ends with it.
OPTIONS = ("--containall", "--writable-tmpfs", "--no-home", "--no-mount=bind-paths,cwd,home,hostfs,tmp", "--pwd=/")
NO_NETWORK = ("--net", "--network=none")
NO_PRIVILEGES = "--no-privs"  # of root, when root starts the container


def isolation(*, network: bool) -> list[str]:
    """Return the options between `exec` and the image; with `network`, the container shares this machine's."""
    return [*OPTIONS, *(() if network else NO_NETWORK), *([NO_PRIVILEGES] if os.geteuid() == 0 else [])]
