"""Run a command in a SIF file with a writable layer that ends with it, as the agents do: by Apptainer, or without.

python -m tools.sif.run IMAGE COMMAND...
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.sif.programs import run_program
from tools.sif.registry.errors import ImageError

SCRIPT = Path(__file__).with_name("run.sh")
PARTITION = re.compile(r"\|(\d+)-\d+\s*\|FS \(Squashfs/\*System")
LIST_SECONDS = 60.0
OWN_TOOLS = ("siftool", "unshare", "mount", "bwrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """How commands are run."""

    apptainer: bool
    network: bool = False
    size: str = "8g"  # of the writable layer, in memory
    seconds: float = 1800.0

    @property
    def missing_tools(self) -> list[str]:
        """The programs that this machine lacks."""
        return [tool for tool in (("apptainer",) if self.apptainer else OWN_TOOLS) if shutil.which(tool) is None]


def run_in(container: Container, image: Path, command: Sequence[str], *, inputs: Path | None = None) -> str:
    """Return what a command printed; raises `ImageError` when it fails. It sees `inputs` as /inputs."""
    with tempfile.TemporaryDirectory(prefix="sif-run-") as place:
        work, empty = Path(place) / "work", Path(place) / "inputs"
        work.mkdir()
        empty.mkdir()
        words = words_of(container, image.resolve(), work, (inputs or empty).resolve())
        return run_program([*words, *command], seconds=container.seconds, cause="run")


def words_of(container: Container, image: Path, work: Path, inputs: Path) -> list[str]:
    """Return the command line before the command."""
    if container.apptainer:
        words = ["apptainer", "exec", "--writable-tmpfs", "--cleanenv", "--pid", "--no-mount", "home,tmp,bind-paths"]
        words += ["--no-privs"] if lacks_rights() else []
        return [*words, "--bind", f"{inputs}:/inputs:ro", "--pwd", "/", str(image)]
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    network = "yes" if container.network else "no"
    words = ["unshare", "--mount", *user, str(SCRIPT), str(image), str(offset_of(image)), str(work)]
    return [*words, str(inputs), network, container.size]


def lacks_rights() -> bool:
    """Return whether this is a root without all rights, as in a container, for whom Apptainer asks for too many."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="utf-8"))
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return os.geteuid() == 0 and found is not None and int(found[1], 16) != (1 << (last + 1)) - 1


def offset_of(image: Path) -> int:
    """Return where the root file system of a SIF file begins; raises `ImageError` for a file without one."""
    found = PARTITION.search(run_program(["siftool", "list", image], seconds=LIST_SECONDS, cause="run"))
    if found is None:
        raise ImageError("run", f"{image}: no squashfs partition with a system")
    return int(found[1])


def main() -> int:
    """Run the command line; return the exit status."""
    image, *command = sys.argv[1:]
    container = Container(apptainer=shutil.which("apptainer") is not None)
    with tempfile.TemporaryDirectory(prefix="sif-run-") as place:
        for name in ("work", "inputs"):
            (Path(place) / name).mkdir()
        words = words_of(container, Path(image).resolve(), Path(place) / "work", Path(place) / "inputs")
        return subprocess.run([*words, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
