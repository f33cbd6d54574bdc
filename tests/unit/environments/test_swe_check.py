"""The check of a launch that starts a container, with a container that is none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recipes.environments.swe.containers import check
from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.contract import CommandResult, ContainerLimits
from recipes.errors import LaunchError

ROOT = Path(__file__).resolve().parents[3]
DF = "overlay {} 0 0 0% /\n"


@dataclass
class Scripted:
    """A runtime, its container and the shell of that."""

    name: str
    df: str = DF.format(8192 * 1024)
    files: dict[str, bytes] = field(default_factory=dict)

    async def start(self, _image: str, _limits: ContainerLimits) -> Scripted:
        return self

    async def open_shell(self) -> Scripted:
        return self

    async def write_file(self, path: str, content: bytes) -> None:
        self.files[path] = content

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        return self.files[path][:max_bytes]

    async def run(self, command: str, *, seconds: float, max_characters: int) -> CommandResult:
        answers = {"LC_ALL=C df -Pk / | tail -n 1": self.df, "echo here": "here\n"}
        return CommandResult(status=0 if command in answers else None, output=answers.get(command, ""))

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(check, "_try", lambda _script: "")


async def test_a_small_writable_layer_of_apptainer_is_refused(monkeypatch):
    await check_runtime(Scripted("apptainer"), "a.sif")
    small = Scripted("apptainer", DF.format(64 * 1024))
    said = r"has 64 MiB, but a rollout may use 8192 MiB; set `sessiondir max size = 8192` in apptainer\.conf"
    with pytest.raises(LaunchError, match=said):
        await check_runtime(small, "a.sif")
    with pytest.raises(LaunchError, match="a container cannot say how large its writable layer is: df answered 'x"):
        await check_runtime(Scripted("apptainer", "x\n"), "a.sif")
    await check_runtime(Scripted("bwrap", DF.format(1)), "a.sif")  # each container is given a layer of its own size
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    await check_runtime(small, "a.sif")


def test_the_image_of_stage_2_2_gives_the_space_that_rollouts_use():
    text = (ROOT / "containers/swe/install.sh").read_text(encoding="utf-8")
    assert re.findall(r'^readonly LAYER="sessiondir max size = (\d+)"$', text, re.MULTILINE) == [str(check.NEEDED_MIB)]


async def test_what_only_other_runtimes_need_is_not_asked_of_apptainer(monkeypatch):
    monkeypatch.setattr(check, "_try", lambda _script: "mount: unknown option userxattr")
    await check_runtime(Scripted("apptainer"), "a.sif")
    with pytest.raises(LaunchError, match="user namespaces cannot be made: mount: unknown option"):
        await check_runtime(Scripted("bwrap"), "a.sif")
