"""Root file systems for the container tests, in place of base images, which a test machine may not be able to fetch.

Small ones of busybox and, where asked for, the host's bash, Python and bubblewrap; and Debian's own minimal system.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from speed import patiently

STDLIB = Path("/usr/lib/python3.11")
NOT_NEEDED = (
    "test",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "distutils",
    "__pycache__",
    "pydoc_data",
)


def require(*programs: str) -> None:
    """Fail where a program is missing, naming its package."""
    packages = {
        "bwrap": "bubblewrap",
        "busybox": "busybox-static",
        "mksquashfs": "squashfs-tools",
        "unsquashfs": "squashfs-tools",
    }
    missing = [packages.get(program, program) for program in programs if shutil.which(program) is None]
    assert not missing, f"these tests need more packages: apt-get install {' '.join(missing)}"


def write_root(root: Path, *, programs: Iterable[str] = (), python: bool = False) -> Path:
    """Write a root file system with busybox, `programs` of this machine, and if asked for its Python."""
    require("busybox", *programs)
    for name in ("bin", "usr/bin", "usr/lib", "etc", "tmp", "proc", "sys", "dev", "root", "run", "var"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
    applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet == "busybox":
            continue
        (root / "bin" / applet).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("/bin/busybox")
    (root / "etc" / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n", encoding="utf-8"
    )
    (root / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n", encoding="utf-8")
    (root / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n", encoding="utf-8")
    for program in programs:
        _copy_program(root, Path(shutil.which(program) or ""))
    if python:
        _copy_program(root, Path("/usr/bin/python3.11"))
        (root / "usr/bin/python3").symlink_to("python3.11")
        shutil.copytree(STDLIB, root / "usr/lib/python3.11", ignore=shutil.ignore_patterns(*NOT_NEEDED), symlinks=True)
        for extension in (root / "usr/lib/python3.11/lib-dynload").glob("*.so"):
            _copy_libraries(root, extension)
    return root


def write_debian(root: Path) -> Path:
    """Write Debian's minimal system, from the mirror that apt on this machine uses."""
    require("debootstrap")
    fields = ["Created-By: Packages", "Codename: bookworm", "Component: main"]
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format=$(SITE)", *fields], capture_output=True, text=True, check=True
    )
    command = ["debootstrap", "--variant=minbase", "bookworm", str(root), *targets.stdout.split()[:1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patiently(500), check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr}"
    return root


def _copy_program(root: Path, program: Path) -> None:
    target = root / "usr/bin" / program.name
    target.unlink(missing_ok=True)  # a link to busybox
    shutil.copy(program.resolve(), target)
    _copy_libraries(root, program)


def _copy_libraries(root: Path, binary: Path) -> None:
    """Copy the shared libraries that the loader names, to the places where it finds them."""
    listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        target = root / library.lstrip("/")
        target = target if library.startswith("/usr") else root / "usr" / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(library).resolve(), target)
