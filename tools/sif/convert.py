"""Convert an image to a SIF file, from layers on disk: by Apptainer, or by skopeo, umoci, mksquashfs and siftool.

Both ways give a SIF file with one squashfs partition. It holds the root file system and, under /.singularity.d, the
environment of the image, which Apptainer sets before it runs a command. Format: github.com/apptainer/sif.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.images.files import read_image
from tools.sif.history import strip_history
from tools.sif.programs import run_program
from tools.sif.registry.client import Manifest
from tools.sif.registry.errors import ImageError

OWN_TOOLS = ("skopeo", "umoci", "mksquashfs", "siftool")
SYSTEM_PARTITION = ("--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", "2", "--groupid", "1")
MOUNT_POINTS = ("dev", "etc", "proc", "root", "sys", "tmp", "var")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DIRECTORY_VERSION = "Directory Transport Version: 1.1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How images are converted."""

    apptainer: bool
    compression: str = "gzip"  # of the squashfs file system; the default of Apptainer
    processors: int = 1
    strip_history: bool = False
    seconds: float = 3600.0  # that one program may take

    @property
    def name(self) -> str:
        return "apptainer" if self.apptainer and not self.strip_history else "umoci"

    def missing_tools(self) -> list[str]:
        """Return the missing programs."""
        needed = ("skopeo", "apptainer") if self.name == "apptainer" else OWN_TOOLS
        if self.strip_history:
            needed = (*needed, "bwrap", "git", "unshare", "setpriv")
        return [tool for tool in needed if shutil.which(tool) is None]


def convert(
    conversion: Conversion, manifest: Manifest, blobs: Mapping[str, Path], work: Path, facts: Mapping[str, Any]
) -> Path:
    """Return a complete SIF file under `work`; `blobs` are the layers' files, digest -> path. Raises `ImageError`."""
    layout = work / "oci"
    to_layout(conversion, manifest, blobs, work / "dir", layout)
    sif = work / "image.sif"
    if conversion.name == "apptainer":
        environ = {**os.environ, "APPTAINER_CACHEDIR": str(work / "cache"), "APPTAINER_TMPDIR": str(work)}
        words: list[str | Path] = ["apptainer", "build", "--force", sif, f"oci:{layout}"]
        run_program(words, seconds=conversion.seconds, environ=environ)
    else:
        root = work / "root"
        rootless = [] if os.geteuid() == 0 else ["--rootless"]
        run_program(
            ["umoci", "raw", "unpack", *rootless, "--image", f"{layout}:image", root], seconds=conversion.seconds
        )
        config = read_config(blobs[manifest.config])
        shutil.rmtree(layout)
        write_environment(root, config)
        if conversion.strip_history:
            strip_history(root, facts, seconds=conversion.seconds)
        pack(conversion, root, sif)
        remove_tree(root)
    image = read_image(sif)
    if image.kind != "SIF" or image.is_cut:
        raise ImageError("convert", f"the SIF file that was made is incomplete ({image.size} bytes)")
    return sif


def to_layout(
    conversion: Conversion, manifest: Manifest, blobs: Mapping[str, Path], directory: Path, layout: Path
) -> None:
    """Write the layers as an OCI layout; skopeo translates Docker's manifests, without the network."""
    directory.mkdir()
    (directory / "version").write_text(DIRECTORY_VERSION)
    (directory / "manifest.json").write_bytes(manifest.content)
    for digest, blob in blobs.items():
        (directory / digest.removeprefix("sha256:")).symlink_to(blob)
    words = ["skopeo", "copy", "--quiet", "--insecure-policy", f"dir:{directory}", f"oci:{layout}:image"]
    run_program(words, seconds=conversion.seconds)
    shutil.rmtree(directory)


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the variables, labels and command of an image; raises `ImageError`."""
    try:
        config = json.loads(path.read_bytes()).get("config")
    except (ValueError, AttributeError) as error:
        raise ImageError("manifest", f"the configuration of the image is not a JSON object: {error}") from error
    return config if isinstance(config, dict) else {}


def write_environment(root: Path, config: Mapping[str, Any]) -> None:
    """Write the variables, labels and command where Apptainer reads them; follows no link of the image."""
    for name in MOUNT_POINTS:
        if not os.path.lexists(root / name):
            (root / name).mkdir()
    place = root / ".singularity.d"
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.exists():
        remove_tree(place)
    (place / "env").mkdir(parents=True)
    (place / "env" / "10-docker2singularity.sh").write_text(environment_script(config.get("Env") or []))
    (place / "labels.json").write_text(json.dumps(config.get("Labels") or {}, indent=2) + "\n")
    command = [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])] or ["/bin/sh"]
    script = place / "runscript"
    script.write_text(f'#!/bin/sh\n[ $# -gt 0 ] && exec "$@"\nexec {shlex.join(command)}\n')
    script.chmod(0o755)
    (place / "env" / "90-environment.sh").write_text("#!/bin/sh\n")
    for name, target in (("environment", "env/90-environment.sh"), ("singularity", "runscript")):
        if not os.path.lexists(root / name):
            (root / name).symlink_to(f".singularity.d/{target}")


def environment_script(variables: Sequence[str]) -> str:
    """Return a shell script that sets the image's variables: PATH always, the others unless the user has set them."""
    lines = ["#!/bin/sh"]
    for text in variables:
        name, _, value = text.partition("=")
        if not VARIABLE.fullmatch(name):
            continue
        assignment = f"{name}={shlex.quote(value)}"
        lines += [assignment if name == "PATH" else f'[ -n "${{{name}+set}}" ] || {assignment}', f"export {name}"]
    return "\n".join(lines) + "\n"


def pack(conversion: Conversion, root: Path, sif: Path) -> None:
    """Write a root file system as a SIF file with one partition."""
    squashfs = sif.with_suffix(".squashfs")
    owner = [] if os.geteuid() == 0 else ["-all-root"]
    words: list[str | Path] = ["mksquashfs", root, squashfs, "-noappend", "-quiet", "-no-progress", *owner]
    words += ["-comp", conversion.compression, "-processors", str(conversion.processors)]
    run_program(words, seconds=conversion.seconds)
    run_program(["siftool", "new", sif], seconds=conversion.seconds)
    run_program(["siftool", "add", *SYSTEM_PARTITION, sif, squashfs], seconds=conversion.seconds)
    squashfs.unlink()


def remove_tree(path: Path) -> None:
    """Remove a directory, also where directories in it are not writable."""
    if os.geteuid() != 0:
        for directory, _, _ in os.walk(path):
            Path(directory).chmod(0o700)
    shutil.rmtree(path)
