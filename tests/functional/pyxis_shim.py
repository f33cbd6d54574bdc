"""A stand-in for `srun` with the pyxis plugin: checks what it is asked for, enters the root with bubblewrap.

It does what pyxis 0.16 and later do, where a job can trip over it: an unknown option is an error, the image's variables
win over the job's unless named, mounts are lines of words, and a container goes with its step. An image is a squashfs
file or a directory, with its variables in etc/image-environment; PYXIS_STATE has the containers. With PYXIS_SRUN, a
real `srun` starts the step, and this program stands in for the plugin on its node.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN_WORD = re.compile(r"[^\s\"$`\\]+")
HOST_FILES = ("/etc/hosts", "/etc/resolv.conf")  # that enroot shows
OPTIONS = ("--container-", "--no-container-")


def split(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the options of pyxis, those of srun, and the command."""
    end = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    options = words[:end]
    ours = [word for word in options if word.startswith(OPTIONS)]
    return ours, [word for word in options if word not in ours], words[end:]


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the options of pyxis; an unknown one ends the program."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    parser.add_argument("--container-image")
    parser.add_argument("--container-mounts", default="")
    parser.add_argument("--container-workdir")
    parser.add_argument("--container-env", default="")
    parser.add_argument("--container-writable", action="store_true")
    parser.add_argument("--no-container-mount-home", action="store_true")
    parser.add_argument("--no-container-entrypoint", action="store_true")
    return parser.parse_args(words)


def exported(options: list[str]) -> dict[str, str]:
    """Return the variables of the task, as srun's --export says."""
    names = {name for word in options if word.startswith("--export=") for name in word.split("=", 1)[1].split(",")}
    if not names:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(("SLURM_", "PYXIS_"))}


def environment(args: argparse.Namespace, job: dict[str, str], root: Path) -> dict[str, str]:
    """Return the variables in the container: the job's, then the image's, then again those named."""
    file = root / "etc/image-environment"
    image = dict(line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines()) if file.exists() else {}
    return job | image | {name: job[name] for name in args.container_env.split(",") if name in job}


def container(args: argparse.Namespace) -> Path:
    """Return the root of a new container on this node: a copy of the image."""
    state = Path(os.environ["PYXIS_STATE"]) / socket.gethostname()
    state.mkdir(exist_ok=True)
    home, image = Path(tempfile.mkdtemp(prefix="pyxis_", dir=state)), Path(args.container_image)
    if not image.is_absolute():
        sys.exit(f"srun: error: pyxis: failed to import docker image {image}: 401 Unauthorized")
    if image.is_dir():
        shutil.copytree(image, home, symlinks=True, dirs_exist_ok=True)
    elif subprocess.run(
        ["unsquashfs", "-no-progress", "-quiet", "-force", "-dest", home, image], check=False
    ).returncode:
        sys.exit(f"srun: error: pyxis: failed to create container filesystem from {image}")
    home.chmod(0o755)
    return home


def binds(text: str) -> list[str]:
    """Return the words that make the mounts."""
    words = []
    for entry in filter(None, text.split(",")):
        source, target, *flags = entry.split(":")
        if not (PLAIN_WORD.fullmatch(source) and PLAIN_WORD.fullmatch(target)):
            sys.exit(f"srun: error: pyxis: a mount that is no plain word: {entry}")
        words += ["--ro-bind" if "ro" in "".join(flags).split("+") else "--bind", source, target]
    return words


def enter(args: argparse.Namespace, command: list[str], job: dict[str, str]) -> None:
    """Become the command in its container."""
    root = container(args)
    words = ["bwrap", "--bind" if args.container_writable else "--ro-bind", str(root), "/", "--die-with-parent"]
    words += ["--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp"]
    for file in HOST_FILES:
        words += ["--ro-bind-try", file, file]
    if not args.no_container_mount_home:
        words += ["--bind", os.environ["HOME"], os.environ["HOME"]]
    words += [*binds(args.container_mounts), "--chdir", args.container_workdir or "/", "--", *command]
    # Bubblewrap stays as the parent, where pyxis leaves none: it must not die of a signal that is for the command.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child:  # the plugin removes the container when the step has ended, however it ended
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # the shell before may have left others
        shutil.rmtree(root, ignore_errors=True)
        sys.exit(status if status >= 0 else 128 - status)
    os.execve(shutil.which("bwrap") or "bwrap", words, environment(args, job, root))


def main() -> None:
    """Be srun, or on the node of a real one, pyxis."""
    ours, options, command = split(sys.argv[1:])
    real = os.environ.pop("PYXIS_SRUN", "")
    if real:
        state = f"PYXIS_STATE={os.environ['PYXIS_STATE']}"
        plugin = ["env", state, sys.executable, __file__, *ours] if ours else []
        os.execv(real, [real, *options, *plugin, *command])
    if not ours:
        os.execvpe(command[0], command, exported(options))
    enter(parse(ours), command, exported(options))


if __name__ == "__main__":
    main()
