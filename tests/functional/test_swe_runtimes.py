"""Which program runs containers of tasks: its check, what the doctor says of it, and the words that it is given."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from swe_containers_case import (
    CONTAINERS,
    LIMITS,
    made,
    nothing_left,
    said,
    started,
    task_image,
)

from recipes.environments.swe.containers import check
from recipes.environments.swe.containers import container as container_module
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.places import home
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.contract import (
    Runtime,
)
from recipes.errors import LaunchError
from tools.doctor import task_images
from tools.task_images.inventory import is_whole

pytestmark = pytest.mark.functional
image = pytest.fixture(scope="module")(task_image)
nothing_is_left = pytest.fixture(autouse=True)(nothing_left)


@pytest.fixture(params=["bwrap", pytest.param("podman", marks=pytest.mark.slow)])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return made(request.param)


STAND_IN = """#!/usr/bin/env bash
# Records its words, and runs the command in this machine's own files.
printf '%s\\0' "$@" >{record}
for word; do [[ $word == --bind=* ]] && shells=${{word#--bind=}}; done
while [[ $1 != /bin/bash ]]; do shift; done
exec bwrap --unshare-all --as-pid-1 --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /dev/shm \\
  --tmpfs /opt --ro-bind "${{shells%%:*}}" {shells} -- "$@"
"""


async def test_the_check_of_a_runtime_names_what_fails(runtime, image, tmp_path, monkeypatch):
    await check_runtime(runtime, image)
    with pytest.raises(LaunchError, match=r"a container cannot start: the image .*missing\.sif cannot be read"):
        await check_runtime(runtime, str(tmp_path / "missing.sif"))
    monkeypatch.setitem(check.PRIMITIVES, "user namespaces", ("echo refused >&2; exit 1", "allow them"))
    with pytest.raises(LaunchError, match=f"by {runtime.name}: user namespaces cannot be made: refused; allow them"):
        await check_runtime(runtime, image)


def test_the_doctor_starts_an_image(image, tmp_path, monkeypatch):
    (tmp_path / "no.sif").write_text("not an image", encoding="utf-8")
    images = [each for each in (tmp_path / "no.sif", Path(image)) if is_whole(each)]
    assert list(task_images.start_one(images)) == []
    monkeypatch.setitem(check.PRIMITIVES, "user namespaces", ("echo refused >&2; exit 1", "allow them"))
    (finding,) = task_images.start_one(images)
    assert finding.code == "CTR001" and "user namespaces cannot be made: refused" in str(finding.problem)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = task_images.start_one(images)
    assert "no program on this machine can run them (apptainer needs apptainer" in str(finding.problem)
    assert images == [Path(image)] and list(task_images.start_one([])) == []


async def test_apptainer_is_given_the_options_of_isolation(image, tmp_path, monkeypatch):
    """Not with a real Apptainer: a stand-in records its words, and starts the command by bubblewrap."""
    record, program = tmp_path / "record", tmp_path / "bin/apptainer"
    program.parent.mkdir()
    monkeypatch.setattr(container_module, "INIT", tmp_path / "init.sh")
    (tmp_path / "init.sh").write_text(
        (CONTAINERS / "init.sh").read_text(encoding="utf-8").replace("/.shells", "/opt/shells"), encoding="utf-8"
    )
    program.write_text(STAND_IN.format(record=record, shells="/opt/shells"), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SECRET", "canary")
    runtime = runtime_of_machine()
    assert runtime.name == "apptainer"
    async with started(runtime, image, replace(LIMITS, disk_mib=2**20)) as container:
        shell = await container.open_shell()
        assert await said(shell, "echo $((6 * 7)) $SECRET") == "42"
    words = record.read_text(encoding="utf-8").split("\0")
    options = words[1 : words.index(image)]
    assert words[0] == "exec" and words[words.index(image) + 1] == "/bin/bash"
    bind = options.pop()
    assert re.fullmatch(rf"--bind={home()}/container-[0-9a-f]+:/\.shells:ro", bind)
    assert set(options) - {"--no-privs"} == {
        *("--containall", "--writable-tmpfs", "--no-home", "--no-mount=bind-paths,cwd,home,hostfs,tmp", "--pwd=/"),
        *("--net", "--network=none"),
    }
