"""A small image of a task, made of this machine's own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from small_root import require, write_root
from speed import patiently

PARTITION = ("--datatype", "4", "--partfs", "1", "--parttype", "2", "--partarch", "2", "--groupid", "1")


def write_sif(root: Path, image: Path) -> Path:
    """Write a SIF file of a root file system."""
    require("mksquashfs", "siftool")
    partition = image.with_suffix(".squashfs")
    options = ["-comp", "lz4", "-all-root", "-noappend", "-quiet", "-no-progress"]
    commands = (
        ["mksquashfs", root, partition, *options],
        ["siftool", "new", image],
        ["siftool", "add", *PARTITION, image, partition],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patiently(120), check=False)
        assert done.returncode == 0, done.stderr + done.stdout
    partition.unlink()
    return image


def write_task_root(root: Path) -> Path:
    """Write a root file system with bash, Python and a variable of the image."""
    write_root(root, programs=["bash"], python=True)
    (root / "bin/bash").unlink(missing_ok=True)
    (root / "bin/bash").symlink_to("/usr/bin/bash")
    (root / ".singularity.d/env").mkdir(parents=True)
    (root / ".singularity.d/env/10-docker.sh").write_text("export OF_THE_IMAGE='a b'\n", encoding="utf-8")
    (root / "testbed").mkdir()
    return root
