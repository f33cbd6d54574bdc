"""Convert an image to a SIF file, from layers on disk: by Apptainer, or by skopeo, umoci, mksquashfs and siftool.

Both ways give a SIF file with one squashfs partition. It holds the root file system and, under /.singularity.d, the
environment of the image, which Apptainer sets before it runs a command. Format: github.com/apptainer/sif.

Remove from an image's repository all that git knows beyond the checked-out commit, so that no fix can be read there.

Images of SWE instances often hold the later history of the project, with the commit that solves the instance. What
HEAD reaches stays; branches, remotes, later tags, reflogs and every unreachable object go.

The repository is not trusted: its configuration can make git run programs. So git sees nothing but the .git directory,
as the user nobody, without a network, and may fetch nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.confinement import jails
from tools.images.lock import read_image
from tools.task_images.programs import run_program
from tools.task_images.registry.client import Manifest
from tools.task_images.registry.references import ImageError

REPOSITORY = "testbed"  # in all three families
MAX_SETUP_COMMITS = 1  # on top of the base commit: SWE-bench images commit their set-up
LEFTOVERS = ("FETCH_HEAD", "ORIG_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD", "packed-refs.lock")
MAX_PROCESSES = 256
SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "core.worktree=/tmp", "core.pager=cat", "gc.auto=0")
ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/tmp",
    "LC_ALL": "C",
    "GIT_DIR": "/repository",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch missing objects by a command of its configuration
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


class Repository:
    """The repository of one unpacked image."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.path, self._seconds = root / REPOSITORY / ".git", seconds
        if self.path.parent.is_symlink() or self.path.is_symlink() or not self.path.is_dir():
            raise ImageError("history", f"no repository at /{REPOSITORY}")
        if (self.path / "objects" / "info" / "alternates").exists():
            raise ImageError("history", "the repository borrows objects from another one")

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Let nobody write to the repository while the block runs, where this process is root."""
        if os.geteuid() != 0:
            yield
            return
        owner = self.path.stat()
        change_owner(self.path, jails.NOBODY, jails.NOBODY)
        yield
        change_owner(self.path, owner.st_uid, owner.st_gid)

    def git(self, *words: str) -> str:
        """Run git in a sandbox that sees the .git directory and the system's programs, and has no network."""
        with tempfile.TemporaryDirectory(prefix="sif-git-") as name:
            place = Path(name)
            place.chmod(0o711)
            work = place / "work"
            work.mkdir()
            command: list[str | Path] = [jails.AS_NOBODY, work, self.path, "--"]
            command += jails.repository(work / "0")
            # Only inside: outside, the limit would count what the user nobody runs elsewhere on the machine.
            command += ["prlimit", f"--nproc={MAX_PROCESSES}", "--", "git"]
            command += [word for setting in SETTINGS for word in ("-c", setting)]
            return run_program([*command, *words], seconds=self._seconds, environ=ENVIRONMENT, cause="history")

    def lines(self, *words: str) -> list[str]:
        """Return what git printed, by lines."""
        return self.git(*words).split("\n")[:-1]

    def commits(self, *words: str) -> set[str]:
        """Return the commits that `git rev-list` names."""
        return set(self.lines("rev-list", *words))


def change_owner(path: Path, uid: int, gid: int) -> None:
    """Give a directory and all below it to a user; follows no link."""
    os.chown(path, uid, gid, follow_symlinks=False)
    for directory, names, files, descriptor in os.fwalk(path, follow_symlinks=False):
        del directory
        for name in (*names, *files):
            os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)


def strip_history(root: Path, facts: Mapping[str, Any], *, seconds: float) -> None:
    """Leave only what the checked-out commit reaches; raises `ImageError` unless that is the instance's base commit."""
    repository = Repository(root, seconds)
    with repository.writable():
        head = repository.git("rev-parse", "--verify", "HEAD^{commit}").strip()
        require_base(repository, head, str(facts.get("base_commit") or ""))
        remove_later_history(repository, head)
        verify(repository, head)


def remove_later_history(repository: Repository, head: str) -> None:
    """Remove every reference but the branch of HEAD and tags that HEAD reaches, then what nothing reaches."""
    kept = repository.commits(head)
    branch = next(iter(repository.lines("rev-parse", "--symbolic-full-name", "HEAD")), "HEAD")
    for line in repository.lines("for-each-ref", "--format=%(objectname) %(*objectname) %(refname)"):
        *objects, name = line.split(" ")
        is_later = not any(entry in kept for entry in objects if entry)
        if name != branch and (is_later or not name.startswith("refs/tags/")):
            repository.git("update-ref", "--no-deref", "-d", name)
    for remote in repository.lines("remote"):
        repository.git("remote", "remove", remote)
    for name in LEFTOVERS:
        (repository.path / name).unlink(missing_ok=True)
    repository.git("reflog", "expire", "--expire=now", "--expire-unreachable=now", "--all")
    repository.git("repack", "-a", "-d", "-q")
    repository.git("prune", "--expire=now")


def require_base(repository: Repository, head: str, base: str) -> None:
    """Raise `ImageError` unless HEAD is the base commit, or the image's own set-up commit on top of it."""
    if not base:
        raise ImageError("history", "the row names no base commit")
    known = repository.commits(head)
    if base not in known:
        raise ImageError("history", f"HEAD {head[:12]} does not hold the base commit {base[:12]}")
    if len(repository.commits(f"{base}..{head}")) > MAX_SETUP_COMMITS:
        raise ImageError("history", f"HEAD {head[:12]} is beyond the base commit {base[:12]}")


def verify(repository: Repository, head: str) -> None:
    """Raise `ImageError` when the repository still has a commit or file that HEAD does not reach."""
    names = ("cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    present = {line.split(" ")[1] for line in repository.lines(*names) if not line.startswith("tag ")}
    reached = reachable(repository.lines("rev-list", "--objects", head))
    if left := present - reached:
        raise ImageError("history", f"{len(left)} objects beyond HEAD are left, such as {min(left)[:12]}")


def reachable(lines: Sequence[str]) -> set[str]:
    """Return the objects in the output of `git rev-list --objects`, which writes a path after some."""
    return {line.split(" ", 1)[0] for line in lines}


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
    (directory / "version").write_text(DIRECTORY_VERSION, encoding="utf-8")
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
    (place / "env" / "10-docker2singularity.sh").write_text(
        environment_script(config.get("Env") or []), encoding="utf-8"
    )
    (place / "labels.json").write_text(json.dumps(config.get("Labels") or {}, indent=2) + "\n", encoding="utf-8")
    command = [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])] or ["/bin/sh"]
    script = place / "runscript"
    script.write_text(f'#!/bin/sh\n[ $# -gt 0 ] && exec "$@"\nexec {shlex.join(command)}\n', encoding="utf-8")
    script.chmod(0o755)
    (place / "env" / "90-environment.sh").write_text("#!/bin/sh\n", encoding="utf-8")
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
