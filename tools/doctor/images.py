"""The containers of the job: files of the kind that the runtime takes, or well-formed names of a registry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.images.files import read_image
from tools.images.lock import LOCK, digest_problems, read_lock
from tools.planning.contract import REQUIRED_WITH_CONTAINERS
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found

# Runtime -> kinds of image files that it runs, and the schemes of the names that it fetches ("" = none written).
TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pyxis": (("squashfs",), ("", "docker", "dockerd", "podman")),
    "apptainer": (("SIF", "squashfs", "directory"), ("", "docker", "oras", "library")),
    "podman": ((), ("", "docker")),
}
SUFFIXES = (".sqsh", ".squashfs", ".sif")
MAKE = {
    "pyxis": "import it: enroot import --output IMAGE.sqsh docker://...",
    "apptainer": "build it: apptainer build IMAGE.sif docker://...",
    "podman": "load it into the registry or the local store, and give its name",
}
NAME = re.compile(
    r"(?:(?P<scheme>[a-z]+)://)?(?:[^@/#]+@)?"
    r"(?:(?P<host>[A-Za-z0-9.-]+(?::\d+)?)[#/])?"
    r"(?P<path>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@sha256:[0-9a-f]{64})?"
)


def check(draft: Draft) -> Iterator[Finding]:
    """Check the images of a job on Slurm."""
    runtime = draft.contract["CONTAINER_RUNTIME"]
    if draft.contract.is_local or runtime not in TAKES:
        return
    for variable in REQUIRED_WITH_CONTAINERS:
        image = draft.contract[variable]
        if image and is_file_name(image):
            yield from file_findings(variable, image, runtime)
        elif image:
            yield from name_findings(variable, image, runtime)
    images = {variable: draft.contract[variable] for variable in REQUIRED_WITH_CONTAINERS if draft.contract[variable]}
    yield from as_findings("IMG005", digest_problems(images, read_lock(draft.root / LOCK)))


def is_file_name(image: str) -> bool:
    """Whether an image is meant as a file."""
    return image.startswith(("/", ".", "~")) or ("://" not in image and image.endswith(SUFFIXES))


def file_findings(variable: str, image: str, runtime: str) -> Iterator[Finding]:
    """Check an image file: there, of the right kind, whole."""
    path, kinds = Path(image).expanduser(), TAKES[runtime][0]
    if (
        "/" not in image and not path.exists()
    ):  # pyxis would look for it on Docker Hub, and fail there with "401 Unauthorized"
        fix = f"write {path.absolute()}"
        yield found(
            "IMG002", where=variable, got=image, expected="a path with a slash, or the name of an image", fix=fix
        )
        return
    if not path.exists():
        yield found("IMG001", where=variable, wrong=f"there is no file {image}", fix=MAKE[runtime])
        return
    file = read_image(path)
    if file.kind not in kinds:
        got = f"{image}: {'no image' if file.kind == 'none' else file.kind}"
        expected = f"{' or '.join(kinds) or 'the name of an image'} (CONTAINER_RUNTIME={runtime})"
        yield found("IMG002", where=variable, got=got, expected=expected, fix=MAKE[runtime])
    elif file.is_cut:
        got, expected = f"{image}: {file.size} bytes", f"{file.declared} bytes, as its header says"
        yield found("IMG003", where=variable, got=got, expected=expected, fix=f"remove the file and {MAKE[runtime]}")


def name_findings(variable: str, image: str, runtime: str) -> Iterator[Finding]:
    """Check the form of a name that the nodes are to fetch."""
    schemes = TAKES[runtime][1]
    match = NAME.fullmatch(image)
    scheme = image.partition("://")[0] if "://" in image else ""
    if scheme not in schemes:
        written = " or ".join(f"{name}://..." if name else "HOST/NAME:TAG" for name in schemes)
        yield found(
            "IMG004", where=variable, got=image, expected=f"{written} (CONTAINER_RUNTIME={runtime})", fix="correct it"
        )
    elif match is None:
        expected = "[USER@]HOST[#/]NAME[:TAG], the name in lower case"
        yield found("IMG004", where=variable, got=image, expected=expected, fix="correct it")
