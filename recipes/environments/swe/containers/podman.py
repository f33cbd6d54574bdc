"""Containers by Podman: on the same images as bubblewrap's. See `held.py`.

Podman runs in namespaces of users, processes and mounts that are one container's alone, as the user that containers run
as: what it starts and notes ends with it, also when the worker is killed. Its runtime is runc, and it reads nothing of
the machine's own configuration.
"""

from __future__ import annotations

import errno
import json
from functools import cache
from pathlib import Path
from typing import Any

from recipes.environments.swe.containers import held
from recipes.environments.swe.containers.held import HeldRuntime, Opened

PROGRAMS = {"podman": "podman", "conmon": "conmon", "runc": "runc", **held.PROGRAMS}
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

    def open(self, directory: Path) -> Opened:
        profile = directory / "filter.json"
        profile.write_text(filter_profile())
        profile.chmod(0o644)
        return Opened(
            namespaces=(*OWN_USERS, *ENDS_WITH_WORKER, *OWN_PROCESSES),
            filter=str(profile),
            own_tasks=OWN_TASKS,
            layers=("/dev/shm", "/dev", "/etc/hostname"),
            ends_by_itself=True,
        )


@cache
def filter_profile() -> str:
    """Return the filter of system calls in the form of the OCI runtime specification."""
    known = held.filter_module()
    absent = "clone3"
    refused = sorted(set(known["REFUSED"]) - {absent})
    flags = known["NEW_NAMESPACES"]
    rules: list[dict[str, Any]] = [{"names": refused, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}]
    rules.append({"names": [absent], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS})
    for bit in (1 << number for number in range(32)):
        if flags & bit:  # a rule compares a whole value, so each flag needs one
            compared = {"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}
            rule = {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM, "args": [compared]}
            rules.append(rule)
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
