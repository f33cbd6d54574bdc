"""Run a command in a SIF file, with a writable layer that ends with it, by Apptainer or by bubblewrap.

    python -m tools.task_images.run IMAGE COMMAND...

The image is not trusted. By bubblewrap the command has no rights on this machine, and a root that is nobody outside. By
Apptainer it is the user who starts it, as in a rollout: without root's rights, this process's environment, this
machine's files and, unless it is asked for, the network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipes.confinement.jails import AS_NOBODY, PATH, checked_image
from recipes.environments.sandbox.images import isolation
from recipes.environments.swe.containers.places import MOUNT_IMAGE
from tools.task_images.programs import run_program
from tools.task_images.registry.references import ImageError

RUN = Path(__file__).with_name("run.sh")
PARTITION = re.compile(r"\|(\d+)-\d+\s*\|FS \(Squashfs/\*System")
LIST_SECONDS = 60.0
MAX_PROCESSES = 4096  # of one command; a fork bomb ends there
ENTER = 'for file in /.singularity.d/env/*.sh; do [ -f "$file" ] && . "$file"; done; exec "$@"'
OWN_TOOLS = ("siftool", "squashfuse", "unshare", "setpriv", "mount", "bwrap")
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRunner:
    """How commands run in images."""

    apptainer: bool
    network: bool = False
    size: str = "8g"  # of the writable layer, in memory
    seconds: float = 1800.0  # that one command may take

    @property
    def missing_tools(self) -> list[str]:
        """The missing programs."""
        return [tool for tool in (("apptainer",) if self.apptainer else OWN_TOOLS) if shutil.which(tool) is None]


@contextmanager
def work_directory() -> Iterator[Path]:
    """Yield an empty directory that other users can pass through, with the empty directories work and inputs in it."""
    with tempfile.TemporaryDirectory(prefix="sif-run-") as name:
        place = Path(name)
        place.chmod(0o711)
        for directory in ("work", "inputs"):
            (place / directory).mkdir(mode=0o755)
        yield place


def run_in(container: ImageRunner, image: Path, command: Sequence[str], *, inputs: Path | None = None) -> str:
    """Return what a command printed; raises `ImageError` when it fails. It sees `inputs` as /inputs."""
    with work_directory() as place:
        words = words_of(container, image.resolve(), place / "work", (inputs or place / "inputs").resolve())
        return run_program([*words, *command], seconds=container.seconds, environ=environment(), cause="run")


def environment() -> dict[str, str]:
    """Return the environment of what runs an image: a command in it can read that of the process that started it."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def words_of(container: ImageRunner, image: Path, work: Path, inputs: Path) -> list[str]:
    """Return the command line before the command."""
    if container.apptainer:
        options = isolation(network=container.network)
        return ["apptainer", "exec", *options, "--bind", f"{inputs}:/inputs:ro", str(image)]
    words = [str(AS_NOBODY), str(work), str(image), str(inputs), str(RUN), str(MOUNT_IMAGE), "--"]
    words += ["bash", str(work / "2"), str(work), str(offset_of(image)), container.size]
    words += ["env", "-i", f"PATH={PATH}", "prlimit", "--core=0", f"--nproc={MAX_PROCESSES}", "--"]
    jail = checked_image(root=work / "mounts" / "root", inputs=work / "1", network=container.network)
    return [*words, *jail, "/bin/sh", "-c", ENTER, "sh"]


def offset_of(image: Path) -> int:
    """Return where the root file system of a SIF file begins, in bytes; raises `ImageError` for a file without one."""
    found = PARTITION.search(run_program(["siftool", "list", image], seconds=LIST_SECONDS, cause="run"))
    if found is None:
        raise ImageError("run", f"{image} has no squashfs partition with a root file system")
    return int(found[1])


def main() -> int:
    """Run the command line; return the exit status."""
    image, *command = sys.argv[1:]
    container = ImageRunner(apptainer=shutil.which("apptainer") is not None)
    with work_directory() as place:
        words = words_of(container, Path(image).resolve(), place / "work", place / "inputs")
        return subprocess.run([*words, *command], env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
