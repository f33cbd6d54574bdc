"""How each builder (docker buildx, podman, buildah) is told to build, run, push and describe an image."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import LaunchError, Problem

NAMES = ("docker", "podman", "buildah")
PROBE_SECONDS = 20
_PROBES = {"docker": ("docker", "buildx", "inspect"), "podman": ("podman", "info"), "buildah": ("buildah", "info")}
_DAEMON = {"docker": "dockerd", "podman": "podman"}  # builder -> the name of its store for enroot


def find_builder(wanted: str, *, is_dry: bool = False) -> str:
    """Return the builder `wanted`, or the first that works; raises `LaunchError` where none works.

    A dry run also takes a builder that does not work, so that any machine can print the commands.
    """
    if wanted and wanted not in NAMES:
        raise LaunchError(Problem(where="BUILDER", got=wanted, expected=" or ".join(NAMES), fix="correct the value"))
    candidates = (wanted,) if wanted else NAMES
    for name in candidates:
        if shutil.which(name) and _works(_PROBES[name]):
            return name
    if is_dry:
        return candidates[0]
    raise LaunchError(
        Problem(
            where="BUILDER" if wanted else "this machine",
            wrong=f"{wanted} does not work here" if wanted else "no builder works: neither docker, podman nor buildah",
            fix="install one (apt-get install podman), or look at the error of "
            + " or ".join(f"`{' '.join(_PROBES[name])}`" for name in candidates),
        )
    )


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build_words(builder: str, tag: str, dockerfile: Path, context: Path, options: Sequence[str]) -> list[str]:
    """Return the command that builds an image into the builder's own store."""
    words = ["docker", "buildx", "build", "--load"] if builder == "docker" else [builder, "build"]
    if builder != "docker":
        words += ["--format=docker"]  # the OCI format has no SHELL
    return [*words, f"--file={dockerfile}", f"--tag={tag}", *options, str(context)]


def check_words(builder: str, tag: str, command: Sequence[str]) -> list[list[str]]:
    """Return the commands that run one command in a new container of the image."""
    if builder == "buildah":
        container = "check-" + "".join(letter if letter.isalnum() else "-" for letter in tag)
        return [
            ["buildah", "from", f"--name={container}", "--pull-never", tag],
            ["buildah", "run", container, "--", *command],
            ["buildah", "rm", container],
        ]
    return [[builder, "run", "--rm", "--network=none", "--entrypoint=", tag, *command]]


def push_words(builder: str, tag: str, digest_file: Path) -> list[str]:
    """Return the command that pushes an image to the registry in its name.

    podman and buildah compress during the push, so the digest in the registry is another one: they write it to a file.
    """
    return ["docker", "push", tag] if builder == "docker" else [builder, "push", f"--digestfile={digest_file}", tag]


def digest_words(builder: str, tag: str) -> list[str]:
    """Return the command that prints the digest of an image: in the builder's store, for docker in the registry."""
    if builder == "docker":
        pushed = "{{with .RepoDigests}}{{index . 0}}{{else}}{{.Id}}{{end}}"
        return ["docker", "image", "inspect", f"--format={pushed}", tag]
    if builder == "podman":
        return ["podman", "image", "inspect", "--format={{.Digest}}", tag]
    return ["buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", tag]


def base_digest_words(builder: str, name: str) -> list[str]:
    """Return the command that prints the digest by which a registry knows an image of the builder's store."""
    if builder == "docker":  # without a digest for an image that was built here
        return ["docker", "image", "inspect", "--format={{range .RepoDigests}}{{.}} {{end}}", name]
    return digest_words(builder, name)


def size_words(builder: str, tag: str) -> list[str]:
    """Return the command that prints the unpacked size of an image in bytes."""
    return ["docker" if builder == "docker" else "podman", "image", "inspect", "--format={{.Size}}", tag]


def import_words(builder: str, tag: str, output: Path) -> list[str]:
    """Return the command that writes an image as a squashfs file for pyxis."""
    store = _DAEMON.get(builder, "podman")  # podman and buildah share one store
    return ["enroot", "import", "--output", str(output), f"{store}://{tag}"]
