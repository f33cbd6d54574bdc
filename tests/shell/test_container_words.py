"""The words that put a step into a container, per runtime: the exact argv, and which variables cross."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "tools" / "job" / "container.sh"
ENVIRONMENT = {
    "SLURM_JOB_ID": "7",
    "PYTHONPATH": "/code",
    "RAY_AUTH_TOKEN": "secret",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATHOLOGY": "no prefix",
    "HOME": "/nobody",
}
SCRIPT = """set -euo pipefail; shopt -s inherit_errexit
source "$1"; shift
srun_options=() prefix=() removal=()
"$@"
printf '%s\\0' "${srun_options[@]}" -- "${prefix[@]}" -- "${removal[@]}"
"""


def words(*call: str, status: int = 0, message: str = "", **variables: str) -> tuple[list[str], list[str], list[str]]:
    result = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", str(FILE), *call],
        env={"PATH": os.environ["PATH"], **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == status, result.stderr
    assert message in result.stderr
    everything = result.stdout.split("\0")[:-1]
    if status:
        return [], [], []
    first = everything.index("--")
    second = everything.index("--", first + 1)
    return everything[:first], everything[first + 1 : second], everything[second + 1 :]


def step(runtime: str, image: str = "image", mounts: str = "/a:/a,/b:/c:ro", **variables: str) -> tuple[list[str], ...]:
    return words("container_words", runtime, image, mounts, "ray-head", "/code dir", **variables)[:2]


def test_none_adds_nothing():
    assert step("none") == ([], [])


def test_pyxis_is_asked_for_by_srun_options():
    options, prefix = step("pyxis", "/images/train.sqsh")
    assert prefix == []
    assert sorted(options) == [
        "--container-env=HF_HUB_OFFLINE,PYTHONPATH,RAY_AUTH_TOKEN",
        "--container-image=/images/train.sqsh",
        "--container-mounts=/a:/a,/b:/c:ro",
        "--container-workdir=/code dir",
        "--container-writable",
        "--no-container-entrypoint",
        "--no-container-mount-home",
    ]


def test_apptainer_is_a_prefix():
    options, prefix = step("apptainer", "docker://registry/train:1")
    assert options == []
    assert [word for word in prefix if word != "--nv"] == [
        *("apptainer", "exec", "--no-home", "--no-mount=tmp,cwd", "--writable-tmpfs", "--pwd=/code dir"),
        *("--bind=/a:/a", "--bind=/b:/c:ro", "docker://registry/train:1"),
    ]


def test_podman_is_a_prefix_that_keeps_values_off_the_command_line():
    options, prefix = step("podman")
    assert options == []
    assert prefix[:2] == ["podman", "run"]
    assert prefix[-1] == "image"
    assert {"--network=host", "--ipc=host", "--pid=host", "--entrypoint=", "--workdir=/code dir"} <= set(prefix)
    assert [word for word in prefix if word.startswith("--volume")] == ["--volume=/a:/a", "--volume=/b:/c:ro"]
    crossing = [word for word in prefix if word.startswith("--env")]
    assert crossing == ["--env=HF_HUB_OFFLINE", "--env=PYTHONPATH", "--env=RAY_AUTH_TOKEN", "--env=SLURM_*"]
    assert not [word for word in prefix if "secret" in word]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "podman", "none"])
def test_a_sandbox_gets_no_token_of_the_job(runtime):
    tokens = {"HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "NEMO_SKILLS_SANDBOX_PORT": "6000"}
    options, prefix = words("container_words", runtime, "image", "", "sandbox", "", **tokens)[:2]
    exported = [] if runtime == "podman" else ["--export=HOME,NEMO_SKILLS_SANDBOX_PORT,PATH"]
    assert [word for word in options if word.startswith("--export")] == exported
    assert not [word for word in options + prefix if "TOKEN" in word or "API_KEY" in word or "workdir" in word]
    assert not {"--pid=host", "--ipc=host"} & set(prefix)


@pytest.mark.parametrize("runtime", ["pyxis", "podman"])
def test_a_step_gets_the_variables_of_the_profile_and_a_sandbox_does_not(runtime):
    def crossing(role: str) -> str:
        call = ("container_words", runtime, "image", "", role, "", "MY_MIRROR,OTHER")
        return " ".join(word for part in words(*call, MY_MIRROR="m")[:2] for word in part)

    assert "MY_MIRROR" in crossing("ray-head")
    assert "OTHER" not in crossing("ray-head")  # it is not set
    assert "MY_MIRROR" not in crossing("sandbox")


def test_no_two_starts_share_a_container_name():
    names = {
        word
        for variables in ({}, {"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "1"})
        for words_of_step in step("podman", **variables)
        for word in words_of_step
        if "name=" in word
    }
    assert {name.partition("name=")[2] for name in names} == {"ray-head-7-0", "ray-head-8-0", "ray-head-7-1"}


def test_without_mounts_and_variables_no_empty_option_is_given():
    for runtime in ("pyxis", "apptainer", "podman"):
        for part in step(runtime, mounts=""):
            assert not [word for word in part if word.endswith(("mounts=", "bind=", "volume=", "container-env="))]


def test_removal_names_the_containers_of_this_job():
    assert words("container_remove", "podman", "sandbox", SLURM_RESTART_COUNT="2")[2][-1] == "sandbox-7-2"
    for runtime in ("pyxis", "apptainer", "none"):
        assert words("container_remove", runtime, "sandbox")[2] == []


def test_unknown_runtime_is_refused():
    words("container_words", "docker", "image", "", "x", "/", status=2, message="unknown runtime docker")
